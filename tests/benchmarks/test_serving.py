# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Check how the serving benchmark makes a table of what it measured."""

import math
from typing import Any

import benchmark_serving as serving
import pytest


def made_up(ttft: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return rows with these times to first token per restart, other figures equal."""
    return [
        {
            "restart": number,
            "arm": arm,
            "workload": "900 tokens",
            "TTFT": value,
            "TPOT": 2.0,
            "throughput": 3.0,
        }
        for arm, values in ttft.items()
        for number, value in enumerate(values)
    ]


def test_a_restart_counts_once_and_is_set_against_its_own_base() -> None:
    """A restart in which everything takes twice as long changes no ratio."""
    rows = made_up({"off": [100, 200], "control": [101, 202], "on": [103, 206]})
    found = serving.ratios(rows, "900 tokens", "TTFT")
    assert found["on"] == pytest.approx([math.log(1.03)] * 2)
    assert "1.030 (1.030 to 1.030)" in serving.table(rows)
    assert "1.020 (1.020 to 1.020)" in serving.table(rows)  # beyond the control


def test_the_interval_is_student_s() -> None:
    """The quantiles are those of printed tables, and the interval holds the mean."""
    found = [serving.student_quantile(n) for n in (1, 4, 9, 30)]
    assert found == pytest.approx([12.706, 2.776, 2.262, 2.042], abs=0.001)
    values = [math.log(x) for x in (1.00, 1.02, 1.04)]
    # The mean 0.01961 has the standard error 0.01133, times 4.303.
    assert serving.interval(values) == "1.020 (0.971 to 1.071)"


def test_the_client_asks_what_the_workload_says() -> None:
    options = serving.Workload(100, prefix=800, at_once=4).options(5, seed=7)
    asked = dict(zip(options[::2], options[1::2], strict=True))
    assert asked["--random-input-len"] == "100"
    assert asked["--random-prefix-len"] == "800"
    assert asked["--num-prompts"] == "20"
    assert asked["--max-concurrency"] == "4"
