"""Drill servers, and see every alert that loads bring about fire and clear in a real Prometheus.

The minutes of the rules are seconds here. With KV_CHECKSUM_DRILL=FILE the results are written there, for
``draw_drill.py``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from rig import documents
from rig.model import tiny_qwen3
from rig.prometheus import HOW, program, prometheus, with_minutes_as_seconds
from rig.servers import serving

from e2e import drilling, pairs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FAULTS = {"drill-flip": "bit_flip", "drill-lost": "lost_payload"}
RULES = documents.FEATURES / "kv_checksum_alerts.yaml"


def test_every_alert_fires_and_clears(forks, tmp_path):
    if program("prometheus") is None:
        pytest.skip(HOW)
    model = tiny_qwen3()
    p = pairs.producer("alerts-p", model, fork_server=forks)
    ds = [
        pairs.consumer(f"alerts-{mode}", model, mode, faults=FAULTS, fork_server=forks)
        for mode in ("fail", "fail-open")
    ]
    rules = with_minutes_as_seconds(RULES, tmp_path / "rules.yaml")
    with serving(p, *ds), prometheus(tmp_path, rules, [p, *ds]) as server:
        server.wait("up")
        shown = drilling.drill(p, *ds, server)
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
