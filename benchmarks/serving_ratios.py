# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Make ratios of what the serving benchmarks measured, with their intervals, and a table.

A restart, or a round of one, gives one ratio per arm, workload and figure. The interval
is Student's, at 95%, on the logarithms of all ratios.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import mpmath

BASE, CONTROL = "off", "control"
FIGURES = {
    "TTFT": "ms",
    "TPOT": "ms",
    "throughput": "requests/s",
    "CPU of P": "ms",
    "CPU of D": "ms",
    "a request on P": "ms",
    "first token on D": "ms",
}
"""What is compared, and its unit: three of the client's figures, four of the servers'."""


Sample = tuple[int, ...]
"""What gives one ratio: a restart, or a restart and a round of it."""


def ratios(
    rows: list[dict[str, Any]], workload: str, figure: str
) -> dict[str, dict[Sample, float]]:
    """Return each arm's logarithms of the ratio to the base, by sample."""
    base: dict[Sample, float] = {}
    others: dict[str, dict[Sample, float]] = {}
    for row in rows:
        if row["workload"] == workload:
            sample = tuple(row[key] for key in ("restart", "round") if key in row)
            arm = row["arm"]
            values = base if arm == BASE else others.setdefault(arm, {})
            values[sample] = row[figure]
    return {
        arm: {sample: math.log(value / base[sample]) for sample, value in found.items()}
        for arm, found in others.items()
    }


def student_quantile(freedom: int) -> float:
    """Return what Student's t exceeds in size with probability 5%."""

    def beyond(t: Any) -> Any:
        inside = freedom / (freedom + t * t)
        return mpmath.betainc(freedom / 2, 0.5, 0, inside, regularized=True) - 0.05

    return float(mpmath.findroot(beyond, (1.9, 13), solver="anderson"))


def interval(values: Sequence[float]) -> list[float]:
    """Return the mean of logarithms of ratios as a ratio, and the ends of its interval.

    One value alone has no interval: only the ratio is returned.
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return [math.exp(mean)]
    error = statistics.stdev(values) / math.sqrt(len(values))
    wide = student_quantile(len(values) - 1) * error
    return [math.exp(mean + sign * wide) for sign in (0, -1, 1)]


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ratios of every workload, figure and arm.

    They are to the base, to the control, and to the geometric mean of both, which the
    machine's pace changes less.
    """
    return list(_summary(rows))


def _summary(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for workload in dict.fromkeys(row["workload"] for row in rows):
        for figure in (figure for figure in FIGURES if figure in rows[0]):
            base = statistics.median(
                r[figure] for r in rows if (r["workload"], r["arm"]) == (workload, BASE)
            )
            found = ratios(rows, workload, figure)
            control = found.get(CONTROL)
            for arm, values in found.items():
                row = {"workload": workload, "figure": figure, "base": base, "arm": arm}
                row["restarts"] = len({restart for restart, *_ in values})
                row["to base"] = interval([*values.values()])
                if control and arm != CONTROL:
                    beyond = [value - control[n] for n, value in values.items()]
                    row["to control"] = interval(beyond)
                    mean = [value - control[n] / 2 for n, value in values.items()]
                    row["to both"] = interval(mean)
                yield row


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return a summary as a table of Markdown."""
    lines = [
        f"| workload | figure | {BASE} | arm | times {BASE} | times {CONTROL} | "
        "times their mean |",
        "|---|---|---|---|---|---|---|",
    ]
    before: tuple[str, str] | None = None
    for row in found:
        at = row["workload"], row["figure"]
        cells = [*at, f"{row['base']:.4g} {FIGURES[row['figure']]}"]
        if at == before:
            cells = ["", "", ""]
        before = at
        cells += [row["arm"], _told(row["to base"])]
        cells += [
            _told(row[key]) if key in row else "-" for key in ("to control", "to both")
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _told(found: Sequence[float]) -> str:
    """Format a ratio and its interval."""
    if len(found) == 1:
        return f"{found[0]:.3f}"
    return f"{found[0]:.3f} ({found[1]:.3f} to {found[2]:.3f})"
