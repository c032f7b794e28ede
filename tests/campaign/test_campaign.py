# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run a part of the fault campaign, and show that the campaign can fail."""

import json
import sys

import numpy as np
import pytest

from campaign import blocks, loads, tiers
from campaign import run as program
from campaign.strike import HALF_WRITTEN, OPEN, OTHER_GROUP, OTHER_LOAD
from campaign.tally import CHECK, CLEAN, Tally
from vllm.distributed.kv_transfer.kv_checksum.scheduler import scheduler
from vllm.distributed.kv_transfer.kv_checksum.scheduler.ledger import KnownSums
from vllm.distributed.kv_transfer.kv_checksum.worker.kernels import numba_kernel
from vllm.distributed.kv_transfer.kv_checksum.worker.views import Ring

CHECKS = {
    "blocks": (blocks.AS_A_WHOLE, blocks.SETS),
    "loads": (loads.SETS, loads.ONE_VERDICT, loads.WHOLE_PROMPT, loads.EMPTY),
}


@pytest.fixture(autouse=True)
def no_log_lines(monkeypatch):
    """Silence the log for these tests alone: others read it."""
    monkeypatch.setattr(program.logging.getLogger("vllm"), "disabled", True)
    monkeypatch.setattr(program, "quiet", lambda: None)


def run(depth, damaged, clean, seed=1, only="all"):
    tally = Tally()
    goal = program.Goal(damaged, clean)
    program.run(depth, seed, goal, tally, only=only)
    assert tally.total(depth, "damaged") >= damaged
    assert tally.rows[depth, CLEAN].intact.total() >= clean
    return tally


@pytest.mark.parametrize(
    ("depth", "damaged", "clean"),
    [
        ("blocks", 3_000, 300),
        ("loads", 300, 300),
        pytest.param("blocks", 50_000, 5_000, marks=pytest.mark.campaign),
        pytest.param("loads", 800, 800, marks=pytest.mark.campaign),
    ],
)
def test_every_outcome_is_the_expected_one(depth, damaged, clean):
    # Not the seed of the published tables.
    tally = run(depth, damaged, clean, seed=2)
    print("\n".join(tally.lines(depth)))
    assert tally.unexpected == 0, tally.examples
    kinds = {kind for where, kind in tally.rows if where == depth}
    checks = {kind for kind in kinds if kind.startswith(CHECK)}
    assert len(kinds - checks) > 40
    assert checks == set(CHECKS[depth])
    assert all(tally.rows[depth, kind].intact["verified"] for kind in checks)
    if depth == "loads" and damaged >= 800:
        assert tally.drawn["loads: loads in which a group lags"]["True"] > 20


@pytest.mark.parametrize(
    ("depth", "damaged", "clean"),
    [
        ("blocks", 2_000, 200),
        ("loads", 40, 40),
        pytest.param("blocks", 50_000, 5_000, marks=pytest.mark.campaign),
        pytest.param("loads", 500, 500, marks=pytest.mark.campaign),
    ],
)
def test_every_outcome_of_models_that_compress_is_the_expected_one(
    depth, damaged, clean
):
    tally = run(depth, damaged, clean, seed=2, only="compressed")
    assert tally.unexpected == 0, tally.examples
    open_groups = tally.row(depth, OPEN, ())
    assert open_groups.intact["verified"] and not open_groups.damaged
    if depth == "blocks":
        copies = (HALF_WRITTEN, OTHER_GROUP, OTHER_LOAD)
        assert all(tally.rows[depth, kind].damaged["mismatch"] for kind in copies)
    if depth == "blocks" and damaged >= 50_000:
        assert tally.rows[depth, blocks.OTHER_RING].damaged["unverified"]


@pytest.mark.parametrize(
    ("counted", "wrong"),
    [
        (lambda n, size: (n - 1) // size * size, "false_alarms"),
        (lambda n, size: n // size * size, "undetected"),
    ],
    ids=["the row that completes a group", "none of a group that is complete"],
)
def test_other_rows_of_rings_do_not_pass(monkeypatch, counted, wrong):
    def otherwise(self, num_tokens):
        first = np.maximum(counted(num_tokens, self.group_tokens), 0)
        return first, num_tokens - first

    monkeypatch.setattr(Ring, "counted", otherwise)
    tally = run("blocks", 2_000, 0, only="compressed")
    assert tally.total("blocks", wrong) > 0


@pytest.mark.parametrize("number", [60, pytest.param(300, marks=pytest.mark.campaign)])
def test_every_load_from_a_tier_ends_as_expected(number):
    tally = run("tiers", number, number, seed=2)
    assert tally.unexpected == 0, tally.examples
    kinds = {kind for _, kind in tally.rows if kind in tiers.KINDS}
    assert len(kinds) > 3 if number < 100 else kinds == set(tiers.KINDS)
    held = [tally.rows["tiers", check].intact["verified"] for check in tiers.CHECKS]
    assert all(held)


def test_a_ledger_that_compares_one_block_less_does_not_pass(monkeypatch):
    equal = KnownSums.equal

    def lenient(self, sums):
        found = equal(self, sums)
        found[-1:] = True
        return found

    monkeypatch.setattr(KnownSums, "equal", lenient)
    tally = run("tiers", 60, 0)
    assert tally.total("tiers", "undetected") > 0
    assert all("--depth tiers --seed 1 --batch" in x for x in tally.examples)


def test_a_batch_is_the_same_whatever_ran_before():
    for depth in (blocks, loads, tiers):
        first = depth.run_batch(7, 3).json()
        depth.run_batch(7, 4)
        assert depth.run_batch(7, 3).json() == first


def weaken(monkeypatch, spoil):
    prepare = numba_kernel.prepare

    def weak(layers):
        exact = prepare(layers)

        def sum_rows(rows, out):
            exact(rows, out)
            spoil(rows, out.numpy().view(np.uint64))

        return sum_rows

    monkeypatch.setattr(numba_kernel, "prepare", weak)


def test_a_weak_checksum_does_not_pass(monkeypatch):
    """Use a checksum of 8 bits: the campaign names the block in 256 that it misses."""

    def keep_8_bits(rows, out):
        out &= np.uint64(255)

    weaken(monkeypatch, keep_8_bits)
    tally = run("blocks", 5_000, 0)
    assert tally.total("blocks", "undetected") > 0
    assert all("--depth blocks --seed 1 --batch" in x for x in tally.examples)


def test_a_checksum_of_what_does_not_count_does_not_pass(monkeypatch):
    """Use a checksum that depends on a block's id: it raises false alarms."""

    def add_block_ids(rows, out):
        out += rows[0].numpy().astype(np.uint64)

    weaken(monkeypatch, add_block_ids)
    tally = Tally()
    tally.add(loads.run_batch(1, 0))
    assert tally.total("loads", "false_alarms") > 0


@pytest.mark.parametrize("depth", ["blocks", "loads"])
def test_a_block_that_is_not_summed_does_not_pass(monkeypatch, depth):
    """Sum one block less of the last group that has several."""
    found = scheduler.loaded_blocks

    def fewer(*args):
        transferred = found(*args)
        groups = transferred.blocks.groups
        several = {i: g for i, g in groups.items() if len(g[1]) > 1}
        for group_id, (start, ids) in sorted(several.items())[-1:]:
            groups[group_id] = start + 1, ids[1:]
        return transferred

    monkeypatch.setattr(scheduler, "loaded_blocks", fewer)
    tally = Tally()
    for number in range(8, 11):
        tally.add(program.run_batch(depth, 1, number))
    sets = {"blocks": blocks.SETS, "loads": loads.SETS}[depth]
    assert tally.rows[depth, sets].false_alarms > 0


def test_a_verdict_that_is_missing_does_not_pass(monkeypatch):
    judge = scheduler.KVChecksumScheduler._judge_ended

    def forgets(self, *arguments):
        held = self._recvs.pop("r3", None)
        judge(self, *arguments)
        if held is not None:
            self._recvs["r3"] = held  # as if it were under way

    monkeypatch.setattr(scheduler.KVChecksumScheduler, "_judge_ended", forgets)
    tally = loads.run_batch(1, 0)
    assert tally.rows["loads", loads.ONE_VERDICT].false_alarms > 0


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
    monkeypatch.setattr(sys, "argv", ["program.py", *options])
    with pytest.raises(SystemExit):
        program.arguments()
    assert said in capsys.readouterr().err


def test_what_ran_before_it_was_stopped_is_printed(monkeypatch, capsys, tmp_path):
    def stopped(depth, seed, goal, tally, *rest):
        tally.add(program.run_batch(depth, seed, 0))
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "run", stopped)
    monkeypatch.setattr(program.signal, "signal", lambda *_: None)
    file = tmp_path / "campaign.json"
    options = ["--jobs", "1", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["program.py", *options])
    assert program.main() == 130
    out, err = capsys.readouterr()
    assert "| one bit | mismatch |" in out
    assert json.loads(file.read_text())["stopped"]
    assert "stopped" in err
