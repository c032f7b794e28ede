"""Draw what the dashboard's panels and the alerts showed while servers were drilled.

``test_alerts.py`` writes the results (KV_CHECKSUM_DRILL=FILE); panels and series of zeros are left out. The
same results give the same file. Needs matplotlib and nothing else, so that any environment will do:
python tests/e2e/draw_drill.py tests/e2e/data/drill.json docs/features/kv_checksum_drill.svg
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

STYLE = {
    "svg.fonttype": "none",  # text stays text: small, and readable in a diff
    "svg.hashsalt": "drill",  # ids that do not change from run to run
    "font.family": "sans-serif",
    "font.size": 8,
}
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#000000")
PHASES = {
    "good loads": "#ffffff",
    "one bit flipped in each": "#f6d5c3",
    "each without its checksums": "#fdf0c4",
}
COLUMNS = 3


def drawn(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the panels of which some value is not 0."""
    return [
        panel
        for panel in result["panels"]
        if any(
            v
            for series in panel["series"].values()
            for values in series.values()
            for _, v in values
        )
    ]


def draw(result: dict[str, Any], target: Path) -> None:
    """Write the SVG of a drill."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    panels = drawn(result)
    rows = -(-len(panels) // COLUMNS)
    with matplotlib.rc_context(STYLE):
        figure = pyplot.figure(figsize=(11, 1.9 * rows + 2.2), layout="constrained")
        grid = figure.add_gridspec(rows + 1, COLUMNS)
        for number, panel in enumerate(panels):
            axes = figure.add_subplot(grid[number // COLUMNS, number % COLUMNS])
            _draw_panel(axes, panel, result)
        _draw_alerts(figure.add_subplot(grid[rows, :]), result)
        patches = [
            pyplot.Rectangle((0, 0), 1, 1, facecolor=color, edgecolor="#999999")
            for color in PHASES.values()
        ]
        figure.legend(patches, list(PHASES), loc="outside upper center", ncols=3)
        figure.savefig(target, format="svg", metadata={"Date": None})
        pyplot.close(figure)


def _draw_panel(axes: Any, panel: dict[str, Any], result: dict[str, Any]) -> None:
    """Draw the series of all queries of a panel, but for those of zeros."""
    _shade(axes, result)
    lines = [
        (_named(query, name, panel), values)
        for query, series in panel["series"].items()
        for name, values in series.items()
        if any(value for _, value in values)
    ]
    for number, (name, values) in enumerate(lines):
        axes.plot(
            *zip(*values, strict=True),
            color=COLORS[number % len(COLORS)],
            label=name,
            lw=1.2,
        )
    axes.set_title(panel["title"], fontsize=9, loc="left")
    axes.set_ylim(bottom=0)
    if any(name for name, _ in lines):
        axes.legend(fontsize=6, frameon=False, loc="upper left")


def _named(query: str, name: str, panel: dict[str, Any]) -> str:
    """Return a line's name; that of the metric where a panel has several queries."""
    if len(panel["series"]) == 1:
        return name
    metric = re.search(r"vllm:kv_checksum_\w+", query)
    assert metric is not None
    return f"{metric[0]} {name}".strip()


def _draw_alerts(axes: Any, result: dict[str, Any]) -> None:
    """Draw a bar for the seconds in which each alert fired."""
    _shade(axes, result)
    fired: dict[str, set[int]] = {}
    for name, values in result["alerts"].items():
        fired.setdefault(name.split()[0], set()).update(t for t, _ in values)
    for row, name in enumerate(sorted(fired, reverse=True)):
        axes.broken_barh(
            [(t, 1) for t in sorted(fired[name])], (row - 0.3, 0.6), color="#b00020"
        )
    axes.set_yticks(range(len(fired)), sorted(fired, reverse=True))
    axes.set_title("Alerts that fire", fontsize=9, loc="left")
    axes.set_xlabel("seconds; the minutes of the alert rules are seconds here")


def _shade(axes: Any, result: dict[str, Any]) -> None:
    """Show the phases behind the lines."""
    begins = [begin for _, begin in result["phases"]] + [result["seconds"]]
    for (name, begin), end in zip(result["phases"], begins[1:], strict=True):
        axes.axvspan(begin, end, color=PHASES[name], lw=0)
    axes.set_xlim(0, result["seconds"])


if __name__ == "__main__":
    source, svg = map(Path, sys.argv[1:])
    draw(json.loads(source.read_text()), svg)
