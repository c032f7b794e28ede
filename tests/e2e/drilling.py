"""Drill a pair of servers in phases while a Prometheus watches, and keep what the dashboard would show."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

from rig import documents
from rig.prometheus import Prometheus
from rig.routing import prefill_decode
from rig.servers import HOST, Server

from e2e import pairs

BOARD = documents.FEATURES / "kv_checksum_dashboard.json"
FIRING = 'ALERTS{alertstate="firing"}'
HIDDEN = {"__name__", "alertstate", "instance", "job", "model_name", "severity"}
PAUSE_S = 0.25

DAMAGED = {"KVChecksumMismatch", "KVChecksumRequestsFail"}
LOST = {"KVChecksumUnverified", "KVChecksumUnverifiedShare", "KVChecksumNothingChecked"}
"""The alerts that loads bring about; KVChecksumGroupsSkipped needs a model with such groups, see ``test_alerts.py``."""


@contextlib.contextmanager
def asking(p: Server, d: Server, kind: str) -> Iterator[None]:
    """Ask for new prompts without end, with request ids that begin with `kind`."""
    ends = threading.Event()

    def ask() -> None:
        for number in range(100_000):
            prompt = pairs.prompt_of(100 + number, zlib.crc32(kind.encode()) % 1000)
            prefill_decode(p, d, prompt[-100:], 2, request_id=f"{kind}-{number}")
            if ends.wait(PAUSE_S):
                return

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def drill(
    p: Server, closed: Server, opened: Server, server: Prometheus
) -> dict[str, Any]:
    """Bring every alert about, and let it clear; the rules' minutes must be seconds.

    Of the two Ds one fails closed. vLLM counts no prompt tokens of a request that fails, so that
    KVChecksumNothingChecked concerns the other: what the first does not check, it fails.

    Return what the dashboard's panels and the alerts showed, with the beginning of each phase.
    """
    began, phases = time.time(), []

    def phase(name: str) -> None:
        phases.append([name, round(time.time() - began)])

    phase("good loads")
    with asking(p, closed, "clean"), asking(p, opened, "clean-too"):
        time.sleep(10)
        assert server.firing() == set()
    phase("one bit flipped in each")
    with asking(p, closed, "drill-flip"):
        for name in sorted(DAMAGED):
            server.wait(name)
        time.sleep(6)
    phase("each without its checksums")
    with asking(p, opened, "drill-lost"):
        for name in sorted(LOST):
            server.wait(name, timeout=60)
    assert not DAMAGED & server.firing(), "they did not clear while nothing was damaged"
    phase("good loads")
    with asking(p, closed, "clean-again"), asking(p, opened, "clean-last"):
        server.wait_cleared(timeout=60)
        time.sleep(5)
    end = time.time()
    servers = {"P": p, "D fail-closed": closed, "D fail-open": opened}
    names = {f"{HOST}:{one.port}": name for name, one in servers.items()}
    shown = {"phases": phases, "seconds": round(end - began)}
    shown["alerts"] = _series(server, FIRING, names, began, end)
    return shown | {"panels": _panels(server, names, began, end)}


def _panels(
    server: Prometheus, names: dict[str, str], began: float, end: float
) -> list[dict[str, Any]]:
    """Return what each panel of the dashboard that draws series over time shows."""
    board = json.loads(BOARD.read_text())
    return [
        {
            "title": panel["title"],
            "series": {
                t["expr"]: _series(server, filled(t["expr"]), names, began, end)
                for t in panel["targets"]
            },
        }
        for panel in board["panels"]
        if panel["type"] == "timeseries"
    ]


def filled(query: str) -> str:
    """Return a panel's query with the variables that Grafana fills in: everything, and four scrapes."""
    query = re.sub(r"\$__rate_interval|\$__range", "4s", query)
    return re.sub(r"\$(model_name|instance)", ".*", query)


def _series(
    server: Prometheus, query: str, names: dict[str, str], began: float, end: float
) -> dict[str, Any]:
    """Return a query's series by name: pairs of seconds since the beginning and values."""
    found = {}
    for labels, values in server.query_range(query, began, end):
        shown = {k: v for k, v in sorted(labels.items()) if k not in HIDDEN}
        instance = labels.get("instance", "")
        name = " ".join([*shown.values(), names.get(instance, "")]).strip()
        assert name not in found
        found[name] = [[round(t - began), round(v, 2)] for t, v in values]
    return found
