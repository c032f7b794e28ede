# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Log lines for loads that were not verified: rate-limited, with enough detail to act.

They tell the host that sent the KV and the blocks that differ, and go to the log of the
consumer's scheduler.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_checksum.naming import (
    MAX_GROUPS,
    positions_named,
    request_name,
    shortened,
)
from vllm.distributed.kv_transfer.kv_checksum.verdict import LoadVerdict
from vllm.logger import init_logger

logger = init_logger(__name__)

MAX_LINES = 10
"""Mismatches shown per window; the counters count all."""

WINDOW_S = 60.0

MAX_RANKS = 8
"""Ranks that one line names, per group."""

MAX_DETAIL_CHARS = 300
"""Length of the details in the debug line of a load that is not verified."""


class Reporter:
    """Logs mismatches, rate-limited, and each reason for unverified loads once.

    Args:
        clock: returns seconds that only grow.

    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._warned: set[str] = set()
        self._clock = clock
        self._window_ends = clock()
        self._shown = self._hidden = 0

    def warn_once(self, key: str, message: str, *args: object) -> None:
        """Log a warning unless one was logged under `key`."""
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(message, *args)

    def load(self, req_id: str, verdict: LoadVerdict, source: str, action: str) -> None:
        """Log a load that is not verified.

        Args:
            req_id: the request that loaded.
            verdict: the outcome of the comparison.
            source: the engine or store that the KV came from.
            action: what happens to the load.

        """
        req_id = request_name(req_id)
        if verdict.mismatched:
            if self._may_show():
                logger.error(
                    "KV checksum mismatch: request %s, %s, %s; %s",
                    req_id,
                    source,
                    _differences(verdict),
                    action,
                )
            return
        reason = verdict.reason
        assert reason is not None
        logger.debug(
            "KV load of request %s not verified: %s (%s)",
            req_id,
            reason.value,
            verdict.explanation[:MAX_DETAIL_CHARS],
        )
        self.warn_once(
            f"load:{reason.value}",
            "KV checksums not verified: %s (first for request %s, %s; %s)",
            reason.value,
            req_id,
            source,
            action,
        )

    def tick(self) -> None:
        """Log how many lines were hidden in a window that has ended.

        Call this once per step.
        """
        if self._hidden and self._clock() >= self._window_ends:
            self._log_hidden()

    def _may_show(self) -> bool:
        now = self._clock()
        if now >= self._window_ends:
            self._log_hidden()
            self._window_ends, self._shown = now + WINDOW_S, 0
        if self._shown < MAX_LINES:
            self._shown += 1
            return True
        if not self._hidden:
            logger.error(
                "KV checksum mismatches: more than %d within %d s, further ones are "
                "counted and not shown until these are over",
                MAX_LINES,
                WINDOW_S,
            )
        self._hidden += 1
        return False

    def _log_hidden(self) -> None:
        if self._hidden:
            logger.error("KV checksum mismatches: %d more were not shown", self._hidden)
            self._hidden = 0


def remote_engine(params: dict[str, Any]) -> str:
    """Describe the engine that sent a load, from its ``kv_transfer_params``."""
    engine = params.get("remote_engine_id")
    known = [
        "an unknown engine" if engine is None else f"remote engine {shortened(engine)}"
    ]
    address = _address(params)
    if address is not None:
        known.append(f"at {shortened(address)}")
    for key in ("transfer_id", "remote_request_id"):
        if params.get(key) is not None:
            known.append(f"({key} {shortened(params[key])})")
    return " ".join(known)


def _differences(verdict: LoadVerdict) -> str:
    if verdict.other_prompt:
        return "another request's KV: it was computed for another prompt"
    bad = {i: group for i, group in verdict.groups.items() if group.positions}
    said = [
        f"group {group_id}: {len(group.positions)} of {group.compared} blocks differ"
        f"{_several(group.positions)}, "
        + ", ".join(
            f"position {d.position} sent {d.expected:016x} loaded {d.found:016x}"
            for d in group.samples
        )
        + _ranks_named(group.ranks)
        for group_id, group in list(bad.items())[:MAX_GROUPS]
    ]
    if len(bad) > MAX_GROUPS:
        said.append(f"{len(bad) - MAX_GROUPS} more groups")
    return "; ".join(said)


def _ranks_named(ranks: Sequence[tuple[int, int]]) -> str:
    """Name the workers here that hold what differs, or none."""
    if not ranks:
        return ""
    said = [f"PP {pp} TP {tp}" for pp, tp in ranks[:MAX_RANKS]]
    if len(ranks) > MAX_RANKS:
        said.append(f"{len(ranks) - MAX_RANKS} more")
    return f", on ranks {', '.join(said)} here"


def _several(positions: list[int]) -> str:
    """Format several positions in brackets; the sample shows a single one."""
    return f" ({positions_named(positions)})" if len(positions) > 1 else ""


def _address(params: dict[str, Any]) -> object:
    """Return the remote engine's address: NIXL's host and port, or Mooncake's URL."""
    if params.get("remote_bootstrap_addr") is not None:
        return params["remote_bootstrap_addr"]
    if params.get("remote_host") is None:
        return None
    return f"{shortened(params['remote_host'])}:{shortened(params.get('remote_port'))}"
