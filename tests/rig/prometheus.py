"""Run Debian's Prometheus, where there is one: ``promtool``, and a server that scrapes and evaluates the rules."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import yaml

from rig import processes
from rig.model import CACHE
from rig.servers import HOST, Server, free_port

UNPACKED = CACHE / "prometheus"
HOW = "Debian's package prometheus is missing: run sudo apt-get update && make env, or sudo apt-get install prometheus"


def program(name: str) -> str | None:
    """Return the path of ``prometheus`` or ``promtool``: an installed one, or the one that ``make env`` unpacked."""
    unpacked = UNPACKED / "usr" / "bin" / name
    return shutil.which(name) or (str(unpacked) if unpacked.exists() else None)


class Prometheus:
    """A running Prometheus."""

    def __init__(self, port: int) -> None:
        self._client = httpx.Client(
            base_url=f"http://{HOST}:{port}", trust_env=False, timeout=10
        )

    def targets_up(self) -> int:
        """Return how many instances were scraped."""
        answer = self._client.get("/api/v1/query", params={"query": "sum(up)"}).json()
        result = answer["data"]["result"]
        return int(result[0]["value"][1]) if result else 0

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire."""
        alerts = self._client.get("/api/v1/alerts").json()["data"]["alerts"]
        return {a["labels"]["alertname"] for a in alerts if a["state"] == "firing"}

    def query_range(
        self, query: str, begin: float, end: float
    ) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """Return the series of a query, with a value for each second between two times."""
        params: dict[str, str | float] = {
            "query": query,
            "start": begin,
            "end": end,
            "step": 1,
        }
        answer = self._client.get("/api/v1/query_range", params=params).json()
        assert answer["status"] == "success", answer
        return [
            (series["metric"], [(float(t), float(v)) for t, v in series["values"]])
            for series in answer["data"]["result"]
        ]

    def wait_cleared(self, timeout: float) -> None:
        """Wait until no alert fires."""
        until = time.monotonic() + timeout
        while self.firing():
            if time.monotonic() > until:
                raise TimeoutError(f"{self.firing()} fire after {timeout:.0f} s")
            time.sleep(0.3)

    def wait(self, what: str, timeout: float = 30) -> None:
        """Wait until the alert fires, or, with "up", until all instances were scraped once."""
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
                if what in self.firing() or (what == "up" and self.targets_up()):
                    return
            time.sleep(0.3)
        raise TimeoutError(f"Prometheus did not see {what!r} within {timeout:.0f} s")


def with_minutes_as_seconds(rules: Path, target: Path) -> Path:
    """Write rules of which every minute is a second, so that alerts fire and clear within a test."""
    target.write_text(re.sub(r"\b(\d+)m\b", r"\1s", rules.read_text()))
    return target


@contextlib.contextmanager
def prometheus(
    folder: Path, rules: Path, instances: Sequence[Server]
) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes the instances and evaluates the rules every second."""
    binary, port = program("prometheus"), free_port()
    assert binary is not None
    targets = [f"{HOST}:{server.port}" for server in instances]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {"job_name": "vllm", "static_configs": [{"targets": targets}]}
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    line = [binary, f"--config.file={folder}/prometheus.yaml"]
    line += [
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={HOST}:{port}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        child = subprocess.Popen(
            line, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield Prometheus(port)
    finally:
        processes.end(child.pid, polite_s=5)
        child.poll()
