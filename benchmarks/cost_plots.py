# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Draw what checksums cost: one function per kind of result, for `plots.py`.

Each takes pyplot and the results, and returns the figure.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "kernels"))

import kernel_instructions  # noqa: E402

BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#7f7f7f"
SIDES = {"P": (BLUE, "s", 250), "D": (ORANGE, "o", 350)}
"""Color, marker, and the most microseconds that a short request may cost."""

SIZES = {2**20: (BLUE, "o"), 2**24: (GREEN, "^"), 2**26: (ORANGE, "s")}
"""Color and marker by bytes."""

ARMS = {
    "control": (GREY, "|"),
    "stock": (GREEN, "^"),
    "on": (BLUE, "s"),
    "closed": (ORANGE, "o"),
}


def write_beside(axes: Any, y: float, text: str) -> None:
    """Write at the right of a row."""
    place = {"xycoords": ("axes fraction", "data"), "va": "center"}
    axes.annotate(text, (1.01, y), fontsize=7, **place)


def label_rows(axes: Any, names: list[str]) -> None:
    """Name the rows from above, with a line between any two of them."""
    for row in range(1, len(names)):
        axes.axhline(row - 0.5, color="#dddddd", linewidth=0.6)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def whole_requests(pyplot: Any, rows: Sequence[dict[str, Any]]) -> Any:
    """Draw the host's microseconds of one request by its tokens, on P and on D."""
    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    for side, (color, marker, most) in SIDES.items():
        at = [
            (row["tokens"], row["us"]["without reading"])
            for row in rows
            if row["side"] == side
        ]
        axes.plot(*zip(*at, strict=True), color=color, marker=marker, label=side)
        for tokens, us in at:
            axes.annotate(
                f"{us:.0f}",
                (tokens, us),
                (0, 6 if side == "D" else -12),
                textcoords="offset points",
                ha="center",
                color=color,
                fontsize=7,
            )
        axes.axhline(most, color=color, linewidth=0.8, linestyle=":")
    axes.set(xscale="log", yscale="log")
    ticks = sorted({row["tokens"] for row in rows})
    axes.set_xticks(ticks, [f"{tokens:,}" for tokens in ticks])
    axes.minorticks_off()
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("microseconds, without the reading of the bytes")
    axes.grid(color="#dddddd", linewidth=0.6)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def engine(pyplot: Any, rows: Sequence[dict[str, Any]]) -> Any:
    """Draw what checksums add to the engine's thread, without a forward pass."""
    figure, axes = pyplot.subplots(figsize=(6.4, 3), layout="constrained")
    names = []
    for y, row in enumerate(rows):
        color, marker, _ = SIDES[row["side"]]
        ms = row["difference"] / 1e3
        axes.plot([ms], [y], color=color, marker=marker)
        if "middle half" in row:
            ends = [us / 1e3 for us in row["middle half"]]
            axes.plot(ends, [y, y], color=color, linewidth=1)
        write_beside(axes, y, f"{ms:.1f}")
        names.append(f"{row['side']}, {row['tokens']:,} tokens")
    axes.axvline(0, color="#000000", linewidth=0.8)
    label_rows(axes, names)
    axes.set_xlabel("milliseconds of the engine's thread, on minus off, per request")
    return figure


def layouts(pyplot: Any, results: Iterable[dict[str, Any]]) -> Any:
    """Draw the CPU path's rate on every cache as a share of each yardstick.

    A share is a number, or its lowest and highest of several runs; several results are
    several runs, too.
    """
    found: dict[str, dict[tuple[str, int], list[float]]] = {}
    for result in results:
        for row in result["results"]:
            size = min(SIZES, key=lambda size: abs(size - row["bytes"]))
            for yardstick, share in row.items():
                if not yardstick.startswith("of "):
                    continue
                shares = share if isinstance(share, list) else [share]
                cell = found.setdefault(row["cache"], {})
                cell.setdefault((yardstick, size), []).extend(shares)
    yardsticks = list(dict.fromkeys(key[0] for row in found.values() for key in row))
    height = 1.6 + 0.34 * len(found)
    figure, axes = pyplot.subplots(figsize=(8.2, height), layout="constrained")
    for (color, marker), size in zip(SIZES.values(), SIZES, strict=True):
        for k, yardstick in enumerate(yardsticks):
            label = f"{size >> 20} MiB"
            if len(yardsticks) > 1:
                label += f", {yardstick}"
            look = {"color": color, "fillstyle": "none" if k else "full"}
            axes.plot([], [], marker=marker, linestyle="none", label=label, **look)
            for y, row in enumerate(found.values()):
                if seen := row.get((yardstick, size)):
                    ends = [100 * min(seen), 100 * max(seen)]
                    at = y + 0.22 * (list(SIZES).index(size) - 1) + 0.08 * k
                    axes.plot(ends, [at, at], marker=marker, markersize=4, **look)
    axes.axvline(50, color="#000000", linewidth=0.8, linestyle=":")
    axes.set_xlim(left=0)
    label_rows(axes, list(found))
    axes.set_xlabel("percent of a plain sum of as many bytes")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


def instructions(pyplot: Any, result: kernel_instructions.Result) -> Any:
    """Draw the share of each device's budget that every kind of cache takes."""
    colors = [GREY, GREEN, BLUE, ORANGE, "#cc79a7"]
    height = 1.4 + 0.24 * len(result.caches)
    figure, axes = pyplot.subplots(figsize=(10, height), layout="constrained")
    for (name, device), color in zip(
        kernel_instructions.DEVICES.items(), colors, strict=True
    ):
        shares = [100 * result.share(cache, device) for cache in result.caches]
        axes.plot(
            shares, range(len(shares)), "o", markersize=4, color=color, label=name
        )
    axes.axvline(100, color="#000000", linewidth=0.8)
    axes.set(xscale="log")
    ticks = [25, 50, 100, 200, 400]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    label_rows(axes, [result.name(cache) for cache in result.caches])
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("percent of what can be issued while memory delivers the bytes")
    figure.legend(loc="outside upper center", ncols=5, frameon=False)
    return figure


def serving(pyplot: Any, found: Sequence[dict[str, Any]]) -> Any:
    """Draw the ratios of served requests to those with checksums off, with intervals."""
    rows = list(dict.fromkeys((row["workload"], row["figure"]) for row in found))
    height = 1.4 + 0.34 * len(rows)
    figure, axes = pyplot.subplots(figsize=(7.2, height), layout="constrained")
    arms = dict.fromkeys(row["arm"] for row in found)
    for k, arm in enumerate(arms):
        color, marker = ARMS[arm]
        axes.plot([], [], color=color, marker=marker, linestyle="none", label=arm)
        for row in found:
            if row["arm"] != arm:
                continue
            y = rows.index((row["workload"], row["figure"]))
            at = y + 0.2 * (k - (len(arms) - 1) / 2)
            mean, *ends = row["to base"]
            axes.plot([mean], [at], color=color, marker=marker, markersize=4)
            if ends:
                axes.plot(ends, [at, at], color=color, linewidth=1)
    axes.axvline(1, color="#000000", linewidth=0.8)
    label_rows(axes, [f"{workload}: {figure_}" for workload, figure_ in rows])
    axes.set_xlabel("times the arm with checksums off, mean and 95% interval")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return figure
