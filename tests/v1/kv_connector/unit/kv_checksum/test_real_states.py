# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test states of vLLM's own layers: other TP sizes, kernels, drafts and dtypes.

Layers are built, planned and allocated as in `rig.real_caches`. Which rows of a state a
rank holds, vLLM's weight loaders tell: every weight of a checkpoint that numbers its
channels and heads is the number of its row. Where a rank's pages hold them, the
layer's own `bind_kv_cache` tells.
"""

from functools import cache

import numpy as np
import pytest
import torch

from vllm.distributed.kv_transfer.kv_checksum import KVChecksumBlocks
from vllm.distributed.kv_transfer.kv_checksum.checksum import (
    add_records,
    replica_checks,
)
from vllm.distributed.kv_transfer.kv_checksum.payload import (
    GroupChecksums,
    KVChecksumPayload,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.blocks import Units
from vllm.distributed.kv_transfer.kv_checksum.scheduler.group_comparison import (
    LocalGroup,
    judge,
)
from vllm.distributed.kv_transfer.kv_checksum.verdict import Unverified
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.v1.kv_cache_interface import MambaSpec

from .rig import caches as u
from .rig import reference
from .rig.real_caches import Rank, number_of, single_rank

__all__ = ["single_rank"]

WORDS = {2: np.uint16, 4: np.uint32}
CHANNELS = 256
LAYOUTS = ("SD", "DS")


def numbers(first, count, *dims):
    """Return rows that each hold their own number, as float32 weights."""
    rows = torch.arange(first, first + count, dtype=torch.float32)
    return rows.view(-1, *(1 for _ in dims)).expand(-1, *dims)


def numbered_mamba(model):
    for n in range(2):
        name, kernel = f"backbone.layers.{n}.mixer", model.config.conv_kernel
        conv = (f"{name}.conv1d.weight", numbers(0, CHANNELS, 1, kernel))
        model.load_weights([conv, (f"{name}.D", numbers(0, CHANNELS))])


def numbered_olmo(model):
    for n in (0, 2):
        layer = model.model.layers[n].linear_attn
        layer.A_log.weight_loader(layer.A_log, numbers(0, 4))
        weight, kernel = layer.conv1d.weight, layer.conv_kernel_size
        for part, (first, size) in enumerate([(0, 64), (64, 64), (128, 128)]):
            weight.weight_loader(weight, numbers(first, size, 1, kernel), part)


FAMILIES = {"mamba": numbered_mamba, "olmo_hybrid": numbered_olmo}
"""vLLM's Mamba1 layers, and OLMo's gated delta nets."""


@pytest.fixture(params=LAYOUTS)
def conv_layout(request, monkeypatch):
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: request.param)
    return request.param


def drafts(number):
    return dict(speculative_config=dict(method="ngram", num_speculative_tokens=number))


SETTINGS = {
    "": {},
    "kernel 5": dict(hf_overrides={"conv_kernel": 5, "linear_conv_kernel_dim": 5}),
    "1 draft": drafts(1),
    "3 drafts": drafts(3),
    "float32 conv": dict(mamba_cache_dtype="float32"),
}


@cache
def made(family, tp, layout, settings=""):
    """Return the ranks of an instance; `layout` is that of the conv states."""
    load = FAMILIES[family]
    settings = SETTINGS[settings]
    return [Rank(family, "LBHNC", rank, tp, settings, load) for rank in range(tp)]


def state_layers(rank):
    """Return layers that hold states, by name, with their group and their spec."""
    return {
        name: (group_id, group.kv_cache_spec)
        for group_id, group in enumerate(rank.cfg.kv_cache_groups)
        if isinstance(group.kv_cache_spec, MambaSpec)
        for name in group.layer_names
    }


def block_of(group_id):
    """Return a block of the group's own, as groups overlay the same bytes."""
    return 3 + 2 * group_id


def rows_of(layer):
    """Return the numbers of the conv channels and temporal rows of a rank."""
    temporal = layer.D if hasattr(layer, "D") else layer.A_log
    return [w.detach().float().long() for w in (layer.conv1d.weight[:, 0, 0], temporal)]


def unsharded(shapes, dtypes, seed):
    draw = np.random.default_rng(seed)
    words = [WORDS[dtype.itemsize] for dtype in dtypes]
    return [
        draw.integers(0, 2 ** (8 * np.dtype(word).itemsize), shape).astype(word)
        for shape, word in zip(shapes, words, strict=True)
    ]


def views_of(rank, name):
    """Return a layer's states in its group's block, as the layer unpacks them."""
    integers = {2: torch.int16, 4: torch.int32}
    block = block_of(state_layers(rank)[name][0])
    states = [state[block] for state in rank.layers[name].kv_cache]
    return [state.view(integers[state.element_size()]) for state in states]


def global_shapes(spec, layout, tp):
    """Return ``(rows, elements)`` of the unsharded states, from a rank's shapes."""
    conv, temporal = spec.shapes
    length = conv[0] if layout == "SD" else conv[1]
    return (CHANNELS, length), (temporal[0] * tp, int(np.prod(temporal[1:])))


def fill(ranks, layout):
    """Give all ranks their part of the same states; the states by layer name."""
    states = {}
    for name, (_, spec) in state_layers(ranks[0]).items():
        shapes = global_shapes(spec, layout, len(ranks))
        states[name] = unsharded(shapes, spec.dtypes, number_of(name))
        for rank in ranks:
            conv, temporal = views_of(rank, name)
            channels, heads = rows_of(rank.layers[name])
            part = states[name][0][channels.numpy()].view(conv.numpy().dtype)
            conv[:] = torch.from_numpy(part.T if layout == "SD" else part)
            part = states[name][1][heads.numpy()].view(temporal.numpy().dtype)
            temporal[:] = torch.from_numpy(part).view(temporal.shape)
    return states


def checks_of(ranks, group_id):
    blocks = KVChecksumBlocks(57, {group_id: (0, [block_of(group_id)])})
    records = [u.send_record(rank.worker, blocks) for rank in ranks]
    assert not any(record.skipped_groups for record in records)
    return replica_checks(add_records(records, "r", group_id))


def verdict_of(p, d):
    """Return D's verdict of its state groups by P's sums of the same block."""
    payload, local = KVChecksumPayload(57, len(p), {}), {}
    for group_id in {group_id for group_id, _ in state_layers(p[0]).values()}:
        theirs, ours = (ranks[0].worker.groups[group_id] for ranks in (p, d))
        assert not theirs.equal_tp and not ours.equal_tp
        (values,) = checks_of(p, group_id)
        payload.groups[group_id] = GroupChecksums(theirs.fingerprint, 1, 0, values)
        local[group_id] = LocalGroup(
            ours.fingerprint, Units(1, 1), 0, checks_of(d, group_id), is_state=True
        )
    return judge(payload, local, 57)


@pytest.mark.parametrize("family", FAMILIES)
def test_weight_loaders_share_out_every_row_once(family, conv_layout):
    """Numbers of bfloat16 weights are exact; the other tests rest on this."""
    (whole,), ranks = (made(family, tp, conv_layout) for tp in (1, 2))
    for name, (_, spec) in state_layers(whole).items():
        shapes = global_shapes(spec, conv_layout, 1)
        for i, rows in enumerate(rows_of(whole.layers[name])):
            assert rows.tolist() == list(range(shapes[i][0]))
            shares = [rows_of(rank.layers[name])[i] for rank in ranks]
            assert sorted(torch.cat(shares).tolist()) == rows.tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 2), (2, 1)])
def test_states_of_vllm_s_layers_verify_at_other_tp_sizes(
    family, p_tp, d_tp, conv_layout
):
    p, d = (made(family, tp, conv_layout) for tp in (p_tp, d_tp))
    states = fill(p, conv_layout)
    fill(d, conv_layout)
    assert verdict_of(p, d).outcome == "verified"
    for group_id in {group_id for group_id, _ in state_layers(d[0]).values()}:
        names = [n for n, (g, _) in state_layers(d[0]).items() if g == group_id]
        whole = [reference.state_sum(states[n], number_of(n)) for n in names]
        for ranks in (p, d):
            assert checks_of(ranks, group_id)[0].tolist() == [sum(whole) % 2**64]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 2), (2, 1)])
def test_a_flipped_bit_of_any_rank_and_state_is_a_mismatch(
    family, p_tp, d_tp, conv_layout
):
    p, d = (made(family, tp, conv_layout) for tp in (p_tp, d_tp))
    fill(p, conv_layout)
    fill(d, conv_layout)
    for rank in d:
        for name in state_layers(rank):
            for state in views_of(rank, name):
                state.view(-1)[-3] ^= 8
                assert verdict_of(p, d).outcome == "mismatch"
                state.view(-1)[-3] ^= 8
    assert verdict_of(p, d).outcome == "verified"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("state", [0, 1], ids=["conv", "temporal"])
def test_states_that_two_ranks_exchange_are_a_mismatch(family, state, conv_layout):
    p, d = (made(family, tp, conv_layout) for tp in (1, 2))
    fill(p, conv_layout)
    fill(d, conv_layout)
    name = next(iter(state_layers(d[0])))
    first, second = (views_of(rank, name)[state] for rank in d)
    kept = first.clone()
    first[:], second[:] = second.clone(), kept
    assert verdict_of(p, d).outcome == "mismatch"


# ---- what else of a state differs between instances


def conv_lengths(ranks, layout):
    specs = [spec for _, spec in state_layers(ranks[0]).values()]
    return {global_shapes(spec, layout, len(ranks))[0][1] for spec in specs}


@pytest.mark.parametrize("family", FAMILIES)
def test_conv_kernels_of_4_and_5_are_told_apart(family, conv_layout):
    p, d = made(family, 1, conv_layout), made(family, 1, conv_layout, "kernel 5")
    assert [conv_lengths(side, conv_layout) for side in (p, d)] == [{3}, {4}]
    fill(p, conv_layout)
    fill(d, conv_layout)
    verdict = verdict_of(p, d)
    assert (verdict.outcome, verdict.reason) == ("unverified", Unverified.FINGERPRINT)
    for group_id, _ in state_layers(p[0]).values():
        prints = {r.worker.groups[group_id].fingerprint for r in (*p, *d)}
        assert len(prints) == 2


@pytest.mark.parametrize(
    ("theirs", "ours"), [("", "1 draft"), ("3 drafts", ""), ("1 draft", "3 drafts")]
)
def test_other_numbers_of_drafted_tokens_are_unverified_and_no_mismatch(
    theirs, ours, conv_layout
):
    """A conv state has room for what is drafted, so its rows are of other lengths."""
    p = made("olmo_hybrid", 1, conv_layout, theirs)
    for tp in (1, 2):
        d = made("olmo_hybrid", tp, conv_layout, ours)
        assert conv_lengths(p, conv_layout) != conv_lengths(d, conv_layout)
        fill(p, conv_layout)
        fill(d, conv_layout)
        verdict = verdict_of(p, d)
        assert verdict.outcome == "unverified" and not verdict.num_mismatched
        assert {g.unverified for g in verdict.groups.values()} == {
            Unverified.FINGERPRINT
        }


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("olmo_hybrid", "3 drafts"),
        ("mamba", "kernel 5"),
        ("mamba", "float32 conv"),
        ("olmo_hybrid", "float32 conv"),
    ],
)
def test_equal_drafts_kernels_and_dtypes_verify_at_other_tp_sizes(
    family, settings, conv_layout
):
    one, two = (made(family, tp, conv_layout, settings) for tp in (1, 2))
    states = fill(one, conv_layout)
    fill(two, conv_layout)
    width = 4 if settings == "float32 conv" else 2
    assert {conv.itemsize for conv, _ in states.values()} == {width}
    for p, d in ((one, two), (two, one)):
        assert verdict_of(p, d).outcome == "verified"
        conv, _ = views_of(d[-1], next(iter(states)))
        conv.view(-1)[-1] ^= 1
        assert verdict_of(p, d).outcome == "mismatch"
        conv.view(-1)[-1] ^= 1


@pytest.mark.parametrize("family", FAMILIES)
def test_conv_states_of_float32_and_bfloat16_are_told_apart(family, conv_layout):
    p, d = made(family, 1, conv_layout), made(family, 2, conv_layout, "float32 conv")
    fill(p, conv_layout)
    fill(d, conv_layout)
    verdict = verdict_of(p, d)
    assert (verdict.outcome, verdict.reason) == ("unverified", Unverified.FINGERPRINT)
