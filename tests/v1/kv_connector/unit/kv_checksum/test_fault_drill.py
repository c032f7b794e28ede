# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test the drill: damage changes exactly what it says, and nothing starts unasked."""

import random
from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm.distributed.kv_transfer.kv_checksum import KVChecksumBlocks, payload
from vllm.distributed.kv_transfer.kv_checksum.fault_drill.connector import (
    Fault,
    KVChecksumFaultDrill,
    _drilled,
    drill_faults,
    drill_options,
    wrapped_connector,
)
from vllm.distributed.kv_transfer.kv_checksum.fault_drill.damage import (
    KINDS,
    PAYLOAD_KINDS,
    LayerCache,
    LoadedBlocks,
    NotApplicable,
    damage_payload,
    inflict,
)
from vllm.distributed.kv_transfer.kv_checksum.worker.formats import (
    LayerFormat,
    TokenOrder,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from .rig import caches as u
from .rig import instances as rig
from .rig import real_workers as real
from .rig import tier
from .rig.versions import REPORTED_PUSH, needs

TOKENS, HEADS, HEAD_SIZE, NUM_BLOCKS = 16, 4, 32, 12
IDS, OTHERS = [3, 7, 5], [8, 9]
NUM_TOKENS = 2 * TOKENS + 9
LAYERS = 4


def token_major(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def kernel_blocks(x):
    """Return two kernel blocks per block, head-major each."""
    b, h, n, c = x.shape
    split = x.view(b, h, 2, n // 2, c).transpose(1, 2).contiguous()
    return split.view(2 * b, h, n // 2, c)


def join_kernel_blocks(cache):
    b, h, n, c = cache.shape
    return cache.view(b // 2, 2, h, n, c).transpose(1, 2).reshape(b // 2, h, 2 * n, c)


def transpose_keys(x):
    """Return cells as CPU attention has them: keys [elements, tokens], then values."""
    keys, values = x[..., :HEAD_SIZE], x[..., HEAD_SIZE:]
    parts = [keys.transpose(-1, -2).flatten(2), values.flatten(2)]
    return torch.cat(parts, dim=-1).view(x.shape)


def restore_keys(cache):
    b, h, n, _ = cache.shape
    keys, values = cache.reshape(b, h, 2, -1).unbind(2)
    keys = keys.view(b, h, HEAD_SIZE, n).transpose(-1, -2)
    return torch.cat([keys, values.view(b, h, n, HEAD_SIZE)], dim=-1)


LAYOUTS = {
    "head major": (lambda x: x.clone(), lambda cache: cache),
    "token major": (token_major, lambda cache: cache),
    "kernel blocks": (kernel_blocks, join_kernel_blocks),
    "transposed keys": (transpose_keys, restore_keys),
}


class Layers(list):
    """Layer caches of one layout."""

    def __init__(self, layout: str) -> None:
        pack, self.unpack = LAYOUTS[layout]
        spec = u.full_spec(HEADS, TOKENS, HEAD_SIZE)
        self.transposed = layout == "transposed keys"
        for n in range(LAYERS):
            cache = pack(u.random_cache(NUM_BLOCKS, spec, seed=n))
            self.append(LayerCache(cache, NUM_BLOCKS, self.transposed))

    def logical(self) -> torch.Tensor:
        """Return a copy as ``(layers, blocks, H, tokens, elements)`` integers."""
        return torch.stack([self.unpack(x.cache.view(torch.int16)) for x in self])


@pytest.fixture(params=LAYOUTS)
def layers(request):
    return Layers(request.param)


def load_of(layers, **changes) -> LoadedBlocks:
    given = dict(
        block_ids=IDS, start=1, num_tokens=TOKENS + NUM_TOKENS, others=OTHERS, hits=1
    )
    return LoadedBlocks(layers, **{**given, **changes})


def expected(kind: str, kv: torch.Tensor) -> torch.Tensor:
    """Return `kind` of ``(layers, blocks, H, tokens, elements)``, hand-written."""
    old, new = kv, kv.clone()
    half = HEAD_SIZE
    a, b, c = IDS
    last_slot = NUM_TOKENS - 2 * TOKENS - 1
    if kind == "zero_block":
        new[:, a] = 0
    elif kind == "stale_block":
        new[:, a] = old[:, OTHERS[0]]
    elif kind == "other_request":
        new[:, [a, b, c]] = old[:, [OTHERS[0], OTHERS[1], OTHERS[0]]]
    elif kind == "shift_blocks":
        new[:, [a, b, c]] = old[:, [b, c, OTHERS[0]]]
    elif kind == "swap_blocks":
        new[:, [a, b]] = old[:, [b, a]]
    elif kind == "swap_tokens":
        new[:, a, :, [0, TOKENS - 1]] = old[:, a, :, [TOKENS - 1, 0]]
    elif kind == "token_off_by_one":
        new[:, a, :, 1] = old[:, a, :, 0]
    elif kind == "last_token_missing":
        new[:, c, :, last_slot] = old[:, OTHERS[0], :, last_slot]
    elif kind == "roll_heads":
        new[:, IDS] = old[:, IDS].roll(HEADS // 2, dims=2)
    elif kind == "roll_layers":
        new[:, IDS] = old.roll(LAYERS // 2, dims=0)[:, IDS]
    elif kind == "swap_kv":
        for block in IDS:
            new[:, block, :, :, :half] = old[:, block, :, :, half:]
            new[:, block, :, :, half:] = old[:, block, :, :, :half]
    return new


WHOLE = [
    "zero_block",
    "stale_block",
    "other_request",
    "shift_blocks",
    "swap_blocks",
    "swap_tokens",
    "token_off_by_one",
    "last_token_missing",
    "roll_heads",
    "roll_layers",
    "swap_kv",
]


@pytest.mark.parametrize("kind", WHOLE)
def test_it_changes_exactly_what_it_says(layers, kind):
    before = layers.logical()
    inflict(kind, load_of(layers))
    after = layers.logical()
    assert not torch.equal(before, after)
    assert torch.equal(after, expected(kind, before))


def test_head_major_read_as_token_major():
    spec = u.full_spec(HEADS, TOKENS, HEAD_SIZE)
    cache = u.random_cache(NUM_BLOCKS, spec)
    before = cache.view(torch.int16).clone()
    inflict("head_major_as_token_major", load_of([LayerCache(cache, NUM_BLOCKS)]))
    after = cache.view(torch.int16)
    for part in (slice(0, HEAD_SIZE), slice(HEAD_SIZE, None)):
        for block in range(NUM_BLOCKS):
            read = before[block, :, :, part].reshape(TOKENS, HEADS, -1)
            right = read.transpose(0, 1) if block in IDS else before[block, :, :, part]
            assert torch.equal(after[block, :, :, part], right)


LANES = {
    "lane_bit_63": (63, 2),
    "lane_bit_62": (62, 2),
    "lane_bits_63_31": ((63, 31), 2),
    "lane_signs": ((15, 31, 47, 63), 2),
    "lane_4_spaced_words": (15, 4),
    "lane_8_words": (15, 8),
}


@pytest.mark.parametrize("kind", LANES)
def test_lane_faults_flip_their_bits_in_so_many_words(layers, kind):
    bits, words = LANES[kind]
    mask = sum(1 << b for b in (bits if isinstance(bits, tuple) else (bits,)))
    before = [layer.blocks.clone() for layer in layers]
    inflict(kind, load_of(layers))
    changed = [
        (x ^ y.blocks).contiguous().view(torch.int64).numpy().view(np.uint64)
        for x, y in zip(before, layers, strict=True)
    ]
    assert (changed[0][IDS[0]] == np.uint64(mask)).sum() == words
    assert np.count_nonzero(changed[0]) == words
    assert not any(np.any(c) for c in changed[1:])


@pytest.mark.parametrize(
    ("kind", "num_bytes"),
    [("bit_flip", 1), ("byte", 1), ("zero_64_bytes", 64), ("zero_4096_bytes", 4096)],
)
@pytest.mark.parametrize("hits", [1, 2])
def test_bytes_of_the_hit_blocks(layers, kind, num_bytes, hits):
    if num_bytes > 1:
        for layer in layers:
            layer.blocks[:] |= 1  # so that each byte set to zero is a change
    before = [layer.blocks.clone() for layer in layers]
    inflict(kind, load_of(layers, hits=hits))
    changed = before[0] ^ layers[0].blocks
    for at, block in enumerate(IDS):
        assert (changed[block] != 0).sum() == (num_bytes if at < hits else 0)
    assert (changed != 0).sum() == hits * num_bytes
    if kind == "bit_flip":
        assert sorted(changed.flatten().tolist())[-1] == 0x40
    for x, layer in zip(before[1:], layers[1:], strict=True):
        assert torch.equal(x, layer.blocks)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_seen_by_the_checksum(layers, kind):
    caches = {f"model.layers.{n}.attn": layer.cache for n, layer in enumerate(layers)}
    spec = u.full_spec(HEADS, TOKENS, HEAD_SIZE)
    order = TokenOrder.CPU_VECTORS if layers.transposed else None
    w = u.worker(
        u.config(NUM_BLOCKS, (list(caches), spec)),
        caches,
        formats=dict.fromkeys(caches, LayerFormat(order=order)),
    )
    blocks = KVChecksumBlocks(TOKENS + NUM_TOKENS, {0: (1, IDS)})
    before = u.values_of(u.send_record(w, blocks))
    inflict(kind, load_of(layers))
    assert u.values_of(u.send_record(w, blocks)) != before


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("swap_blocks", {"block_ids": [3], "num_tokens": 2 * TOKENS}),
        ("swap_tokens", {"num_tokens": TOKENS + 1, "block_ids": [3]}),
        ("stale_block", {"others": []}),
        ("last_token_missing", {"others": []}),
        ("lane_bit_63", {"num_tokens": TOKENS + 1, "block_ids": [3]}),
        ("bit_flip", {"block_ids": []}),
        ("bit_flip", {"layers": []}),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(layers, kind, changes):
    before = [layer.blocks.clone() for layer in layers]
    given = {"layers": layers, **changes}
    with pytest.raises(NotApplicable):
        inflict(kind, load_of(**given))
    assert all(torch.equal(x, y.blocks) for x, y in zip(before, layers, strict=True))


@pytest.mark.parametrize(("tokens", "cell"), [(16, 10), (4, 16)])
def test_lanes_need_words_of_8_bytes(tokens, cell):
    """Try two heads of fp8 with 5 elements, and a block of 8 words."""
    cache = torch.randint(0, 256, (NUM_BLOCKS, 2, tokens, cell), dtype=torch.uint8)
    load = LoadedBlocks([LayerCache(cache, NUM_BLOCKS)], [3], 0, tokens)
    with pytest.raises(NotApplicable):
        inflict("lane_4_spaced_words", load)


def test_a_mamba_page_can_be_damaged():
    cache = torch.randint(-128, 127, (NUM_BLOCKS, 1, 1, 96), dtype=torch.int8)
    before = cache.clone()
    page = LoadedBlocks([LayerCache(cache, NUM_BLOCKS)], [3], 0, 9)
    inflict("bit_flip", page)
    assert (before != cache).nonzero().tolist() == [[3, 0, 0, 0]]
    with pytest.raises(NotApplicable):
        inflict("swap_kv", page)


# ---- payloads


def a_payload(seed: int) -> bytes:
    values = np.arange(seed, seed + 3, dtype=np.uint64)
    groups = {0: payload.GroupChecksums(7, 16, 0, values)}
    return payload.encode(payload.KVChecksumPayload(40, 1, groups))


def test_payload_damage():
    sent, other = a_payload(1), a_payload(2)
    assert damage_payload("lost_payload", sent, other) is None
    assert damage_payload("other_request_payload", sent, other) == other
    with pytest.raises(payload.PayloadVersionError):
        payload.decode(damage_payload("other_version_payload", sent, other))
    with pytest.raises(ValueError, match="malformed"):
        payload.decode(damage_payload("cut_payload", sent, other))
    with pytest.raises(NotApplicable):
        damage_payload("other_request_payload", sent, None)
    with pytest.raises(ValueError, match="unknown"):
        damage_payload("no_such", sent, other)


# ---- options

OPTED_IN = {"damage_kv_on_purpose": True, "connector": "NixlPushConnector"}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (None, "damage_kv_on_purpose"),
        ({}, "damage_kv_on_purpose"),
        ({**OPTED_IN, "damage_kv_on_purpose": "yes"}, "damage_kv_on_purpose"),
        ({"damage_kv_on_purpose": True}, "connector"),
    ],
)
def test_it_refuses_to_start_and_names_the_option(options, names):
    with pytest.raises(ValueError, match=f"kv_checksum_fault_drill.*{names}"):
        drill_options({"kv_checksum_fault_drill": options})


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("explode", "unknown fault"),
        ({"probability": 0.5}, "unknown fault"),
        ({"kind": "byte", "often": 1}, "unknown settings"),
        ({"kind": "byte", "probability": 2}, "probability"),
        ({"kind": "byte", "blocks": 0}, "blocks"),
        ({"kind": "byte", "skip": -1}, "skip"),
    ],
)
def test_faults_are_checked_at_startup(fault, says):
    with pytest.raises(ValueError, match=says):
        drill_faults({"faults": {"x": fault}})


def test_faults_by_name_and_by_settings():
    faults = drill_faults(
        {"faults": {"a": "byte", "b": {"kind": "lost_payload", "probability": 0.1}}}
    )
    assert faults == {"a": Fault("byte"), "b": Fault("lost_payload", 0.1)}


def test_the_wrapped_connector_is_named_in_the_options():
    extra = {"kv_checksum_fault_drill": OPTED_IN}
    assert wrapped_connector(extra).__name__ == "NixlPushConnector"
    extra = {"kv_checksum_fault_drill": {**OPTED_IN, "connector": "ExampleConnector"}}
    with pytest.raises(ValueError, match="ExampleConnector"):
        wrapped_connector(extra)


def test_the_wrapped_connectors_statistics_do_not_pile_up():
    """It keeps them, a few numbers per load, until they are taken."""
    real = wrapped_connector({"kv_checksum_fault_drill": OPTED_IN})
    drill = object.__new__(_drilled(real))
    kept = [1.5, 2.5]
    drill.connector_worker = SimpleNamespace(get_kv_connector_stats=kept.clear)
    assert drill.get_kv_connector_stats() is None
    assert kept == []


def test_which_loads_are_damaged(monkeypatch):
    real = wrapped_connector({"kv_checksum_fault_drill": OPTED_IN})
    drill = object.__new__(_drilled(real))
    rare = {"kind": "byte", "probability": 0.25}
    drill._faults = drill_faults(
        {"faults": {"a-": "byte", "a-b": "bit_flip", "rare-": rare}}
    )
    assert drill._fault("cmpl-a-b-0").kind == "byte", "the first prefix that fits"
    assert drill._fault("chatcmpl-other") is None
    monkeypatch.setattr(random, "random", random.Random(5).random)
    hits = sum(drill._fault("cmpl-rare-1") is not None for _ in range(2000))
    assert 400 < hits < 600


# ---- loads through the drill

UNVERIFIED = {"lost_payload", "other_version_payload", "cut_payload"}
"""Kinds that leave nothing to compare with; all others are mismatches."""


def drilled_pair(stack: ExitStack, model, transport: str):
    """Start P, and a D whose connector damages loads by the beginning of their ids."""
    p = real.real_instance(stack, model, "kv_producer", transport)
    faults = {f"{kind}-": kind for kind in (*KINDS, *PAYLOAD_KINDS)}
    options = {**OPTED_IN, "connector": p.transport.connector, "faults": faults}
    d = real.real_instance(
        stack,
        model,
        "kv_consumer",
        transport,
        kv_connector=KVChecksumFaultDrill.__name__,
        kv_connector_module_path=KVChecksumFaultDrill.__module__,
        kv_connector_extra_config={"kv_checksum_fault_drill": options},
    )
    return p, d


@pytest.mark.parametrize(
    "path", ["pull", pytest.param("push", marks=needs("0.31.0", REPORTED_PUSH))]
)
def test_every_kind_of_damage_has_its_verdict(model, path):
    """Load through the drill's own two sides, over the real NIXL.

    D asks itself in every step whether it sums what it loads, and `conftest` at the
    end whether each load was counted once.
    """
    with ExitStack() as stack:
        p, d = drilled_pair(stack, model, path)
        expected = Counter()
        for seed, kind in enumerate(["clean", *KINDS, *PAYLOAD_KINDS]):
            prompt = rig.tokens(300, seed)
            params = rig.prefill(p, f"cmpl-{kind}-0-aaaaaaaa", prompt)
            request = d.add(f"cmpl-{kind}-0-bbbbbbbb", prompt, params)
            real.run(p, d, request.is_finished)
            damaged = "unverified" if kind in UNVERIFIED else "mismatch"
            expected["verified" if kind == "clean" else damaged] += 1
            assert {x: d.loads(x) for x in expected} == expected, kind
        assert d.loads_compared == expected.total() and not d.unsummed


@pytest.mark.parametrize("kind", ["bit_flip", "zero_block", "lane_signs"])
def test_what_a_step_loads_for_itself_is_damaged_before_it_is_used(model, kind):
    """The drill over a connector that keeps KV by block hash; the ledger sees it."""
    drill = {**OPTED_IN, "faults": {"drill-": kind}}
    d = tier.TierInstance(model, num_blocks=40, sync=True, drill=drill)
    worker = KVChecksumFaultDrill(d.config, KVConnectorRole.WORKER, d.kv_config)
    worker.register_kv_caches({u.names(n)[0]: cache for n, cache in d.kv.items()})
    load = d.before_forward

    def load_and_damage(output):
        load(output)
        worker.bind_connector_metadata(output.kv_connector_metadata)
        worker.start_load_kv(None)

    d.before_forward = load_and_damage
    prompt = rig.tokens(200)
    d.ask("first", prompt)
    d.evict()
    request = d.add("cmpl-drill-1", prompt, None, max_tokens=30)
    for _ in range(3):
        d.step()
    assert not d.answer_kv_is_right(request)
    d.run(request)
    assert d.outcome("mismatch") == d.stats["loads_started"] == 1
