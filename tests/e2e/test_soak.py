"""Run the soak for half a minute, with many more damaged transfers.

The servers are forked from one process that imported vLLM (rig only).
"""

from __future__ import annotations

import json

import pytest
from rig.memory import trend

from e2e.soak import Settings, grows, lines_of, run


@pytest.mark.e2e
def test_a_short_soak(forks, tmp_path):
    settings = Settings(minutes=0.5, share=0.15, seed=5, report_every_s=15)
    results = tmp_path / "soak.json"
    soak = run(settings, name="soak-short", results=results, forks=forks)
    assert soak.tally.problems == []
    told = json.loads(results.read_text())
    refused = sum(sum(x.values()) for x in told["damaged"].values())
    assert refused >= 5 and told["loads"]["verified"] >= 30
    assert soak.tally.left >= 3 and soak.tally.compared >= 3
    assert any(name.startswith("soak-short-d ") for name in told["memory"])


def test_the_slope_of_memory():
    line = trend([(minute, 1000 + 3 * minute) for minute in range(20)])
    assert line.slope == pytest.approx(3) and line.error == pytest.approx(0)
    assert line.growth == pytest.approx(57 / 1028.5)
    uneven = trend([(minute, 1000 + 100 * (minute % 2)) for minute in range(20)])
    assert abs(uneven.slope) < uneven.error * 2
    with pytest.raises(ValueError, match="no trend"):
        trend([(1, 1), (1, 2), (1, 3)])


@pytest.mark.parametrize(
    ("per_minute", "minutes", "told"),
    [(0, 30, False), (4, 30, False), (6, 30, True), (-6, 30, False), (20, 9, False)],
)
def test_growth_by_more_than_a_hundredth_is_told(per_minute, minutes, told):
    """Let 10,000 KiB become 500 more at once, and then grow."""
    samples = [
        (minute, 10_000 + (500 + per_minute * minute) * (minute > 1), 0)
        for minute in range(minutes + 1)
    ]
    line = lines_of({"d": samples}, minutes)["d RSS"]
    assert grows(line, minutes) is told
