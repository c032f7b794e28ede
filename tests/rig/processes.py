"""Finding and ending everything that a server started, whatever process group it moved to."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process, told from a later one with the same number by its start time."""

    pid: int
    started: int


@dataclass(frozen=True)
class _Row:
    """What /proc/PID/stat says."""

    state: str
    parent: int
    session: int
    process: Process


def _table() -> dict[int, _Row]:
    """Return every process of the machine."""
    rows = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = (
                (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            )
            process = Process(int(entry.name), int(fields[19]))
            rows[process.pid] = _Row(fields[0], int(fields[1]), int(fields[3]), process)
    return rows


def family(leader: int, known: set[Process] | None = None) -> set[Process]:
    """Return the living processes of the leader's session, of ``known``, and all their descendants."""
    table = _table()
    remembered = known or set()
    found = {
        pid
        for pid, row in table.items()
        if pid == leader or row.session == leader or row.process in remembered
    }
    grew = True
    while grew:
        children = {pid for pid, row in table.items() if row.parent in found} - found
        found |= children
        grew = bool(children)
    return {table[pid].process for pid in found if table[pid].state not in "ZX"}


def send(targets: set[Process], number: signal.Signals) -> None:
    """Signal each process that is still the one meant."""
    table = _table()
    for target in targets:
        row = table.get(target.pid)
        if row is not None and row.process == target:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target.pid, number)


def end(leader: int, polite_s: float) -> None:
    """End a session's leader politely, then whatever is left of its family by force."""
    members = family(leader)
    if any(member.pid == leader for member in members):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGTERM)
    deadline = time.monotonic() + polite_s
    while (members := family(leader, members)) and time.monotonic() < deadline:
        time.sleep(0.05)
    deadline = time.monotonic() + 10
    while (members := family(leader, members)) and time.monotonic() < deadline:
        send(members, signal.SIGKILL)
        time.sleep(0.05)
    if members:
        raise RuntimeError(
            f"processes survived SIGKILL: {sorted(member.pid for member in members)}"
        )


def guard(leader: int) -> subprocess.Popen[bytes]:
    """Start a process that ends the leader's family when this process is gone, however it ended.

    It waits for its standard input to close; kill it once the family has been ended otherwise.
    """
    return subprocess.Popen(
        [sys.executable, "-S", "-E", str(Path(__file__).resolve()), str(leader)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def dismiss(guardian: subprocess.Popen[bytes]) -> None:
    """End a guard that has nothing left to do."""
    guardian.kill()
    guardian.communicate()


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end(int(sys.argv[1]), polite_s=3)
