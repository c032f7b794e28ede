# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Draw what the benchmarks write with `--json`: one or more results, one SVG.

The kind of plot follows from the results:

- `fault_spacing.py`: the share of damage that each check misses, by kind of place. Only
  KV of few values counts. A check that missed nothing stands at the left edge, with the
  number of sets.
- `kernels/benchmark_kv_checksum.py`: the rate of each way to read a layer's blocks.
- `benchmark_kv_checksum_host.py`, one result per block size: the host's time for one
  request of 128k tokens, on P and on D.
- the same with `--requests`: the host's time for one request by its tokens.
- `benchmark_kv_checksum_engine.py`: what is added to the engine's thread.
- `kernels/benchmark_cpu_layouts.py`, one result per run: the share of a plain read.
- `kernels/kernel_instructions.py`: the share of what GPUs can issue.
- `benchmark_serving.py` and `benchmark_serving_switched.py`: the ratios of served
  requests, with their intervals.

The second and the third print their JSON as the last line of their output. The same
results give the same file. Needs matplotlib and nothing else that this project lacks, so
that any environment will do. `evidence.py` makes all plots of the documents.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cost_plots
from cost_plots import label_rows, write_beside

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
READERS = {  # by the benchmark's name: label, color, marker
    "triton": ("this checksum (Triton)", "#0072b2", "s"),
    "numba": ("this checksum (numba)", "#0072b2", "s"),
    "read": ("plain read", "#000000", "|"),
    "copy": ("copy", "#cc79a7", "x"),
    "xxh3-64 (xxhash)": ("xxh3", "#e69f00", "v"),
    "CRC-32 (zlib)": ("CRC-32", "#009e73", "D"),
    "Adler-32 (zlib)": ("Adler-32", "#7f7f7f", "^"),
    "torch": ("this checksum (PyTorch)", "#56b4e9", "o"),
}
STEPS = {  # of a request's life, by the benchmark's name: color
    "blocks that are sent": "#0072b2",
    "blocks that are loaded": "#56b4e9",
    "pickle what workers are asked": "#000000",
    "rows": "#009e73",
    "add the records of 8 workers": "#f0e442",
    "digest of the prompt": "#bbbbbb",
    "encode the payload": "#d55e00",
    "decode the payload": "#e69f00",
    "compare": "#cc79a7",
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


def rates(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the GB/s of every reader, by layer and number of bytes."""
    return {
        f"{row['shape']}, {named_bytes(row['bytes'])}": row["GB/s"]
        for row in result["results"]
    }


def named_bytes(number: int) -> str:
    """Name a number of bytes in the largest unit of which it holds at least one."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        # Whole blocks may stay a little below a power of two.
        if number > 0.9 * size:
            return f"{number / size:.3g} {unit}"
    return f"{number} bytes"


def host_steps(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the microseconds of every step of one request, by block size and side."""
    rows: dict[str, dict[str, float]] = {}
    for result in sorted(results, key=lambda result: result["block_size"]):
        for side in "PD":
            rows[f"{side}, blocks of {result['block_size']}"] = {
                row["what"]: row["us"]
                for row in result["results"]
                if row["requests"] == 1
                and row["what"] in STEPS
                and side in row["where"].replace(",", "").split()
            }
    return rows


def draw(
    result: dict[str, Any] | Sequence[dict[str, Any]],
    file: Path,
    requests: bool = False,
) -> None:
    """Write the plot of one result, or of several of the same program, as SVG.

    Args:
        result: what the program wrote.
        file: the SVG.
        requests: whether to draw the host's time for whole requests.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the results are of no program that this knows.

    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    results = [result] if isinstance(result, dict) else list(result)
    with pyplot.rc_context(STYLE):
        figure = _figure(pyplot, results, requests)
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


def _figure(pyplot: Any, results: list[dict[str, Any]], requests: bool) -> Any:
    """Return the figure of some results.

    Raises:
        ValueError: the results are of no program that this knows.

    """
    if results and all("cache" in (one.get("results") or [{}])[0] for one in results):
        return cost_plots.layouts(pyplot, results)
    if len(results) == 1:
        (one,) = results
        if requests and one.get("whole requests"):
            return cost_plots.whole_requests(pyplot, one["whole requests"])
        if "cells" in one:
            return _draw_shares(pyplot, shares(one))
        if "engine" in one:
            return cost_plots.engine(pyplot, one["engine"])
        if "caches" in one:
            found = cost_plots.kernel_instructions.Result.of(one)
            return cost_plots.instructions(pyplot, found)
        if "summary" in one:
            return cost_plots.serving(pyplot, one["summary"])
        if "machine" in one:
            return _draw_rates(pyplot, rates(one))
    if results and all("block_size" in one for one in results):
        return _draw_host_steps(pyplot, host_steps(results))
    raise ValueError("no results of one program that this can draw")


def _draw_shares(pyplot: Any, rows: dict[str, tuple[int, dict[str, int]]]) -> Any:
    # The left edge is below one missed set of the smallest row.
    edge = 10.0 ** math.floor(math.log10(1 / max(n for n, _ in rows.values())))
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
    axes.set(xscale="log", xlim=(edge, 1))
    label_rows(axes, list(rows))
    axes.set_xlabel("share of damaged sets missed, KV of few values")
    figure.legend(loc="outside upper center", ncols=len(LOOK), frameon=False)
    return figure


def _draw_rates(pyplot: Any, rows: dict[str, dict[str, float]]) -> Any:
    height = 1.2 + 0.4 * len(rows)
    figure, axes = pyplot.subplots(figsize=(7.2, height), layout="constrained")
    for name, (label, color, marker) in READERS.items():
        at = [(gbps[name], y) for y, gbps in enumerate(rows.values()) if name in gbps]
        if at:
            size = 14 if marker == "|" else 5
            axes.plot(
                *zip(*at, strict=True),
                label=label,
                color=color,
                marker=marker,
                markersize=size,
                linestyle="none",
            )
    for y, gbps in enumerate(rows.values()):
        fast = gbps.get("triton", gbps.get("numba", 0.0))
        write_beside(axes, y, f"{fast:g} of {gbps['read']:g}")
    axes.set(xscale="log")
    label_rows(axes, list(rows))
    axes.set_xlabel("GB/s; at the right, this checksum's and a plain read's")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return figure


def _draw_host_steps(pyplot: Any, rows: dict[str, dict[str, float]]) -> Any:
    height = 1.6 + 0.4 * len(rows)
    figure, axes = pyplot.subplots(figsize=(7.2, height), layout="constrained")
    for y, took in enumerate(rows.values()):
        left = 0.0
        for name, color in STEPS.items():
            axes.barh(y, took.get(name, 0), 0.7, left=left, color=color)
            left += took.get(name, 0)
        axes.text(left, y, f" {left:.0f}", va="center", fontsize=7)
    for name, color in STEPS.items():
        axes.barh(0, 0, color=color, label=name)
    axes.set_xlim(0, 1.1 * max(sum(took.values()) for took in rows.values()))
    label_rows(axes, list(rows))
    axes.set_xlabel("microseconds of the host, one request of 128k tokens")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


def main() -> int:
    """Draw the files that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "results", type=Path, nargs="+", help="what a benchmark wrote with --json"
    )
    parser.add_argument("plot", type=Path, help="the SVG to write")
    parser.add_argument(
        "--requests",
        action="store_true",
        help="of the host's results, draw the time for whole requests",
    )
    args = parser.parse_args()
    try:
        found = [json.loads(file.read_text()) for file in args.results]
        draw(found, args.plot, args.requests)
    except ImportError:
        print(NEEDS, file=sys.stderr)
        return 1
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
