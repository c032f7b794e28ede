"""Fork servers from one process that has imported vLLM: seconds instead of half a minute each.

The command line and the code of a forked server are those of ``vllm serve``. One thing differs, and is to be
named where a result is quoted: worker processes are forked too, where vLLM would spawn them.

``ForkServer`` is the client's side; ``python -m rig.forkserver FD`` is the other, which answers one JSON line
with another over an inherited socket and ends when that closes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rig import processes

TESTS = Path(__file__).resolve().parent.parent

IMPORTS = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.openai",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.cli.launch",
    "vllm.entrypoints.cli.benchmark.main",
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu.model_runner",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.registry",
    "vllm.model_executor.models.qwen3",
    "transformers.models.auto",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl",
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector",
)


class ForkedProcess:
    """A process forked by the fork server, with the part of Popen's interface that a Server uses."""

    def __init__(self, owner: ForkServer, pid: int) -> None:
        self._owner = owner
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        if self.returncode is None:
            try:
                self.returncode = self._owner.ask(poll=self.pid)["code"]
            except (OSError, ValueError):
                self.returncode = (
                    -signal.SIGKILL
                )  # the fork server is gone, so this is as good as lost
        return self.returncode


class ForkServer:
    """Starts the importing process; use as a context manager, after the servers that depend on it are known."""

    def __init__(self, env: Mapping[str, str], log: Path) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rig.forkserver", str(theirs.fileno())],
                cwd=TESTS,
                env=dict(env),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._replies = self._socket.makefile("r")
        self._log = log

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and return the reply; the first one waits for the imports."""
        with self._lock:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            line = self._replies.readline()
        if not line:
            raise OSError(f"the fork server ended; see {self._log}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def launch(
        self, command: Sequence[str], env: Mapping[str, str], log: Path
    ) -> ForkedProcess:
        """Fork a ``vllm`` command, in a session of its own."""
        reply = self.ask(argv=list(command), env=dict(env), log=str(log))
        return ForkedProcess(self, int(reply["pid"]))

    def close(self) -> None:
        """End the fork server; the servers forked from it are stopped by their owners."""
        self._socket.close()
        self._replies.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        processes.end(self._process.pid, polite_s=1)
        self._process.wait(5)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _fork_instead_of_spawn() -> None:
    """Make vLLM fork its workers: a spawned one would import everything again."""
    import multiprocessing

    utils: Any = importlib.import_module("vllm.utils.system_utils")
    stock = utils.get_mp_context
    # vLLM before 0.33.0 does not do that.
    release_threads = getattr(utils, "_release_libgomp_threads", lambda: None)

    def forking() -> Any:
        release_threads()
        return multiprocessing.get_context("fork")

    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and vars(module).get("get_mp_context") is stock:
            module.get_mp_context = forking  # type: ignore[attr-defined]


def _set_log_level() -> None:
    """Log as the environment says: vLLM before 0.31.0 reads it only when it is imported."""
    logger = logging.getLogger("vllm")
    level = os.environ.get("VLLM_LOGGING_LEVEL", "INFO")
    logger.setLevel(level)
    for handler in logger.handlers:
        handler.setLevel(level)


def _become_server(request: dict[str, Any], run: Callable[[], object]) -> None:
    """Turn the forked process into the server; never returns."""
    code = 1
    try:
        processes.lead_session(Path(request["log"]))
        os.chdir(Path(request["log"]).parent)
        os.environ.clear()
        os.environ.update(request["env"])
        sys.argv = request["argv"]
        _set_log_level()
        run()
        code = 0
    except SystemExit as leaving:
        code = (
            leaving.code
            if isinstance(leaving.code, int)
            else int(leaving.code is not None)
        )
    except BaseException:  # noqa: BLE001 - the process ends here, the log is where it can be told
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _exit_status(pid: int) -> int | None:
    """Return the exit status of a child, or None while it runs."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return -signal.SIGKILL
    return os.waitstatus_to_exitcode(status) if found else None


def main() -> None:
    """Import, then fork on request until the client is gone."""
    with socket.socket(fileno=int(sys.argv[1])) as link:
        sys.path[:] = [entry for entry in sys.path if entry not in ("", str(TESTS))]
        for name in IMPORTS:
            importlib.import_module(name)
        run = importlib.import_module("vllm.entrypoints.cli.main").main
        _fork_instead_of_spawn()
        gc.collect()
        gc.freeze()
        requests = link.makefile("r")
        for line in requests:
            request = json.loads(line)
            reply: dict[str, Any] = {}
            if "poll" in request:
                reply["code"] = _exit_status(request["poll"])
            elif "argv" in request:
                pid = os.fork()
                if pid == 0:
                    requests.close()
                    link.close()
                    _become_server(request, run)
                reply["pid"] = pid
            link.sendall(json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main()
