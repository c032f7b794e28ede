"""Test the picture of the dashboard: it is drawn of what a real Prometheus answered to the dashboard's own queries."""

import importlib
import json
import re

import pytest
from e2e import draw_drill
from rig import documents
from rig.model import CACHE

RESULT = CACHE.parent / "tests/e2e/data/drill.json"
PICTURE = documents.FEATURES / "kv_checksum_drill.svg"


@pytest.fixture(scope="module")
def result():
    return json.loads(RESULT.read_text())


def test_the_queries_are_the_dashboard_s(result):
    board = json.loads((documents.FEATURES / "kv_checksum_dashboard.json").read_text())
    queries = {p["title"]: {t["expr"] for t in p["targets"]} for p in board["panels"]}
    asked = {p["title"]: set(p["series"]) for p in result["panels"]}
    assert len(asked) > 12
    # Panels that came later are not in the picture.
    assert asked.items() <= queries.items()


def test_the_picture_shows_every_panel_and_alert_of_the_drill(result):
    text = PICTURE.read_text()
    shown = {re.sub(r"<.*?>", "", line).strip() for line in text.splitlines()}
    panels = draw_drill.drawn(result)
    assert len(panels) > 6
    for title in [p["title"] for p in panels]:
        assert title in shown, title
    alerts = {name.split()[0] for name in result["alerts"]}
    assert len(alerts) == 5 and alerts <= shown
    assert f"]({PICTURE.name})" in documents.GUIDE.read_text()


def test_the_same_results_give_the_same_picture(result, tmp_path):
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is missing: pip install matplotlib==3.10.0")
    draw_drill.draw(result, tmp_path / "drawn")
    assert (tmp_path / "drawn").read_bytes() == PICTURE.read_bytes()
