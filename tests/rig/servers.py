"""Start real ``vllm serve`` processes in parallel, ask them over HTTP, and end them with nothing left behind."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import httpx
import psutil

from rig import processes, verdicts
from rig.forkserver import ForkedProcess, ForkServer
from rig.metrics import Samples, parse, total
from rig.model import CACHE
from vllm_kv_checksum.apply import find_package

SERVED_NAME = "tiny"
HOST = "127.0.0.1"


ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    # With several TP ranks each would compile the embedding's mask in its first step: 4 s of CPU.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_CI_ENV": "1",
    "UCX_TLS": "tcp,self,sm",
    "VLLM_HOST_IP": HOST,
    "GLOO_SOCKET_IFNAME": "lo",
    "MC_FORCE_TCP": "1",
    # Mooncake's queues of TCP transfers: the default is shorter than one long load.
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "60000",
    "PYTHONHASHSEED": "0",
    "KV_CHECKSUM_RIG_LOADED": "1",
    "VLLM_CACHE_ROOT": str(CACHE / "vllm-cache"),
}

NIXL = {"kv_buffer_device": "cpu"}
CONNECTOR_CONFIG: dict[str, dict[str, Any]] = {
    "NixlConnector": NIXL,
    "NixlPushConnector": NIXL,
    "MooncakeConnector": {
        "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
    },
}
"""What a connector needs in ``--kv-transfer-config`` on a machine without a GPU."""


def older_vllm() -> dict[str, str]:
    """Return what makes a process import the vLLM that this one does, if that is not the environment's (`rig.older`)."""
    folder = find_package(None).parent
    environments_own = folder.is_relative_to(Path(sys.prefix).resolve())
    return {} if environments_own else {"PYTHONPATH": str(folder)}


_given_ports: set[int] = set()
_running: list[Server] = []
_lock = threading.RLock()


class ServerError(RuntimeError):
    """A server died or did not come up; the message holds what its log says about it."""


PORTS = range(20000, 32000)
"""Below the range from which the kernel takes ports of outgoing connections: a port of that range, free now, may be taken
before the server that it was meant for binds it."""


def own_ports() -> range:
    """Return the share of ``PORTS`` of this process among pytest's workers.

    A server may start long after it was given its port. Another worker's server on it would answer in its place.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    size = len(PORTS) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return PORTS[worker * size : (worker + 1) * size]


def free_port() -> int:
    """Return a port that is free now and that this process has not handed out before."""
    while True:
        port = random.SystemRandom().choice(own_ports())
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            with _lock:
                if port not in _given_ports:
                    _given_ports.add(port)
                    return port


class Server:
    """One vLLM instance.

    ``role`` is ``kv_producer``, ``kv_consumer``, ``kv_both``, or None for an instance without a connector.
    ``transfer`` adds to or overrides the keys of ``--kv-transfer-config``, where ``kv_connector`` may name a class that
    wraps ``connector``; ``args`` and ``env`` add to the command line and the environment. With ``fork_server`` the
    process is forked from it, which starts faster; without, it is a plain ``vllm serve``. The folders ``tables`` and
    ``damage`` are where it tells what it holds and is told what to damage (``checksum_tables``, ``rig.tampering``).
    """

    def __init__(
        self,
        name: str,
        role: str | None,
        *,
        model: Path,
        port: int | None = None,
        connector: str = "NixlConnector",
        transfer: Mapping[str, Any] | None = None,
        tp: int = 1,
        pp: int = 1,
        dp: int = 1,
        block_size: int = 32,
        dtype: str = "bfloat16",
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log_dir: Path = CACHE / "logs",
        fork_server: ForkServer | None = None,
    ) -> None:
        self.name, self.role, self.model = name, role, model
        self.tp, self.pp, self.dp = tp, pp, dp
        self.connector, self.transfer = connector, dict(transfer or {})
        self.block_size, self.dtype, self.args = block_size, dtype, tuple(args)
        self.env = dict(env or {})
        self.port = port or free_port()
        self.bootstrap_port = free_port()
        self.log = log_dir / f"{name}.log"
        self.tables = log_dir / f"{name}.tables"
        self.damage = log_dir / f"{name}.damage"
        self.ready_s: float | None = None
        self.killed = False
        self._fork_server = fork_server
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        # A connection for each request: many threads ask at once, and none waits for another's.
        self._client = httpx.Client(
            base_url=f"http://{HOST}:{self.port}",
            trust_env=False,
            timeout=240,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    def command(self) -> list[str]:
        """Return the command line."""
        line = [str(Path(sys.executable).parent / "vllm"), "serve", str(self.model)]
        line += [
            "--host",
            HOST,
            "--port",
            str(self.port),
            "--served-model-name",
            SERVED_NAME,
            "--seed",
            "0",
        ]
        line += ["--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8"]
        line += [
            "--kv-cache-memory-bytes",
            str(64 << 20),
            "--enable-prompt-tokens-details",
        ]
        line += ["--block-size", str(self.block_size), "--dtype", self.dtype]
        sizes = {"tensor": self.tp, "pipeline": self.pp, "data": self.dp}
        for option, size in sizes.items():
            if size > 1:
                line += [f"--{option}-parallel-size", str(size)]
        if self.tp * self.pp > 1:
            line += ["--distributed-executor-backend", "mp"]
        if self.role is not None:
            line += ["--kv-transfer-config", json.dumps(self.transfer_config())]
        return [*line, *self.args]

    def transfer_config(self) -> dict[str, Any]:
        """Return ``--kv-transfer-config``; the connector's own extra configuration is kept beside the caller's."""
        needs = CONNECTOR_CONFIG.get(self.connector, {})
        config = {
            "kv_connector": self.connector,
            "kv_role": self.role,
            **needs,
            **self.transfer,
        }
        extra = "kv_connector_extra_config"
        if extra in config:
            config[extra] = {**needs.get(extra, {}), **self.transfer.get(extra, {})}
        return {key: value for key, value in config.items() if value is not None}

    @property
    def checks_loads(self) -> bool:
        """Return whether KV checksums are on."""
        on = self.transfer_config().get("enable_kv_checksum", False)
        return self.role is not None and on is True

    def environment(self) -> dict[str, str]:
        """Return the environment of the process."""
        inherited = {
            k: v
            for k, v in os.environ.items()
            if k not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")
        }
        ports = {
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(self.bootstrap_port),
            "KV_CHECKSUM_RIG_TABLES": str(self.tables),
            "KV_CHECKSUM_RIG_DAMAGE": str(self.damage),
        }
        alone = self.tp * self.pp * self.dp == 1
        single = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if alone else {}
        # vLLM gives each data parallel rank a NUMA node of its own, unless this is set, to whatever.
        shared = {"VLLM_CPU_SIM_MULTI_NUMA": "0"} if self.dp > 1 else {}
        return {
            **inherited,
            **ENVIRONMENT,
            **older_vllm(),
            **ports,
            **single,
            **shared,
            **self.env,
        }

    def start(self) -> Server:
        """Start the process in a session of its own and return at once."""
        if self._process is not None:
            raise ServerError(f"{self.name} was started already")
        for folder in (self.tables, self.damage):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        _watch_signals()
        self._began = time.monotonic()
        self._process = self._launch()
        self._guard = processes.guard(self._process.pid)
        with _lock:
            _running.append(self)
        return self

    def _launch(self) -> subprocess.Popen[bytes] | ForkedProcess:
        """Start the process, outside the repository so that no folder of it can shadow a package."""
        if self._fork_server is not None:
            return self._fork_server.launch(
                self.command(), self.environment(), self.log
            )
        with self.log.open("wb") as log:
            return subprocess.Popen(
                self.command(),
                cwd=self.log.parent,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def alive(self) -> bool:
        """Tell whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def family(self, known: Iterable[psutil.Process] = ()) -> set[psutil.Process]:
        """Return the server's living processes, with those of ``known`` that live, whoever their parent is now."""
        if self._process is None:
            return set()
        return processes.family(self._process.pid, known)

    def kill(self, victims: set[psutil.Process] | None = None) -> None:
        """Kill the server, or these processes of it, on purpose."""
        self.killed = True
        processes.send(victims or self.family(), signal.SIGKILL)

    def wait_ended(self, timeout: float) -> int:
        """Wait until the server ends by itself, with everything it started, and return its exit status."""
        members = self.family()
        while self.alive() or (members := self.family(members)):
            if time.monotonic() - self._began > timeout:
                raise ServerError(f"{self.name} did not end\n{self.log_errors()}")
            time.sleep(0.1)
        assert self._process is not None and self._process.returncode is not None
        return self._process.returncode

    def wait_ready(self, timeout: float = 240) -> Server:
        """Wait until the server answers; raise with the log's errors if it dies or takes too long."""
        while time.monotonic() - self._began < timeout:
            if not self.alive():
                code = self._process.returncode if self._process else None
                raise ServerError(
                    f"{self.name} died (exit {code}) before it was ready\n{self.log_errors()}"
                )
            with contextlib.suppress(httpx.HTTPError):
                if self._client.get("/health", timeout=2).status_code == 200:
                    self.ready_s = time.monotonic() - self._began
                    return self
            time.sleep(0.2)
        raise ServerError(
            f"{self.name} was not ready after {timeout:.0f} s\n{self.log_errors()}"
        )

    def post(
        self, path: str, *, headers: Mapping[str, str] | None = None, **body: Any
    ) -> httpx.Response:
        """Post a JSON body and return the response, whatever its status."""
        return self._client.post(path, json=body, headers=dict(headers or {}))

    def completions(
        self,
        prompt: str | Sequence[int],
        max_tokens: int,
        kv_transfer_params: Mapping[str, Any] | None = None,
        *,
        request_id: str | None = None,
        dp_rank: int | None = None,
        **body: Any,
    ) -> httpx.Response:
        """Ask for a greedy completion (override by keyword) and return the response, whatever its status.

        ``dp_rank`` is the data parallel rank that is to serve it; vLLM chooses if there is none.
        """
        asked = _completion(prompt, max_tokens, kv_transfer_params, body)
        headers = {"X-Request-Id": request_id} if request_id else {}
        if dp_rank is not None and self.dp > 1:
            headers["X-data-parallel-rank"] = str(dp_rank)
        return self.post("/v1/completions", headers=headers, **asked)

    def streamed(
        self,
        prompt: str | Sequence[int],
        max_tokens: int,
        kv_transfer_params: Mapping[str, Any] | None = None,
        *,
        request_id: str,
        patience_s: float = 240,
        **body: Any,
    ) -> contextlib.AbstractContextManager[httpx.Response]:
        """Ask as ``completions`` does and let the caller read the answer; leaving the block leaves the server.

        ``patience_s`` bounds the wait for every part of the answer: ``httpx.ReadTimeout`` after that.
        """
        asked = _completion(prompt, max_tokens, kv_transfer_params, body)
        return self._client.stream(
            "POST",
            "/v1/completions",
            json=asked,
            headers={"X-Request-Id": request_id},
            timeout=patience_s,
        )

    def metrics(self) -> Samples:
        """Return every sample of /metrics by name and labels."""
        return parse(self._client.get("/metrics").raise_for_status().text)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of this name that carry these labels; 0 if there are none."""
        return total(self.metrics(), name, **labels)

    def checksum_tables(self, timeout: float = 20) -> dict[str, int]:
        """Return what its processes hold for checksums, by name (rig package, ``tables.py``); summed over processes."""
        folder = self.tables
        number = len(list(folder.glob("ask-*")))
        (folder / f"ask-{number}").touch()
        deadline = time.monotonic() + timeout
        while silent := self._silent_processes(number):
            if time.monotonic() > deadline:
                raise ServerError(
                    f"{self.name} did not tell its tables (processes {silent})"
                )
            time.sleep(0.1)
        total: dict[str, int] = {}
        for answer in folder.glob(f"{number}-*.json"):
            for name, size in json.loads(answer.read_text()).items():
                total[name] = total.get(name, 0) + size
        return total

    def _silent_processes(self, number: int) -> list[str]:
        """Return processes that live and did not answer question ``number`` yet; vLLM's model inspection ends early."""
        told = [path.name.split("-")[1] for path in self.tables.glob("process-*")]
        return [
            pid
            for pid in told
            if not (self.tables / f"{number}-{pid}.json").exists()
            and psutil.pid_exists(int(pid))
        ]

    def log_text(self) -> str:
        """Return everything the server has written."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_errors(self, limit: int = 20) -> str:
        """Return the log's lines that tell of errors, or its end if there are none."""
        lines = self.log_text().splitlines()
        telling = [
            line
            for line in lines
            if "Error" in line or "Exception" in line or "error:" in line
        ]
        return (
            "\n".join(line[:400] for line in (telling or lines)[-limit:])
            + f"\n(log: {self.log})"
        )

    def stop(self) -> None:
        """End the server and everything it started. Safe to call again."""
        with _lock:
            if self in _running:
                _running.remove(self)
        self._client.close()
        if self._process is not None:
            processes.end(self._process.pid, polite_s=8)
            self._process.poll()
        if self._guard is not None:
            processes.dismiss(self._guard)
            self._guard = None

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _completion(
    prompt: str | Sequence[int],
    max_tokens: int,
    kv_transfer_params: Mapping[str, Any] | None,
    body: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the body of a request for a greedy completion."""
    asked: dict[str, Any] = {
        "model": SERVED_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    if kv_transfer_params is not None:
        asked["kv_transfer_params"] = dict(kv_transfer_params)
    return {**asked, **body}


def fork_server(
    log_dir: Path = CACHE / "logs", env: Mapping[str, str] | None = None
) -> ForkServer:
    """Start a fork server whose imports happen under the servers' environment and ``env``."""
    inherited = {
        k: v
        for k, v in os.environ.items()
        if k not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")
    }
    return ForkServer(
        {**inherited, **ENVIRONMENT, **older_vllm(), **(env or {})},
        log_dir / "forkserver.log",
    )


@contextlib.contextmanager
def serving(*servers: Server, timeout: float = 240) -> Iterator[None]:
    """Start the servers at the same time, wait until all are ready, and stop them at the end.

    Raises:
        AssertionError: what `rig.verdicts` asks of loads does not hold at the end.

    """
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready(timeout)
        yield
        verdicts.check(servers)
    finally:
        stop_all(servers)


def retire(servers: Sequence[Server]) -> None:
    """Stop servers before their block ends, and ask of their loads what is asked there.

    Raises:
        AssertionError: as `serving`.

    """
    verdicts.check(servers)
    stop_all(servers)
    for server in servers:
        server.killed = True


def stop_all(servers: Sequence[Server] | None = None) -> None:
    """Stop these servers, or all that this process started, at the same time."""
    with _lock:
        targets = list(_running if servers is None else servers)
    threads = [threading.Thread(target=server.stop) for server in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _watch_signals() -> None:
    """Make SIGTERM end the servers too, where nobody else handles it; SIGINT ends in the atexit hook."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _stop_and_die)


def _stop_and_die(number: int, frame: FrameType | None) -> None:
    """End the servers, then this process as the signal would have."""
    for server in list(_running):
        server.stop()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


atexit.register(stop_all)
