# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Keep the last mismatches, and write them to files for whoever looks into them.

A line holds what was compared, and neither tokens nor KV. Files are written by a thread
of their own, so that a disk that is slow or full holds up no step.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from pathlib import Path
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_checksum.naming import request_name
from vllm.distributed.kv_transfer.kv_checksum.scheduler.peers import peer_of
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_checksum.scheduler.pending import PendingLoad
    from vllm.distributed.kv_transfer.kv_checksum.verdict import (
        GroupVerdict,
        LoadVerdict,
    )

logger = init_logger(__name__)

MAX_MISMATCHES = 256
"""Mismatches kept in memory, and at most those that wait to be written."""

MAX_FILE_BYTES = 4 * 2**20
"""Size at which a file becomes the old one of its process; that one is replaced."""

MAX_FILES = 64
"""Files in the directory; a process that makes a new one removes the oldest."""

_MAX_POSITIONS = 256
_MAX_GROUPS = 16
_NAME = "kv_checksum_mismatches"


class Evidence:
    """Keeps mismatches in memory, and writes them as JSON lines where told.

    Args:
        directory: where files are written; None for nowhere.

    """

    def __init__(self, directory: str | None) -> None:
        self.recent: deque[dict[str, Any]] = deque(maxlen=MAX_MISMATCHES)
        self._directory = None if directory is None else Path(directory)
        self._waiting: deque[dict[str, Any]] = deque()
        self._lost = 0
        self._changed = Condition()
        self._thread: Thread | None = None
        self._is_busy = False
        self._warned = False

    def add(self, load: PendingLoad, verdict: LoadVerdict, action: str) -> None:
        """Keep a load if it is a mismatch; it is written in the background.

        Args:
            load: the load, which has ended.
            verdict: the outcome of the comparison.
            action: what happens to the load.

        """
        if not verdict.mismatched:
            return
        entry = _entry(load, verdict, action)
        self.recent.append(entry)
        if self._directory is None:
            return
        with self._changed:
            if len(self._waiting) == MAX_MISMATCHES:
                self._waiting.popleft()
                self._lost += 1
            self._waiting.append(entry)
            self._changed.notify()
        if self._thread is None:
            self._thread = Thread(target=self._run, name="kv-checksum-evidence")
            self._thread.daemon = True
            self._thread.start()

    def flush(self, timeout: float) -> bool:
        """Wait until nothing waits to be written; tell whether that is so."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and not self._is_busy, timeout
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting)
                entry, self._is_busy = self._waiting.popleft(), True
                lost, self._lost = self._lost, 0
            if lost:
                entry = {**entry, "lost_before": lost}
            try:
                self._write(json.dumps(entry))
            except Exception as error:
                self._warn(error)

    def _write(self, line: str) -> None:
        assert self._directory is not None
        path = self._directory / f"{_NAME}.{os.uname().nodename}.{os.getpid()}.jsonl"
        if path.exists() and path.stat().st_size + len(line) >= MAX_FILE_BYTES:
            path.replace(path.with_suffix(".old.jsonl"))
        if not path.exists():
            _make_room(self._directory)
        with path.open("a") as file:
            file.write(line + "\n")

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "KV checksum mismatches are not written to %s "
                "(kv_checksum_evidence_dir), which is said once: %s",
                self._directory,
                error,
            )


def _make_room(directory: Path) -> None:
    """Remove the oldest files, so that one more makes at most `MAX_FILES`."""
    files = list(directory.glob(f"{_NAME}.*.jsonl"))
    files.sort(key=_changed_at)
    for file in files[: max(0, len(files) + 1 - MAX_FILES)]:
        file.unlink(missing_ok=True)


def _changed_at(file: Path) -> float:
    """Return when a file was written last; another process may just have removed it."""
    return file.stat().st_mtime if file.exists() else 0.0


def _entry(load: PendingLoad, verdict: LoadVerdict, action: str) -> dict[str, Any]:
    peer = peer_of(load)
    bad = {i: group for i, group in verdict.groups.items() if group.positions}
    return {
        "time": time.time(),
        "request_id": request_name(load.req_id),
        "peer_engine": peer and peer.engine,
        "peer_host": peer and peer.host,
        "connector": load.connector,
        "carrier": load.carrier and load.carrier.value,
        "other_prompt": verdict.other_prompt,
        "num_tokens": load.blocks.num_tokens,
        "num_bad_groups": len(bad),
        "groups": {i: _of_group(bad[i]) for i in list(bad)[:_MAX_GROUPS]},
        "action": action,
    }


def _of_group(group: GroupVerdict) -> dict[str, Any]:
    return {
        "compared": group.compared,
        "mismatched": len(group.positions),
        "positions": group.positions[:_MAX_POSITIONS],
        "ranks_here": group.ranks[:_MAX_POSITIONS],
        "samples": [
            {
                "position": d.position,
                "expected": f"{d.expected:016x}",
                "found": f"{d.found:016x}",
            }
            for d in group.samples
        ],
    }
