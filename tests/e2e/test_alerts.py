"""Drill servers, and see every alert fire and clear in a real Prometheus.

The minutes of the rules are seconds here. With KV_CHECKSUM_DRILL=FILE the results are written there, for
``draw_drill.py``.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from rig import documents
from rig.model import tiny_qwen3
from rig.prometheus import HOW, program, prometheus, with_minutes_as_seconds
from rig.routing import prefill
from rig.servers import Server, serving

from e2e import drilling, pairs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

P = {"enable_kv_checksum": True, "engine_id": "prefill-1"}
"""The producer's settings: the dashboard names it by its engine id."""

FAULTS = {"drill-flip": "bit_flip", "drill-lost": "lost_payload"}
RULES = documents.FEATURES / "kv_checksum_alerts.yaml"


def test_every_alert_fires_and_clears(forks, tmp_path):
    if program("prometheus") is None:
        pytest.skip(HOW)
    model = tiny_qwen3()
    p = Server("alerts-p", "kv_producer", model=model, transfer=P, fork_server=forks)
    ds = [
        pairs.consumer(f"alerts-{mode}", model, mode, faults=FAULTS, fork_server=forks)
        for mode in ("fail", "fail-open")
    ]
    rules = with_minutes_as_seconds(RULES, tmp_path / "rules.yaml")
    with serving(p, *ds), prometheus(tmp_path, rules, [p, *ds]) as server:
        server.wait("up")
        began = time.time()
        shown = drilling.drill(p, *ds, server)
        assert_the_runbook_s_query_tells_when_it_is_over(server, began)
    begins = dict(reversed(shown["phases"]))
    fired = {name.split()[0] for name in shown["alerts"]}
    assert fired == drilling.DAMAGED | drilling.LOST
    for name, values in shown["alerts"].items():
        seconds = [t for t, _ in values]
        damaged = name.split()[0] in drilling.DAMAGED
        phase = "one bit flipped in each" if damaged else "each without its checksums"
        assert begins[phase] < seconds[0] and seconds[-1] < shown["seconds"] - 3, name
    if (file := os.environ.get("KV_CHECKSUM_DRILL")) is not None:
        Path(file).write_text(json.dumps(shown) + "\n")


def assert_the_runbook_s_query_tells_when_it_is_over(server, began):
    runbook = documents.GUIDE.read_text().partition("## Runbook")[2]
    (query,) = re.findall(r"`(increase\(.*?)` is 0", runbook)
    query = query.replace("5m", "5s")
    series = [values for _, values in server.query_range(query, began, time.time())]
    assert max(n for values in series for _, n in values) > 0
    assert all(values[-1][1] == 0 for values in series)


def test_the_alert_of_skipped_groups_fires_and_clears(forks, tmp_path):
    """A draft model's layers have the numbers of the model's own: the group that holds both is skipped."""
    if program("prometheus") is None:
        pytest.skip(HOW)
    model, alert = tiny_qwen3(), "KVChecksumGroupsSkipped"
    draft = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
    args = ("--speculative-config", json.dumps(draft))
    skips = pairs.producer("alerts-skips", model, fork_server=forks, args=args)
    rules = with_minutes_as_seconds(RULES, tmp_path / "rules.yaml")
    with prometheus(tmp_path, rules, [skips]) as server:
        with serving(skips):
            prefill(skips, pairs.prompt_of(100, 1), request_id="skips")
            assert pairs.skipped_groups(skips) == {"layer_names": 1}
            server.wait(alert, timeout=60)
            assert server.firing() == {alert}
            assert "KV checksums do not cover" in skips.log_text()
        whole = pairs.producer(
            "alerts-whole", model, port=skips.port, fork_server=forks
        )
        with serving(whole):
            prefill(whole, pairs.prompt_of(100, 1), request_id="whole")
            server.wait_cleared(timeout=60)
            assert pairs.skipped_groups(whole) == {}
            time.sleep(20)  # longer than the rule waits
            assert server.firing() == set()
