"""Run the package index's ``vllm-router`` between a P and a D of NIXL."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from rig import processes
from rig.model import CACHE
from rig.servers import HOST, Server, free_port


@contextlib.contextmanager
def vllm_router(
    p: Server,
    d: Server,
    timeout: float = 60,
    log: Path = CACHE / "logs" / "vllm-router.log",
) -> Iterator[httpx.Client]:
    """Run the router until the block ends; yield a client of it. Raises if it does not come up."""
    port, metrics = free_port(), free_port()
    line = [str(Path(sys.executable).parent / "vllm-router")]
    line += ["--host", HOST, "--port", str(port), "--prometheus-port", str(metrics)]
    line += ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    line += ["--policy", "round_robin", "--disable-retries"]
    for role, server in (("prefill", p), ("decode", d)):
        line += [f"--{role}", f"http://{HOST}:{server.port}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            line,
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    guard = processes.guard(process.pid)
    client = httpx.Client(
        base_url=f"http://{HOST}:{port}", trust_env=False, timeout=120
    )
    try:
        with client:
            _wait(client, process, log, timeout)
            yield client
    finally:
        processes.end(process.pid, polite_s=3)
        process.wait(5)
        processes.dismiss(guard)


def _wait(
    client: httpx.Client, process: subprocess.Popen[bytes], log: Path, timeout: float
) -> None:
    """Wait until the router and both servers behind it are ready."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if client.get("/readiness").status_code == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"vllm-router is not ready: {log.read_text()[-1000:]}")
