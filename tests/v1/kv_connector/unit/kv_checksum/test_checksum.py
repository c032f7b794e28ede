# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test the definition: known answers, what it sees, and what failing lanes do."""

import hashlib
import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm.distributed.kv_transfer.kv_checksum import KVChecksumBlocks, KVChecksumGroup
from vllm.distributed.kv_transfer.kv_checksum.checksum import (
    checksum_terms,
    replica_checks,
    slice_factor,
)
from vllm.distributed.kv_transfer.kv_checksum.worker.kernels import torch_reference
from vllm.distributed.kv_transfer.kv_checksum.worker.views import (
    LayerView,
    integer_view,
)
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from .rig import caches as u
from .rig import reference

VECTORS = json.loads(
    (Path(__file__).parent / "data" / "kv_checksum_vectors.json").read_text()
)


def vector_blocks(case: dict, layer: int) -> np.ndarray:
    """Return uint8 ``(blocks, heads, tokens, cell bytes)`` as the vectors describe."""
    shape = case["heads"], case["block_size"], case["cell_bytes"]
    return np.stack(
        [
            np.frombuffer(
                hashlib.shake_128(
                    f"{case['name']}/{layer}/{case['start'] + b}".encode()
                ).digest(int(np.prod(shape))),
                np.uint8,
            ).reshape(shape)
            for b in range(case["blocks"])
        ]
    )


def view_of(blocks: np.ndarray, layer: int) -> LayerView:
    """Return a layer view of uint8 ``(blocks, heads, tokens, bytes)``."""
    content = blocks.shape[-1]
    width = next(w for w in (8, 4, 2) if content % w == 0)
    cache = torch.from_numpy(blocks.copy())
    factors = [slice_factor(layer, h) for h in range(blocks.shape[1])]
    signed = torch.tensor([f - 2**64 if f >= 2**63 else f for f in factors])
    pieces = integer_view(cache, len(blocks), width)
    return LayerView("", pieces, width, content // width, signed, (1, 0))


def rows_for(start: int, blocks: int, block_size: int, num_tokens: int) -> torch.Tensor:
    size = reference.unit_size(block_size)
    units = np.arange(blocks * block_size // size)
    first = start * block_size + units * size
    valid = np.clip(num_tokens - first, 0, size)
    return torch.from_numpy(np.stack([units, first, valid]))


def torch_sums(case_layers: dict[int, np.ndarray], rows: torch.Tensor) -> list[int]:
    """Return the sums per block, from `rows` of all of its units."""
    out = torch.zeros(rows.shape[1], dtype=torch.int64)
    for layer, blocks in case_layers.items():
        torch_reference.prepare([view_of(blocks, layer)])(rows, out)
    sums = [int(v) for v in out.numpy().view(np.uint64)]
    return reference.by_blocks(sums, next(iter(case_layers.values())).shape[2])


@pytest.mark.parametrize("case", VECTORS, ids=lambda c: c["name"])
def test_known_answers(case):
    layers = {n: vector_blocks(case, n) for n in case["layers"]}
    expected = [int(v, 16) for v in case["expected"]]
    size = case["block_size"]
    assert expected == [
        reference.block_sum(
            {n: blocks[b] for n, blocks in layers.items()},
            (case["start"] + b) * size,
            case["num_tokens"],
        )
        for b in range(case["blocks"])
    ]
    rows = rows_for(case["start"], case["blocks"], size, case["num_tokens"])
    assert torch_sums(layers, rows) == expected


@pytest.mark.parametrize("case", VECTORS, ids=lambda c: c["name"])
def test_known_answers_of_a_worker(case):
    """Sum latents of so many bytes: a worker's sums of units add up to the answers."""
    size, width = case["block_size"], case["cell_bytes"] // 2
    spec = MLAAttentionSpec(
        block_size=size,
        num_kv_heads=case["heads"],
        head_size=width,
        dtype=torch.bfloat16,
    )
    layers = {u.names(n)[0]: vector_blocks(case, n) for n in case["layers"]}
    caches = {
        name: torch.from_numpy(data.copy()).view(torch.bfloat16)
        for name, data in layers.items()
    }
    worker = u.worker(u.config(case["blocks"], (layers, spec)), caches)
    blocks = KVChecksumBlocks(
        case["num_tokens"], {0: (case["start"], range(case["blocks"]))}
    )
    group = u.send_record(worker, blocks).checksums["r"][0]
    unit = reference.unit_size(size)
    assert group.start * unit == case["start"] * size
    sums = [int(value) for value in group.values[:, 0]]
    assert reference.by_blocks(sums, size) == [int(v, 16) for v in case["expected"]]


@pytest.mark.parametrize("limit", [1, 4096, 100_000])
def test_chunked_gathers_agree(limit, monkeypatch):
    case = next(c for c in VECTORS if c["name"] == "suffix")
    layers = {n: vector_blocks(case, n) for n in case["layers"]}
    rows = rows_for(case["start"], case["blocks"], 16, case["num_tokens"])
    monkeypatch.setattr(torch_reference, "_MAX_GATHER_BYTES", limit)
    assert torch_sums(layers, rows) == [int(v, 16) for v in case["expected"]]


def test_transient_memory_is_bounded():
    """The path allocates at most 64 MB whatever the number of rows."""
    blocks = np.zeros((64, 8, 16, 512), np.uint8)
    view = view_of(blocks, 0)
    rows = rows_for(0, 64, 16, 64 * 16).repeat(1, 100)
    out = torch.zeros(rows.shape[1], dtype=torch.int64)
    with torch.profiler.profile(profile_memory=True) as profile:
        torch_reference.prepare([view])(rows, out)
    alive = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    assert 0 < peak <= torch_reference._MAX_GATHER_BYTES


def test_two_small_blocks_add_up_to_a_large_one():
    rng = np.random.default_rng(0)
    large = rng.integers(0, 256, (1, 2, 32, 64), dtype=np.uint8)
    small = np.stack([large[0, :, :16], large[0, :, 16:]])
    for num_tokens in (32, 27, 16, 5):
        whole = torch_sums({3: large}, rows_for(0, 1, 32, num_tokens))
        parts = torch_sums({3: small}, rows_for(0, 2, 16, num_tokens))
        assert sum(parts) % 2**64 == whole[0]


def random_block(seed: int = 1) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {n: rng.integers(0, 256, (4, 16, 128), dtype=np.uint8) for n in (0, 1)}


def sum_of(block: dict[int, np.ndarray]) -> int:
    return torch_sums({n: b[None] for n, b in block.items()}, rows_for(0, 1, 16, 16))[0]


@pytest.mark.parametrize("what", ["tokens", "heads", "layers", "keys and values"])
def test_exchanges_are_seen(what):
    block = random_block()
    moved = {n: b.copy() for n, b in block.items()}
    if what == "tokens":
        moved[0][:, [3, 7]] = moved[0][:, [7, 3]]
    elif what == "heads":
        moved[0][[0, 2]] = moved[0][[2, 0]]
    elif what == "layers":
        moved = {0: block[1], 1: block[0]}
    else:
        moved[0] = np.roll(moved[0], 64, axis=-1)
    assert sum_of(moved) != sum_of(block)


def test_blocks_at_each_others_place_are_seen():
    blocks = np.stack([random_block(s)[0] for s in (1, 2)])
    rows = rows_for(0, 2, 16, 32)
    straight = torch_sums({0: blocks}, rows)
    crossed = torch_sums({0: blocks[::-1].copy()}, rows)
    assert straight[0] != crossed[0] and straight[1] != crossed[1]
    assert sum(straight) % 2**64 != sum(crossed) % 2**64


def test_slots_past_the_last_token_do_not_count():
    blocks = random_block()[0][None]
    rows = rows_for(0, 1, 16, 11)
    before = torch_sums({0: blocks}, rows)
    blocks[0, :, 11:] ^= 255
    assert torch_sums({0: blocks}, rows) == before
    blocks[0, :, 10] ^= 1
    assert torch_sums({0: blocks}, rows) != before


# Damage that failing lanes do: the same bits in several words of a block. `masks`
# are XORed into words at equal spacing. Plain weighted sums, Adler-32 miss shares
# of these; here every one of 4,000 blocks must be seen.
LANE_FAULTS = {
    "bit 63 in 2 words": (2, 1 << 63, None),
    "bit 62 in 2 words": (2, 1 << 62, None),
    "bit 0 in 4 words": (4, 1 << 0, 3),
    "bit 15 in 4 words": (4, 1 << 15, 3),
    "bit 31 in 4 words": (4, 1 << 31, 3),
    "bit 32 in 4 words": (4, 1 << 32, 3),
    "bit 15 in 8 consecutive words": (8, 1 << 15, 1),
    "bits 63 and 31 in 2 words": (2, 1 << 63 | 1 << 31, None),
    "signs of all bf16 values in 2 words": (2, 0x8000800080008000, None),
    **{
        f"bit {bit} in {words} words (any)": (words, 1 << bit, None)
        for words, bit in product((2, 3, 4, 8), range(64))
    },
}


@pytest.fixture(scope="module")
def bf16_blocks() -> np.ndarray:
    """Return uint64 ``(4000, words)``: random normal bf16 KV, one head's block each."""
    torch.manual_seed(0)
    values = torch.randn(4000, 16 * 32).to(torch.bfloat16)
    return values.view(torch.int64).numpy().view(np.uint64)


@pytest.mark.parametrize("fault", LANE_FAULTS)
def test_lane_faults_are_seen(fault, bf16_blocks):
    number, mask, spacing = LANE_FAULTS[fault]
    blocks, words = bf16_blocks.shape
    rng = np.random.default_rng(len(fault))
    if spacing is None:
        at = rng.random((blocks, words)).argsort(axis=1)[:, :number]
    else:
        first = rng.integers(0, words - number * spacing, (blocks, 1))
        at = first + np.arange(number) * spacing
    weights = np.uint64(slice_factor(5, 1)) * (
        2 * np.arange(words, dtype=np.uint64) + 1
    )
    chosen = np.take_along_axis(bf16_blocks, at, axis=1)
    before = checksum_terms(chosen, weights[at]).sum(axis=1, dtype=np.uint64)
    after = checksum_terms(chosen ^ np.uint64(mask), weights[at])
    assert np.all(before != after.sum(axis=1, dtype=np.uint64))


def test_a_missing_copy_is_told_and_not_summed_as_zero():
    ones = np.ones(3, np.uint64)
    layers, half = KVChecksumGroup(0, ((1, 0),), ones), KVChecksumGroup(0, (), ones)
    for parts in ({(1, 0): layers, (2, 1): half}, {(2, 0): half}):
        with pytest.raises(ValueError, match="a replica is missing"):
            replica_checks(parts)
