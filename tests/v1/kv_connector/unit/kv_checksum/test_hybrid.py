# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test real schedulers of P and D with a group of states beside attention, or alone."""

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.ssm_conv_transfer_utils import (
    derive_mamba_conv_split,
)
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.v1.engine import FinishReason

from .rig import instances as rig
from .rig.hybrid import STATE_LAYERS, pair


@pytest.fixture(autouse=True)
def conv_layout(monkeypatch):
    """Set the conv states' layout that NIXL transfers: the only one."""
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: "DS")


tokens = rig.tokens


def load(*args, **kwargs):
    return rig.load(*args, **kwargs)[1]


SPLITS = [
    ((1, 1), (1, 1)),
    ((2, 1), (1, 1)),
    ((1, 1), (2, 1)),
    ((1, 1), (4, 1)),
    ((1, 2), (2, 1)),
    ((4, 1), (2, 2)),
]


@pytest.mark.parametrize(("p_split", "d_split"), SPLITS)
@pytest.mark.parametrize(
    ("mode", "scratch"), [("none", 0), ("none", 2), ("align", 0), ("align", 2)]
)
def test_states_verify_and_a_flipped_bit_is_seen(
    model, transport, p_split, d_split, mode, scratch
):
    p, d = pair(
        model,
        dict(tp=p_split[0], pp=p_split[1]),
        dict(tp=d_split[0], pp=d_split[1], kv_checksum_fail_closed=True),
        mode=mode,
        scratch=scratch,
        transport=transport,
    )
    for number in (2, 16, 17, 100, 300):
        out = load(p, d, number, f"r{number}", prompt=tokens(number, number))
        assert out.finish_reason == FinishReason.LENGTH
        # Connectors leave the prompt's last token to D; one more block is the state.
        compared = -(-(number - 1) // 16) + 1
        assert d.stats.pop("blocks_compared") == compared
    assert d.loads("verified") == 5
    d.damage_state = d.flip_state_bit
    out = load(p, d, 100, "bad", prompt=tokens(100, 7))
    assert out.finish_reason == FinishReason.ERROR
    assert d.stats["blocks_mismatched"] == 1
    assert not any(k.startswith(("unverified", "left_out")) for k in d.stats)


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("d_split", [(2, 1), (4, 1), (2, 2)])
def test_a_flipped_bit_in_the_last_rank_s_copy_of_b_is_seen(
    model, transport, d_split, mode
):
    """Where B and C lie, which every rank holds whole, NIXL's own split tells."""
    tp, pp = d_split
    p, d = pair(
        model,
        None,
        dict(tp=tp, pp=pp, kv_checksum_fail_closed=True),
        mode=mode,
        transport=transport,
    )
    load(p, d, 100, "good")
    split = derive_mamba_conv_split(d.local_spec(None), tp)
    row = split.conv_rows * split.conv_dtype_size
    x, b, c = (rows * row for rows in split.local_proj_dims)
    for i, at in enumerate((x, x + b - 1, x + b + c - 1)):

        def flip(block, at=at):
            d.pages[STATE_LAYERS[1], tp - 1][block, 0, 0, at] ^= 1

        d.damage_state = flip
        out = load(p, d, 100, f"bad{i}", prompt=tokens(100, i + 1))
        assert out.finish_reason == FinishReason.ERROR
        assert d.stats.pop("blocks_mismatched") == 1
    assert d.loads("verified") == 1 and d.loads("mismatch") == 3


@pytest.mark.parametrize("family", ["mamba1", "gated delta net", "mamba2, 4 groups"])
def test_other_families_verify_at_unequal_tp(model, family):
    p, d = pair(model, dict(tp=2), dict(tp=4), family=family)
    load(p, d, 100)
    assert d.loads("verified") == 1


DRAFTS = {0: "mamba2, 1 group", 2: "mamba2, 1 group, 2 drafts"}
"""Families by the number of drafted tokens that conv states have room for."""


@pytest.mark.parametrize(("p_drafts", "d_drafts"), [(0, 2), (2, 0)])
@pytest.mark.parametrize("fail_closed", [False, True])
@pytest.mark.parametrize("d_tp", [1, 2])
def test_other_numbers_of_drafted_tokens_are_unverified_and_no_mismatch(
    model, transport, p_drafts, d_drafts, fail_closed, d_tp
):
    if transport == "mooncake" and p_drafts < d_drafts:
        pytest.skip("Mooncake itself refuses a producer of fewer blocks")
    p, d = pair(
        model,
        dict(family=DRAFTS[p_drafts], scratch=p_drafts),
        dict(
            family=DRAFTS[d_drafts],
            scratch=d_drafts,
            tp=d_tp,
            kv_checksum_fail_closed=fail_closed,
        ),
        transport=transport,
    )
    out = load(p, d, 100)
    assert d.stats["unverified:fingerprint"] == d.loads("unverified") == 1
    assert d.loads("mismatch") == d.stats["blocks_mismatched"] == 0
    ends = FinishReason.ERROR if fail_closed else FinishReason.LENGTH
    assert out.finish_reason == ends


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 2), (2, 1)])
def test_equal_numbers_of_drafted_tokens_verify_at_other_tp_sizes(
    model, transport, p_tp, d_tp
):
    both = dict(family=DRAFTS[2], scratch=2, transport=transport)
    p, d = pair(model, dict(tp=p_tp), dict(tp=d_tp), **both)
    load(p, d, 100)
    assert d.loads("verified") == 1 and d.stats["blocks_compared"] == 8
    d.damage_state = d.flip_state_bit
    load(p, d, 100, "bad", prompt=tokens(100, 7))
    assert d.loads("mismatch") == 1


def test_a_state_of_another_request_is_seen(model):
    p, d = pair(model)
    load(p, d, 90, "other", prompt=tokens(90, 3))
    stale = {k: v for k, v in p.states.items()}

    def swap(block):
        for n in STATE_LAYERS:
            d.put_state(block, n, next(v for (m, _), v in stale.items() if m == n))

    d.damage_state = swap
    load(p, d, 100)
    assert d.stats["blocks_mismatched"] == 1


def test_the_state_is_compared_beside_a_local_prefix_hit(model):
    p, d = pair(model, mode="align")
    prompt = tokens(101)
    load(p, d, 65, "warm", prompt=prompt[:65])
    d.stats.clear()
    load(p, d, 101, prompt=prompt)
    assert d.loads("verified") == 1
    assert d.stats["blocks_compared"] < 7 + 1


def test_cache_modes_may_differ(model):
    p, d = pair(model, dict(mode="align"), dict(mode="none"))
    load(p, d, 100)
    assert d.loads("verified") == 1 and d.stats["blocks_compared"] == 8


@pytest.mark.parametrize("d_tp", [1, 2])
def test_states_without_a_known_split_need_equal_tp(model, d_tp, caplog):
    p, d = pair(model, None, dict(tp=d_tp), splits=False)
    for i in range(2):
        load(p, d, 100, f"r{i}", prompt=tokens(100, i))
    assert d.loads("verified") == 2
    assert d.stats["blocks_compared"] == 2 * (8 if d_tp == 1 else 7)
    left_out = 0 if d_tp == 1 else 2
    assert d.stats.get("left_out:tp_sizes", 0) == left_out
    said = [x for x in caplog.messages if "leave out KV cache group 1: tp_sizes" in x]
    assert len(said) == (left_out > 0)
    # Every worker said so when it started.
    started = [x for x in caplog.messages if "KV checksums do not cover, on " in x]
    ends = [x.split("group 1 if ")[1] for x in started]
    assert (
        ends
        == ["the other side's TP size is not 1"]
        + [f"the other side's TP size is not {d_tp}"] * d_tp
    )


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 2), (2, 1)])
def test_fail_closed_leaves_out_states_of_other_tp_sizes_and_checks_the_rest(
    model, transport, p_tp, d_tp, policy, mode, log
):
    p, d = pair(
        model,
        dict(tp=p_tp),
        dict(tp=d_tp, kv_checksum_fail_closed=True, policy=policy),
        splits=False,
        mode=mode,
        transport=transport,
    )
    d.damage_state = d.flip_state_bit
    for i in range(2):
        out = load(p, d, 100, f"r{i}", prompt=tokens(100, i))
        assert out.finish_reason == FinishReason.LENGTH
    assert d.loads("verified") == 2 and d.stats["blocks_compared"] == 2 * 7
    assert d.stats["left_out:tp_sizes"] == 2
    (said,) = [x for x in log if "leave out KV cache group 1: tp_sizes" in x]
    assert said.startswith("WARNING")
    d.damage = lambda instance, req_id, ids: instance.kv[1][ids[2]].neg_()
    out = load(p, d, 100, "bad", prompt=tokens(100, 7))
    assert (d.loads("mismatch"), d.stats["blocks_mismatched"]) == (1, 1)
    ends = {"fail": FinishReason.ERROR, "recompute": FinishReason.LENGTH}
    assert out.finish_reason == ends[policy]
    assert d.stats["left_out:tp_sizes"] == 3


@pytest.mark.parametrize(("p_split", "d_split"), [((2, 1), (2, 1)), ((2, 2), (2, 1))])
def test_states_without_a_known_split_are_compared_at_equal_tp_sizes(
    model, transport, p_split, d_split
):
    p, d = pair(
        model,
        dict(tp=p_split[0], pp=p_split[1]),
        dict(tp=d_split[0], pp=d_split[1], kv_checksum_fail_closed=True),
        splits=False,
        transport=transport,
    )
    load(p, d, 100)
    assert d.loads("verified") == 1 and d.stats["blocks_compared"] == 8
    d.damage_state = d.flip_state_bit
    out = load(p, d, 100, "bad", prompt=tokens(100, 7))
    assert out.finish_reason == FinishReason.ERROR and d.loads("mismatch") == 1


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 2), (2, 1)])
def test_fail_closed_refuses_loads_of_which_all_is_left_out(
    model, transport, p_tp, d_tp
):
    p, d = pair(
        model,
        dict(tp=p_tp),
        dict(tp=d_tp, kv_checksum_fail_closed=True),
        splits=False,
        tokens=False,
        transport=transport,
    )
    out = load(p, d, 100)
    assert out.finish_reason == FinishReason.ERROR
    assert d.stats["unverified:nothing_in_common"] == d.loads("unverified") == 1
    assert d.stats["left_out:tp_sizes"] == 1


def test_one_stage_with_states_is_enough_to_need_equal_tp(model):
    """Workers of the other stages have no layers of the group."""
    split = dict(tp=2, pp=2, states_last=True)
    p, d = pair(model, None, split, splits=False)
    load(p, d, 100)
    assert d.loads("verified") == d.stats["left_out:tp_sizes"] == 1
    assert d.stats["blocks_compared"] == 7


def test_a_group_that_one_rank_skips_is_not_left_out_for_its_tp_size(model):
    """P summed it: that nobody compares it is said of the load."""
    p, d = pair(model, None, dict(tp=2), splits=False)
    worker = d.workers[-1]
    worker.skipped[1] = "state_split: for the test"
    del worker.groups[1]
    load(p, d, 100)
    assert d.loads("unverified") == d.stats["unverified:one_side_only"] == 1
    assert "left_out:tp_sizes" not in d.stats


@pytest.mark.parametrize(("d_tp", "outcome"), [(1, "verified"), (2, "unverified")])
def test_a_model_of_states_alone(model, d_tp, outcome):
    p, d = pair(model, None, dict(tp=d_tp), splits=False, tokens=False)
    load(p, d, 100)
    assert d.loads(outcome) == 1
    if outcome == "unverified":
        assert d.stats["unverified:nothing_in_common"] == 1
