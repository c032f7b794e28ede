# SPDX-License-Identifier: Apache-2.0
"""The fault campaign: a part of it runs here, and it can fail."""

import sys

import fault_campaign
import numpy as np
import pytest
from campaign import blocks, loads
from campaign.tally import CLEAN, Tally

from vllm.distributed.kv_transfer.kv_checksum import cpu_path


@pytest.fixture(autouse=True)
def no_log_lines(monkeypatch):
    """For these tests alone: others read the log."""
    monkeypatch.setattr(fault_campaign.logging.getLogger("vllm"), "disabled", True)
    monkeypatch.setattr(fault_campaign, "quiet", lambda: None)


def run(depth, damaged, clean, seed=1):
    tally = Tally()
    goal = fault_campaign.Goal(damaged, clean)
    fault_campaign.run(depth, seed, goal, tally, print)
    assert tally.total(depth, "damaged") >= damaged
    assert tally.rows[depth, CLEAN].intact.total() >= clean
    return tally


@pytest.mark.parametrize(
    ("depth", "damaged", "clean"),
    [
        ("blocks", 3_000, 300),
        ("loads", 300, 300),
        pytest.param("blocks", 100_000, 10_000, marks=pytest.mark.campaign),
        pytest.param("loads", 2_000, 2_000, marks=pytest.mark.campaign),
    ],
)
def test_every_outcome_is_the_expected_one(depth, damaged, clean):
    # Not the seed of the published tables.
    tally = run(depth, damaged, clean, seed=2)
    print("\n".join(tally.lines(depth)))
    assert tally.unexpected == 0, tally.examples
    kinds = {kind for where, kind in tally.rows if where == depth}
    assert len(kinds) > 40


def test_a_batch_is_the_same_whatever_ran_before():
    for depth in (blocks, loads):
        first = depth.run_batch(7, 3).json()
        depth.run_batch(7, 4)
        assert depth.run_batch(7, 3).json() == first


def weaken(monkeypatch, spoil):
    prepare = cpu_path.prepare

    def weak(layers):
        exact = prepare(layers)

        def sum_rows(rows, out):
            exact(rows, out)
            spoil(rows, out.numpy().view(np.uint64))

        return sum_rows

    monkeypatch.setattr(cpu_path, "prepare", weak)


def test_a_weak_checksum_does_not_pass(monkeypatch):
    """Of 8 bits, it misses a damaged block in 256, and the campaign says which."""

    def keep_8_bits(rows, out):
        out &= np.uint64(255)

    weaken(monkeypatch, keep_8_bits)
    tally = run("blocks", 5_000, 0)
    assert tally.total("blocks", "undetected") > 0
    assert all("--depth blocks --seed 1 --batch" in x for x in tally.examples)


def test_a_checksum_of_what_does_not_count_does_not_pass(monkeypatch):
    """One that depends on a block's id cries wolf."""

    def add_block_ids(rows, out):
        out += rows[0].numpy().astype(np.uint64)

    weaken(monkeypatch, add_block_ids)
    tally = Tally()
    tally.add(loads.run_batch(1, 0))
    assert tally.total("loads", "false_alarms") > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batch", "3"], "--batch needs --depth"),
        (["--n", "0"], "--n must be at least 1"),
        (["--jobs", "0"], "--jobs must be at least 1"),
        (["--loads", "-1"], "--loads must be at least 1"),
    ],
)
def test_bad_options_are_named(monkeypatch, capsys, options, said):
    monkeypatch.setattr(sys, "argv", ["fault_campaign.py", *options])
    with pytest.raises(SystemExit):
        fault_campaign.arguments()
    assert said in capsys.readouterr().err


def test_what_ran_before_it_was_stopped_is_printed(monkeypatch, capsys):
    def stopped(depth, seed, goal, tally, *rest):
        tally.add(fault_campaign.run_batch(depth, seed, 0))
        raise KeyboardInterrupt

    monkeypatch.setattr(fault_campaign, "run", stopped)
    monkeypatch.setattr(fault_campaign.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["fault_campaign.py", "--jobs", "1", "--json"])
    assert fault_campaign.main() == 130
    out, err = capsys.readouterr()
    assert "| one bit | mismatch |" in out and '"stopped": true' in out
    assert "stopped" in err
