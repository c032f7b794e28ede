# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Draws what `fault_spacing.py --json` wrote: the share missed, by kind of place.

KV of few values alone, on a logarithmic scale; what missed nothing stands at the left
edge with the number of sets. The same results give the same file. Needs matplotlib and
nothing else of this project, so that any environment will do.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

NEEDS = "this needs matplotlib: pip install matplotlib==3.10.0"

STYLE = {
    "svg.fonttype": "none",  # text stays text: small, and readable in a diff
    "svg.hashsalt": "spacing",  # ids that do not change from run to run
    "font.family": "sans-serif",
    "font.size": 9,
}
LOOK = {  # of the checks, in the order of the legend
    "definition 1": ("#d55e00", "o"),
    "definition 2": ("#0072b2", "s"),
    "Adler-32": ("#7f7f7f", "^"),
    "CRC-32": ("#009e73", "D"),
}


def shares(result: dict[str, Any]) -> dict[str, tuple[int, dict[str, int]]]:
    """Return the sets of each kind of place in KV of few values, and those missed."""
    rows: dict[str, tuple[int, dict[str, int]]] = {}
    for cell in result["cells"]:
        if not cell["few_values"]:
            continue
        sets, missed = rows.get(cell["place"], (0, dict.fromkeys(LOOK, 0)))
        missed = {name: missed[name] + cell["missed"][name] for name in LOOK}
        rows[cell["place"]] = sets + cell["sets"], missed
    return rows


def draw(result: dict[str, Any], file: Path) -> None:
    """Write the plot as SVG.

    Raises:
        ImportError: matplotlib is not installed.

    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = shares(result)
    # The left edge is below one missed set of the smallest row.
    edge = 10.0 ** math.floor(math.log10(1 / max(n for n, _ in rows.values())))
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(7.2, 4.6), layout="constrained")
        for k, name in enumerate(LOOK):
            color, marker = LOOK[name]
            look = {"color": color, "marker": marker, "linestyle": "none"}
            axes.plot([], [], label=name, **look)
            for row, (sets, missed) in enumerate(rows.values()):
                y = row + (k - 1.5) * 0.19
                if missed[name]:
                    axes.plot([missed[name] / sets], [y], markersize=5, **look)
                else:
                    text = f" 0 of {sets:,}"
                    axes.text(edge, y, text, color=color, va="center", fontsize=7)
        for row in range(1, len(rows)):
            axes.axhline(row - 0.5, color="#dddddd", linewidth=0.6)
        axes.set(xscale="log", xlim=(edge, 1), ylim=(len(rows) - 0.5, -0.5))
        axes.set_yticks(range(len(rows)), list(rows))
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel("share of damaged sets missed, KV of few values")
        figure.legend(loc="outside upper center", ncols=len(LOOK), frameon=False)
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


def main() -> int:
    """Draw the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, help="what fault_spacing.py --json wrote")
    parser.add_argument("plot", type=Path, help="the SVG to write")
    args = parser.parse_args()
    try:
        draw(json.loads(args.result.read_text()), args.plot)
    except ImportError:
        print(NEEDS, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
