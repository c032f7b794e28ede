# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Check how the serving benchmark asks, and what it makes of what it measured."""

import argparse
import json
import math
import sys
from itertools import count, permutations
from typing import Any

import benchmark_serving as serving
import benchmark_serving_switched as switched
import pytest
import serving_ratios
from rig.model import tiny_qwen3


def made_up(ttft: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return rows with these times to first token per restart, other figures equal."""
    others = dict.fromkeys(serving_ratios.FIGURES, 2.0)
    return [
        {
            **others,
            "restart": number,
            "arm": arm,
            "workload": "900 tokens",
            "TTFT": value,
        }
        for arm, values in ttft.items()
        for number, value in enumerate(values)
    ]


def test_a_restart_counts_once_and_is_set_against_its_own_base() -> None:
    """A restart in which everything takes twice as long changes no ratio."""
    rows = made_up({"off": [100, 200], "control": [101, 202], "on": [103, 206]})
    found = serving_ratios.ratios(rows, "900 tokens", "TTFT")
    assert found["on"] == pytest.approx({(0,): math.log(1.03), (1,): math.log(1.03)})
    told = serving_ratios.table(serving_ratios.summary(rows))
    assert "1.030 (1.030 to 1.030)" in told
    assert "1.020 (1.020 to 1.020)" in told  # beyond the control
    assert "1.025 (1.025 to 1.025)" in told  # and beyond the mean of both


def test_the_interval_is_student_s() -> None:
    """The quantiles are those of printed tables, and the interval holds the mean."""
    found = [serving_ratios.student_quantile(n) for n in (1, 4, 9, 30)]
    assert found == pytest.approx([12.706, 2.776, 2.262, 2.042], abs=0.001)
    values = [math.log(x) for x in (1.00, 1.02, 1.04)]
    # The mean 0.01961 has the standard error 0.01133, times 4.303.
    assert serving_ratios.interval(values) == pytest.approx(
        [1.020, 0.971, 1.071], abs=0.0005
    )


def test_every_figure_is_measured() -> None:
    measured = [
        *serving.OF_THE_CLIENT,
        *serving.OF_THE_PROCESSOR,
        *serving.OF_THE_SERVERS,
    ]
    assert measured == [*serving_ratios.FIGURES]


def test_prompts_are_as_long_as_the_workload_says_and_share_nothing_else() -> None:
    """A prompt that was asked before would be found in the prefix cache."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3())
    begun = set()
    for name, workload in serving.WORKLOADS.items():
        for restart, turn in ((0, -1), (0, 0), (0, 1), (1, 0)):
            prompts = workload.prompts(20, f"{restart} {name} {turn}")
            assert len(prompts) == 20 * workload.at_once
            assert len({p[: workload.prefix] for p in prompts}) == 1
            for prompt in prompts:
                assert len(tokenizer(prompt).input_ids) == len(prompt)
                assert len(prompt) == workload.prefix + workload.tokens
            begun |= {p[:32] for p in prompts}
    alone = [w for w in serving.WORKLOADS.values() if not w.prefix]
    shared = len(serving.WORKLOADS) - len(alone)
    assert len(begun) == 4 * (sum(20 * w.at_once for w in alone) + shared)


def arguments(**more: Any) -> argparse.Namespace:
    given = {"arms": ["off", "control", "on"], "turns": 4, "requests": 5, "output": 8}
    common = {"json": None, "workloads": list(serving.WORKLOADS)}
    return argparse.Namespace(**{**given, **common, **more})


def test_every_arm_takes_every_turn_in_another_place(tmp_path) -> None:
    """Of two turns the second has the first's order reversed; starts are exchanged."""
    firsts = set()
    for number in range(3):
        restart = serving.Restart(arguments(), number, tmp_path)
        firsts.add(restart.order[0])
        orders = [list(order) for order in restart.turns("900 tokens")]
        assert len(orders) == 5
        assert all(sorted(order) == sorted(restart.order) for order in orders)
        assert orders[1] == orders[2][::-1] and orders[3] == orders[4][::-1]
    assert firsts == {"off", "control", "on"}
    assert serving.Restart(arguments(), 3, tmp_path).order == ["on", "control", "off"]


def test_switched_arms_take_turns_in_every_order() -> None:
    """Six turns hold every order once, and a round is set against its own base."""
    args = argparse.Namespace(
        rounds=2, requests=12, workloads=["100 tokens", "900 tokens"]
    )
    turns = [*switched.turns(args, 3, "on")]
    assert len(turns) == 3 * 2 * 12 * 3  # one of the rounds warms up
    orders: dict[tuple[Any, ...], list[str]] = {}
    for turn in turns:
        at = (turn["round"], turn["workload"], turn["turn"] // 6, turn["turn"])
        orders.setdefault(at, []).append(turn["arm"])
    every = sorted(permutations(("off", "control", "on")))
    for sixth in {at[:3] for at in orders}:
        found = [tuple(arms) for at, arms in orders.items() if at[:3] == sixth]
        assert sorted(found) == every
    measured = [
        {**turn, **dict.fromkeys(switched.FIGURES, 7.0 + turn["round"])}
        for turn in turns
        if turn["round"] >= 0
    ]
    rows = switched.rows_of(measured)
    ratios = serving_ratios.ratios(rows, "100 tokens", "TTFT")
    assert ratios["on"] == {(3, 0): 0.0, (3, 1): 0.0}


def test_a_server_that_counted_others_requests_is_an_error() -> None:
    before, after = {"it": (1.0, 10.0)}, {"it": (1.5, 20.0)}
    assert serving.means(before, after, 10) == {"it": pytest.approx(50.0)}
    with pytest.raises(SystemExit, match="10 of 9 requests"):
        serving.means(before, after, 9)


def test_whole_restarts_are_kept_and_the_same_command_goes_on(tmp_path) -> None:
    file = tmp_path / "serving.json"
    first = serving.Results(arguments(json=file))
    first.resume()  # nothing is there yet
    first.add(made_up({"off": [100], "control": [101], "on": [103]}))
    again = serving.Results(arguments(json=file))
    again.resume()
    assert again.rows == first.rows and again.restarts == 1
    kept = json.loads(file.read_text())
    assert kept["summary"] == serving_ratios.summary(first.rows)
    with pytest.raises(ValueError, match="with other settings"):
        serving.Results(arguments(json=file, turns=3)).resume()


def test_no_restart_begins_that_would_not_end_in_time(monkeypatch) -> None:
    clock = count(0, 100.0)
    monkeypatch.setattr(serving, "BEGAN", 0.0)
    monkeypatch.setattr(serving.time, "monotonic", lambda: next(clock))
    deadline = serving.Deadline(minutes=8)  # 480 s; a restart takes 100
    begun = []
    while deadline.begin():
        deadline.done()
        begun.append(True)
    assert len(begun) == 2  # at 100 and 300; one more would begin at 500
    assert serving.Deadline(None).begin()


def test_a_run_that_is_stopped_prints_what_it_has(
    monkeypatch, tmp_path, capsys
) -> None:
    file = tmp_path / "serving.json"

    def stopped(args: Any, folder: Any, results: serving.Results) -> None:
        results.add(made_up({"off": [100], "control": [101], "on": [103]}))
        serving.interrupt()

    monkeypatch.setattr(serving, "run", stopped)
    monkeypatch.setattr(sys, "argv", ["benchmark_serving.py", "--json", str(file)])
    assert serving.main() == 130
    out, err = capsys.readouterr()
    assert "| 900 tokens | TTFT | 100 ms | control | 1.010 |" in out
    assert "what whole restarts measured is kept" in err
    assert json.loads(file.read_text())["rows"]
