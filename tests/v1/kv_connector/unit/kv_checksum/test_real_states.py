# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test states of vLLM's own layers: other TP sizes, kernels, drafts and dtypes.

Layers are built, planned and allocated as in `rig.real_caches`. Which rows of a state a
rank holds, vLLM's weight loaders tell: every weight of a checkpoint that numbers its
channels and heads is the number of its row. Where a rank's pages hold them, the
layer's own `bind_kv_cache` tells.
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import vllm
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
from .rig.versions import needs

__all__ = ["single_rank"]

WORDS = {2: np.uint16, 4: np.uint32}
LAYOUTS = ("SD", "DS")


def numbers(first, count, *dims):
    """Return rows that each hold their own number, as float32 weights."""
    rows = torch.arange(first, first + count, dtype=torch.float32)
    return rows.view(-1, *(1 for _ in dims)).expand(-1, *dims)


def numbered_mamba(model):
    for n in range(2):
        name, kernel = f"backbone.layers.{n}.mixer", model.config.conv_kernel
        conv = (f"{name}.conv1d.weight", numbers(0, 256, 1, kernel))
        model.load_weights([conv, (f"{name}.D", numbers(0, 256))])


def numbered_olmo(model):
    for n in (0, 2):
        layer = model.model.layers[n].linear_attn
        layer.A_log.weight_loader(layer.A_log, numbers(0, 4))
        weight, kernel = layer.conv1d.weight, layer.conv_kernel_size
        for part, (first, size) in enumerate([(0, 64), (64, 64), (128, 128)]):
            weight.weight_loader(weight, numbers(first, size, 1, kernel), part)


def numbered_kda(layers):
    for layer in layers:
        weight, size = layer.conv1d.weight, layer.head_dim * layer.num_heads
        for part in range(3):
            rows = numbers(part * size, size, 1, layer.conv_size)
            weight.weight_loader(weight, rows, part)
        layer.A_log.weight_loader(layer.A_log, numbers(0, layer.num_heads))


def numbered_bailing_kda(layers):
    for layer in layers:
        size = layer.head_dim * layer.num_heads
        for part, conv in enumerate((layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)):
            rows = numbers(part * size, size, 1, layer.conv_size)
            conv.weight.weight_loader(conv.weight, rows)
        heads = numbers(0, layer.num_heads).view(1, 1, -1, 1)
        layer.A_log.weight_loader(layer.A_log, heads)


def numbered_short_conv(layers):
    for layer in layers:
        weight = layer.conv.weight
        weight.weight_loader(weight, numbers(0, layer.conv_dim, 1, layer.L_cache))


def rows_of_conv1d(layer):
    temporal = layer.D if hasattr(layer, "D") else layer.A_log
    return [layer.conv1d.weight[:, 0, 0], temporal]


def rows_of_bailing_kda(layer):
    convs = (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)
    return [torch.cat([c.weight[:, 0, 0] for c in convs]), layer.A_log.flatten()]


def rows_of_linear_attention(layer):
    """Return the numbers of the heads whose decay a rank computes with."""
    whole = layer.slope_rate.flatten().tolist()
    assert len({*whole}) == len(whole)
    return [torch.tensor([whole.index(x) for x in layer.tp_slope.flatten().tolist()])]


@dataclass(frozen=True)
class Family:
    """vLLM's layers of one kind.

    Attributes:
        load: gives weights that tell channels and heads the row's number.
        conv: channels of the conv state of all ranks; None without one.
        temporal: whether there is a temporal state.
        rows: returns the numbers of a rank's rows, per state, as its weights hold them.
        ranks: TP ranks that its heads divide into.

    """

    load: object
    conv: int | None
    temporal: bool = True
    rows: object = rows_of_conv1d
    ranks: int = 4


MODELS = {
    "mamba": Family(numbered_mamba, 256),
    "olmo_hybrid": Family(numbered_olmo, 256, ranks=2),
}
"""vLLM's Mamba1 layers, and OLMo's gated delta nets, in their models."""

FAMILIES = {
    **MODELS,
    "kda": Family(numbered_kda, 768),
    "kda of Kimi K3": Family(numbered_kda, 768),
    "kda of Bailing": Family(numbered_bailing_kda, 768, rows=rows_of_bailing_kda),
    "short convolution": Family(
        numbered_short_conv, 256, False, lambda layer: [layer.conv.weight[:, 0, 0]]
    ),
    "linear attention": Family(
        lambda layers: None, None, rows=rows_of_linear_attention
    ),
}


SIZES = [
    (name, *sizes)
    for name, family in FAMILIES.items()
    for sizes in ((1, 2), (2, 1), (4, 2))
    if max(sizes) <= family.ranks
]
"""Families, with P's and D's TP sizes."""


@pytest.fixture(params=LAYOUTS)
def conv_layout(request, monkeypatch):
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: request.param)
    return request.param


old_vllm = needs("0.32.0", "such drafts in this model runner")


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
    load = FAMILIES[family].load
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


def rows_of(family, layer):
    """Return the numbers of a rank's rows, per state."""
    return [w.detach().float().long() for w in FAMILIES[family].rows(layer)]


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


def global_shapes(family, spec, layout, tp):
    """Return ``(rows, elements)`` of the unsharded states, from a rank's shapes."""
    shapes, kind = list(spec.shapes), FAMILIES[family]
    found = []
    if kind.conv is not None:
        conv = shapes.pop(0)
        found.append((kind.conv, conv[0] if layout == "SD" else conv[1]))
    if kind.temporal:
        temporal = shapes.pop(0)
        found.append((temporal[0] * tp, int(np.prod(temporal[1:]))))
    assert not shapes
    return found


def fill(family, ranks, layout):
    """Give all ranks their part of the same states; the states by layer name."""
    states = {}
    for name, (_, spec) in state_layers(ranks[0]).items():
        shapes = global_shapes(family, spec, layout, len(ranks))
        states[name] = unsharded(shapes, spec.dtypes, number_of(name))
        for rank in ranks:
            held = rows_of(family, rank.layers[name])
            views = views_of(rank, name)
            for i, (view, rows) in enumerate(zip(views, held, strict=True)):
                part = states[name][i][rows.numpy()].view(view.numpy().dtype)
                if i == 0 and FAMILIES[family].conv is not None and layout == "SD":
                    part = part.T
                view[:] = torch.from_numpy(np.ascontiguousarray(part)).view(view.shape)
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
        shapes = global_shapes(family, spec, conv_layout, 1)
        for i, rows in enumerate(rows_of(family, whole.layers[name])):
            assert rows.tolist() == list(range(shapes[i][0]))
            shares = [rows_of(family, rank.layers[name])[i] for rank in ranks]
            assert sorted(torch.cat(shares).tolist()) == rows.tolist()


@pytest.mark.parametrize(("family", "p_tp", "d_tp"), SIZES)
def test_states_of_vllm_s_layers_verify_at_other_tp_sizes(
    family, p_tp, d_tp, conv_layout
):
    p, d = (made(family, tp, conv_layout) for tp in (p_tp, d_tp))
    states = fill(family, p, conv_layout)
    fill(family, d, conv_layout)
    assert verdict_of(p, d).outcome == "verified"
    for group_id in {group_id for group_id, _ in state_layers(d[0]).values()}:
        names = [n for n, (g, _) in state_layers(d[0]).items() if g == group_id]
        whole = [reference.state_sum(states[n], number_of(n)) for n in names]
        for ranks in (p, d):
            assert checks_of(ranks, group_id)[0].tolist() == [sum(whole) % 2**64]


@pytest.mark.parametrize(("family", "p_tp", "d_tp"), SIZES)
def test_a_flipped_bit_of_any_rank_and_state_is_a_mismatch(
    family, p_tp, d_tp, conv_layout
):
    p, d = (made(family, tp, conv_layout) for tp in (p_tp, d_tp))
    fill(family, p, conv_layout)
    fill(family, d, conv_layout)
    for rank in d:
        for name in state_layers(rank):
            for state in views_of(rank, name):
                state.view(-1)[-3] ^= 8
                assert verdict_of(p, d).outcome == "mismatch"
                state.view(-1)[-3] ^= 8
    assert verdict_of(p, d).outcome == "verified"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("state", [0, 1], ids=["first", "second"])
def test_states_that_two_ranks_exchange_are_a_mismatch(family, state, conv_layout):
    p, d = (made(family, tp, conv_layout) for tp in (1, 2))
    if state == len(rows_of(family, next(iter(p[0].layers.values())))):
        pytest.skip("the layer has one state")
    fill(family, p, conv_layout)
    fill(family, d, conv_layout)
    name = next(iter(state_layers(d[0])))
    first, second = (views_of(rank, name)[state] for rank in d)
    kept = first.clone()
    first[:], second[:] = second.clone(), kept
    assert verdict_of(p, d).outcome == "mismatch"


# ---- what else of a state differs between instances


def conv_lengths(ranks, layout):
    specs = [spec for _, spec in state_layers(ranks[0]).values()]
    # A conv row is as long in any family.
    return {global_shapes("mamba", spec, layout, len(ranks))[0][1] for spec in specs}


@pytest.mark.parametrize("family", MODELS)
def test_conv_kernels_of_4_and_5_are_told_apart(family, conv_layout):
    p, d = made(family, 1, conv_layout), made(family, 1, conv_layout, "kernel 5")
    assert [conv_lengths(side, conv_layout) for side in (p, d)] == [{3}, {4}]
    fill(family, p, conv_layout)
    fill(family, d, conv_layout)
    verdict = verdict_of(p, d)
    assert (verdict.outcome, verdict.reason) == ("unverified", Unverified.FINGERPRINT)
    for group_id, _ in state_layers(p[0]).values():
        prints = {r.worker.groups[group_id].fingerprint for r in (*p, *d)}
        assert len(prints) == 2


@old_vllm
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
        fill("olmo_hybrid", p, conv_layout)
        fill("olmo_hybrid", d, conv_layout)
        verdict = verdict_of(p, d)
        assert verdict.outcome == "unverified" and not verdict.num_mismatched
        assert {g.unverified for g in verdict.groups.values()} == {
            Unverified.FINGERPRINT
        }


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param("olmo_hybrid", "3 drafts", marks=old_vllm),
        ("mamba", "kernel 5"),
        ("mamba", "float32 conv"),
        ("olmo_hybrid", "float32 conv"),
    ],
)
def test_equal_drafts_kernels_and_dtypes_verify_at_other_tp_sizes(
    family, settings, conv_layout
):
    one, two = (made(family, tp, conv_layout, settings) for tp in (1, 2))
    states = fill(family, one, conv_layout)
    fill(family, two, conv_layout)
    width = 4 if settings == "float32 conv" else 2
    assert {conv.itemsize for conv, _ in states.values()} == {width}
    for p, d in ((one, two), (two, one)):
        assert verdict_of(p, d).outcome == "verified"
        conv, _ = views_of(d[-1], next(iter(states)))
        conv.view(-1)[-1] ^= 1
        assert verdict_of(p, d).outcome == "mismatch"
        conv.view(-1)[-1] ^= 1


@pytest.mark.parametrize("family", MODELS)
def test_conv_states_of_float32_and_bfloat16_are_told_apart(family, conv_layout):
    p, d = made(family, 1, conv_layout), made(family, 2, conv_layout, "float32 conv")
    fill(family, p, conv_layout)
    fill(family, d, conv_layout)
    verdict = verdict_of(p, d)
    assert (verdict.outcome, verdict.reason) == ("unverified", Unverified.FINGERPRINT)


# ---- layers that cannot be built here


@pytest.mark.parametrize(
    ("path", "name"),
    [
        pytest.param(
            "models/glm5next/common/kda.py",
            "Glm5NextLinearAttention",
            marks=needs("0.31.0", "such model"),
        ),
        ("models/kimi_k3/amd/kda.py", "KimiK3DeltaAttention"),
    ],
)
def test_other_kda_layers_have_states_of_the_same_sizes(path, name):
    """Their shapes and splits come from the same three sizes."""
    tree = ast.parse((Path(vllm.__file__).parent / path).read_text())
    (layer,) = (
        n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name
    )
    calls = {
        ast.unparse(call.func).rpartition(".")[2]: call
        for call in ast.walk(layer)
        if isinstance(call, ast.Call) and "kda_state_" in ast.unparse(call.func)
    }
    sizes = ["self.tp_size", "self.num_heads", "self.head_dim"]
    shape, splits = calls["kda_state_shape"], calls["kda_state_splits"]
    assert [ast.unparse(x) for x in shape.args] == sizes
    assert {x.arg for x in shape.keywords} == {"conv_kernel_size", "num_spec"}
    assert [ast.unparse(x.value) for x in splits.keywords] == sizes
