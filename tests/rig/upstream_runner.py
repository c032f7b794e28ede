"""Run test files of vLLM's, each in a process forked from one that has imported vLLM and the tests' conftest.

``python upstream_runner.py RESULTS TIMEOUT STEM=FILE[::WORD]...``, in the folder that holds ``tests``: per file a line
of progress, its output in ``RESULTS/STEM.log``, and in ``RESULTS/STEM.jsonl`` a JSON line ``[test, outcome]`` per test and phase as it ends, so
that what passed before a time-out counts.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import socket
import struct
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

OURS = str(Path(__file__).resolve().parent.parent)
sys.path.insert(0, OURS)
from rig import processes, progress  # noqa: E402

sys.path.remove(OURS)

IMPORTS = (
    "tests.conftest",
    "vllm.entrypoints.llm",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu.kv_connector",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
)
POLL_S = 0.2


class Recorder:
    """A pytest plugin that writes down every outcome at once, and keeps what was imported out of collections."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def pytest_collection_finish(self) -> None:
        """Freeze what stays to the end: vLLM's tests collect garbage behind each test, half a second of it."""
        gc.collect()
        gc.freeze()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write a failure of any phase, and the call's outcome."""
        outcome = "xpassed" if hasattr(report, "wasxfail") else report.outcome
        if report.when == "call" or outcome != "passed":
            self._file.write(json.dumps([report.nodeid, outcome]) + "\n")
            self._file.flush()


def bring_up_loopback() -> None:
    """Switch the loopback interface on, which is off in a new network namespace."""
    set_flags, up_and_running = 0x8914, 0x41
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", up_and_running)
        try:
            fcntl.ioctl(any_socket, set_flags, request)
        except PermissionError:
            return  # not ours, so it is on


def run_file(stem: str, name: str, results: Path, timeout: float) -> str:
    """Fork, run one file, and say what came out."""
    record, log = results / f"{stem}.jsonl", results / f"{stem}.log"
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _become_pytest(name, record, log)
    status = None
    while status is None and time.monotonic() - began < timeout:
        time.sleep(POLL_S)
        found, code = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if found else None
    processes.end(pid, polite_s=0)
    if status is None:
        os.waitpid(pid, 0)
    lines = record.read_text().splitlines() if record.exists() else []
    counts = Counter(json.loads(line)[1] for line in lines)
    told = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))
    ended = "" if status in (0, 1) else f", ended with {status}"
    if status is None:
        ended = ", out of time"
    return f"{told or 'no tests'}{ended}, {time.monotonic() - began:.0f} s"


def _become_pytest(name: str, record: Path, log: Path) -> None:
    """Turn the forked process into pytest; never returns."""
    code = 3
    try:
        processes.lead_session(log)
        import pytest

        file, _, word = name.partition("::")
        options = [f"tests/{file}", "-q", "-p", "no:cacheprovider", "-k", word]
        code = int(pytest.main(options, plugins=[Recorder(record)]))
    except BaseException:  # noqa: BLE001 - the process ends here, the log is where it can be told
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Import, then run every file."""
    results, timeout, *names = sys.argv[1:]
    bring_up_loopback()
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).parent)]
    for name in IMPORTS:
        importlib.import_module(name)
    # vLLM's own clean-up thaws all objects first, each time.
    gc.unfreeze = lambda: None
    gc.collect()
    gc.freeze()
    with progress.bar(len(names), "vLLM's tests", "file") as bar:
        for number, item in enumerate(names, 1):
            stem, _, name = item.partition("=")
            told = run_file(stem, name, Path(results), float(timeout))
            progress.say(f"[{number}/{len(names)}] {name}: {told}")
            bar.update()
    # Without a look back: extensions complain of what they leak.
    os._exit(0)


if __name__ == "__main__":
    main()
