"""Find and end everything that a server started, whatever process group it moved to."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def family(leader: int, known: Iterable[psutil.Process] = ()) -> set[psutil.Process]:
    """Return the living processes of the leader's session, of ``known``, and all their descendants."""
    found = {process for process in known if process.is_running()}
    found |= {p for p in psutil.process_iter() if leader in (p.pid, _session(p.pid))}
    for process in list(found):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(process.children(recursive=True))
    return {process for process in found if _lives(process)}


def _session(pid: int) -> int | None:
    """Return the session of a process, which psutil does not tell."""
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid)
    return None


def _lives(process: psutil.Process) -> bool:
    """Tell whether a process runs; one that only waits to be reaped does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() not in ENDED
    return False


def _is_stopped(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_STOPPED


def send(targets: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Signal each process that is still the one meant."""
    for target in targets:
        with contextlib.suppress(psutil.NoSuchProcess):
            target.send_signal(number)


@contextlib.contextmanager
def stopped(targets: Iterable[psutil.Process]) -> Iterator[None]:
    """Let none of them run in the block, and all of them after it.

    Raises:
        AssertionError: one runs on, 10 seconds after it was told to stop.

    """
    targets = list(targets)
    send(targets, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + 10
        while running := [p for p in targets if _lives(p) and not _is_stopped(p)]:
            assert time.monotonic() < deadline, f"not stopped: {running}"
            time.sleep(0.02)
        yield
    finally:
        send(targets, signal.SIGCONT)


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


def lead_session(log: Path) -> None:
    """Make this forked process the leader of a session of its own, and ``log`` the file of its output."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)


def guard(leader: int) -> subprocess.Popen[bytes]:
    """Start a process that ends the leader's family when this process is gone, however it ended.

    It waits for its standard input to close; kill it once the family has been ended otherwise.
    """
    # Without site: what .pth files import would make it large and slow.
    packages = str(Path(psutil.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-S", str(Path(__file__).resolve()), str(leader)],
        env={**os.environ, "PYTHONPATH": packages},
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
