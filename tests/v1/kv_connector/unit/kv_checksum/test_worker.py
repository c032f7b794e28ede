# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test workers: every layout and split gives the definition's value; lifecycles."""

import pickle
from dataclasses import replace

import numba
import pytest
import torch

from vllm.distributed.kv_transfer.kv_checksum import (
    KVChecksumBlocks,
    KVChecksumOutput,
    KVChecksumScheduled,
)
from vllm.distributed.kv_transfer.kv_checksum import worker as worker_package
from vllm.distributed.kv_transfer.kv_checksum.checksum import Skipped
from vllm.distributed.kv_transfer.kv_checksum.worker import kernels
from vllm.distributed.kv_transfer.kv_checksum.worker import worker as worker_module
from vllm.distributed.kv_transfer.kv_checksum.worker.formats import (
    LayerFormat,
    TokenOrder,
)
from vllm.distributed.kv_transfer.kv_checksum.worker.kernels import (
    numba_kernel,
    torch_reference,
)
from vllm.distributed.kv_transfer.kv_checksum.worker.rows import build_rows
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    HiddenStateCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from .rig import caches as u
from .rig import reference
from .rig.versions import ON_EVERY_RANK, needs

BLOCKS = KVChecksumBlocks(num_tokens=57, groups={0: (1, [5, 2, 7])})


def layer_caches(spec, numbers=(0, 1), blocks=8):
    return {n: u.random_cache(blocks, spec, seed=n) for n in numbers}


def named(caches, suffix="self_attn.attn"):
    return {f"model.layers.{n}.{suffix}": c for n, c in caches.items()}


# ---- layouts


def token_major(cache):
    return cache.transpose(1, 2).contiguous().transpose(1, 2)


def interleaved(cache):
    """Put another layer's page between the blocks, and an offset before the first."""
    wide = torch.zeros(cache.shape[0], 3, *cache.shape[1:], dtype=cache.dtype)
    wide[:, 1] = cache
    return wide[:, 1]


def padded(cache):
    wide = torch.zeros(*cache.shape[:2], cache.shape[2] + 5, cache.shape[3])
    wide = wide.to(cache.dtype)
    wide[:, :, : cache.shape[2]] = cache
    return wide[:, :, : cache.shape[2]]


def kernel_split(cache):
    """Return blocks cut into kernel blocks of a quarter of their tokens."""
    blocks, heads, tokens, content = cache.shape
    parts = cache.view(blocks, heads, 4, tokens // 4, content).transpose(1, 2)
    return parts.reshape(blocks * 4, heads, tokens // 4, content)


@pytest.mark.parametrize(
    "layout", [lambda c: c, token_major, interleaved, padded, kernel_split]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_any_layout_gives_the_defined_value(layout, dtype):
    fp8 = dict(head_size=3, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    spec = u.full_spec(
        dtype=dtype, **(fp8 if dtype == torch.uint8 else dict(head_size=4))
    )
    caches = layer_caches(spec)
    laid_out = {n: layout(c) for n, c in named(caches).items()}
    w = u.worker(u.config(8, (laid_out, spec)), laid_out)
    got = u.values_of(u.send_record(w, BLOCKS))
    assert got == u.expected_sums(caches, [5, 2, 7], 1, 57)


@pytest.mark.parametrize("order", [TokenOrder.CPU_VECTORS, TokenOrder.CPU_TILES])
@pytest.mark.parametrize("mode", ["NONE", "FP8_PER_TENSOR"])
def test_both_paths_agree_where_a_pieces_bytes_lie_apart(order, mode):
    spec = u.full_spec(
        block_size=32,
        head_size=32,
        dtype=torch.bfloat16 if mode == "NONE" else torch.uint8,
        kv_quant_mode=KVQuantMode[mode],
    )
    caches = named(layer_caches(spec))
    formats = dict.fromkeys(caches, LayerFormat(order=order))
    w = u.worker(u.config(8, (caches, spec)), caches, formats=formats)
    blocks = KVChecksumBlocks(32 * 4 - 7, {0: (1, [5, 2, 7])})
    compiled = u.values_of(u.send_record(w, blocks))
    w._prepare(torch_reference.prepare)
    assert u.values_of(u.send_record(w, blocks)) == compiled


def test_chunked_gathers(monkeypatch):
    spec = u.full_spec()
    caches = layer_caches(spec)
    w = u.worker(u.config(8, (named(caches), spec)), named(caches))
    w._prepare(torch_reference.prepare)
    whole = u.values_of(u.send_record(w, BLOCKS))
    monkeypatch.setattr(torch_reference, "_MAX_GATHER_BYTES", 1)
    assert u.values_of(u.send_record(w, BLOCKS)) == whole


def test_the_package_s_bound_on_gathers_holds_for_workers_built_after_it_is_set(
    monkeypatch,
):
    """Without Triton a device is served by PyTorch, in chunks of that many bytes."""
    spec = u.full_spec()
    caches = named(layer_caches(spec))
    config = u.config(8, (caches, spec))
    sums = u.values_of(u.send_record(u.worker(config, caches), BLOCKS))
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", False)
    monkeypatch.setattr(
        worker_module,
        "select_backend",
        lambda _, limit: kernels.select_backend(torch.device("cuda"), limit),
    )
    rows = []
    sum_chunk = torch_reference._sum_chunk
    monkeypatch.setattr(
        torch_reference,
        "_sum_chunk",
        lambda layer, *chunk: rows.append(len(chunk[0])) or sum_chunk(layer, *chunk),
    )
    for limit, largest in ((None, 3), (1, 1)):
        if limit is not None:
            monkeypatch.setattr(worker_package, "_MAX_GATHER_BYTES", limit)
        w = u.worker(config, caches)
        rows.clear()
        assert u.values_of(u.send_record(w, BLOCKS)) == sums
        assert max(rows) == largest


def test_every_layer_is_warmed_up_with_a_row_that_counts_nothing(monkeypatch):
    calls = []

    def prepare(layers):
        names = [layer.name for layer in layers]
        return lambda rows, out: calls.append((names, rows.tolist(), out.tolist()))

    monkeypatch.setattr(worker_module, "select_backend", lambda *_: prepare)
    spec = u.full_spec()
    caches = named(layer_caches(spec))
    u.worker(u.config(8, (caches, spec)), caches)
    assert calls == [(list(caches), [[0], [0], [0]], [0])]


# ---- TP, PP, replicas


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_parts_add_up_to_the_whole(tp, pp):
    spec = u.full_spec(heads=4)
    caches = layer_caches(spec, (0, 1, 2, 3))
    local = replace(spec, num_kv_heads=4 // tp)
    workers = []
    for stage in range(pp):
        here = {n: c for n, c in caches.items() if n * pp // 4 == stage}
        for rank in range(tp):
            heads = slice(rank * 4 // tp, (rank + 1) * 4 // tp)
            part = named({n: c[:, heads] for n, c in here.items()})
            workers.append(
                u.worker(
                    u.config(8, (part, local)),
                    part,
                    tp_rank=rank,
                    tp_size=tp,
                    pp_rank=stage,
                    uniform=4,
                )
            )
    expected = u.expected_sums(caches, [5, 2, 7], 1, 57)
    assert u.whole_sums(workers, BLOCKS) == [expected]


@pytest.mark.parametrize("spec_kind", ["gqa", "mla", "declared"])
def test_each_replica_is_a_check_of_its_own(spec_kind):
    tp, shards = 4, 2 if spec_kind == "gqa" else 1
    if spec_kind == "gqa":
        spec = u.full_spec(heads=1)
        uniform = 2
    else:
        spec = MLAAttentionSpec(
            block_size=16,
            num_kv_heads=1,
            head_size=24,
            dtype=torch.bfloat16,
            **(ON_EVERY_RANK if spec_kind == "declared" else {}),
        )
        uniform = None
    caches = layer_caches(replace(spec, num_kv_heads=shards))
    workers = []
    for rank in range(tp):
        head = rank * shards // tp
        part = named({n: c[:, head : head + 1].clone() for n, c in caches.items()})
        workers.append(
            u.worker(
                u.config(8, (part, spec)),
                part,
                tp_rank=rank,
                tp_size=tp,
                uniform=uniform,
            )
        )
        if rank == tp - 1:
            damaged = part[u.names(1)[0]]
    expected = u.expected_sums(caches, [5, 2, 7], 1, 57)
    replicas = tp // shards
    assert u.whole_sums(workers, BLOCKS) == [expected] * replicas
    damaged.view(torch.uint8)[2, 0, 0, 0] ^= 1
    sums = u.whole_sums(workers, BLOCKS)
    assert sums[:-1] == [expected] * (replicas - 1)
    assert [a == b for a, b in zip(sums[-1], expected, strict=True)] == [
        True,
        False,
        True,
    ]


@needs("0.31.0", "spec that declares its shards")
def test_several_caches_of_one_module_number_their_heads_one_after_another():
    main, extra = u.full_spec(heads=2), u.full_spec(heads=1, max_tp_shards=1)
    specs = {"attn": main, "indexer": extra, "proxy": main, "router": extra}
    specs = {f"model.layers.3.{name}": spec for name, spec in specs.items()}
    caches = {
        name: u.random_cache(8, spec, seed=seed)
        for seed, (name, spec) in enumerate(specs.items())
    }
    group = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    w = u.worker(u.config(8, (caches, group)), caches)
    merged = {3: torch.cat([*caches.values()], dim=1)}
    got = u.values_of(u.send_record(w, BLOCKS))
    assert got == u.expected_sums(merged, [5, 2, 7], 1, 57)


def test_kv_sharing_counts_once_under_the_lowest_name():
    spec = u.full_spec()
    caches = named(layer_caches(spec))
    shared = {**caches, "model.layers.5.self_attn.attn": caches[u.names(1)[0]]}
    plain = u.worker(u.config(8, (caches, spec)), caches)
    with_alias = u.worker(u.config(8, (shared, spec)), shared)
    a, b = u.send_record(plain, BLOCKS), u.send_record(with_alias, BLOCKS)
    assert u.values_of(a) == u.values_of(b)
    assert a.fingerprints == b.fingerprints


def test_another_cache_that_begins_at_the_same_address_counts():
    """Only what is the same in shape and strides is one cache under two names."""
    few, many = u.full_spec(heads=2), u.full_spec(heads=4)
    memory = u.random_cache(8, many)
    specs = dict(zip(u.names(0, 1, 2), (few, many, many), strict=True))
    by_token = memory.as_strided((8, 4, 16, 16), (1024, 16, 64, 1))
    views = memory[:, :2], memory, by_token
    caches = dict(zip(specs, views, strict=True))
    assert len({cache.data_ptr() for cache in views}) == 1
    group = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    w = u.worker(u.config(8, (caches, group)), caches)
    got = u.values_of(u.send_record(w, BLOCKS))
    assert got == u.expected_sums(dict(enumerate(views)), [5, 2, 7], 1, 57)


# ---- what is skipped


def test_a_host_resident_group_is_skipped():
    """HiSparse: what its layers' caches show is not where its KV is."""
    spec = u.full_spec()
    caches = named(layer_caches(spec))
    cfg = u.config(8, (caches, spec))
    cfg.kv_cache_groups[0].host_resident = True
    w = u.worker(cfg, caches)
    assert not w.groups and Skipped.of(w.skipped[0]) is Skipped.HOST_RESIDENT


def mamba_spec():
    return MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,))


def skip_cases():
    spec = u.full_spec()
    one_head = u.full_spec(heads=1)
    mla = dict(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    many = u.full_spec(heads=2**16 + 1, head_size=1)
    half = replace(many, num_kv_heads=2**15 + 1)
    many_heads = torch.zeros(8, 2**16 + 1, 16, 2, dtype=torch.bfloat16)
    name, other = u.names(0, 1)
    cache = u.random_cache(8, spec)
    single = u.random_cache(8, one_head)
    latent = u.random_cache(8, MLAAttentionSpec(**mla))
    unseen = LayerFormat("Backend", frozenset({"NONE"}))
    ring = CircularBufferSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16
    )
    return {
        "Mamba": (mamba_spec(), {name: cache}, {}),
        "compressed": (
            u.full_spec(tokens_per_state=4),
            {name: cache[:, :, :4]},
            dict(formats={name: unseen}),
        ),
        "states that do not divide a block": (
            u.full_spec(tokens_per_state=3),
            {name: cache[:, :, :5]},
            {},
        ),
        "one compressed layer of a uniform group": (
            UniformTypeKVCacheSpecs(
                block_size=16,
                kv_cache_specs={name: spec, other: u.full_spec(tokens_per_state=4)},
            ),
            {name: cache, other: cache[:, :, :4].clone()},
            dict(formats={other: unseen}),
        ),
        "too many heads": (many, {name: many_heads}, {}),
        "too many heads of all ranks": (
            half,
            {name: many_heads[:, : 2**15 + 1]},
            dict(tp_size=2),
        ),
        "too many heads of two caches": (
            UniformTypeKVCacheSpecs(
                block_size=16,
                kv_cache_specs={
                    "model.layers.0.attn": half,
                    "model.layers.0.indexer": replace(half, num_kv_heads=2**15),
                },
            ),
            {
                "model.layers.0.attn": many_heads[:, : 2**15 + 1],
                "model.layers.0.indexer": many_heads[:, 2**15 + 1 :],
            },
            {},
        ),
        "head slots": (u.full_spec(num_head_slots=4), {name: cache}, {}),
        "as many head slots as heads": (
            u.full_spec(num_head_slots=2, state_content_bytes=32),
            {name: cache},
            {},
        ),
        "packed cells": (u.full_spec(state_content_bytes=32), {name: cache}, {}),
        "bytes of no format": (u.full_spec(dtype=torch.uint8), {name: cache}, {}),
        "another cell kind": (
            spec,
            {name: cache},
            dict(formats={name: LayerFormat(cells=frozenset({"FP8_PER_TENSOR"}))}),
        ),
        "no cache": (spec, {}, {}),
        "keys and values of two sizes, apart": (
            (two_sizes := u.full_spec(head_size=16, head_size_v=8)),
            {name: u.random_cache(8, two_sizes)},
            dict(formats={name: LayerFormat(order=TokenOrder.CPU_VECTORS)}),
        ),
        "a key and a value in one piece, apart": (
            (narrow := u.full_spec(head_size=2)),
            {name: u.random_cache(8, narrow)},
            dict(formats={name: LayerFormat(order=TokenOrder.CPU_VECTORS)}),
        ),
        "tiles cut by kernel blocks": (
            u.full_spec(block_size=128, head_size=32),
            {name: kernel_split(u.random_cache(8, u.full_spec(2, 128, 32)))},
            dict(formats={name: LayerFormat(order=TokenOrder.CPU_TILES)}),
        ),
        "tiles that do not fill a block": (
            u.full_spec(block_size=16, head_size=32),
            {name: u.random_cache(8, u.full_spec(2, 16, 32))},
            dict(formats={name: LayerFormat(order=TokenOrder.CPU_TILES)}),
        ),
        "packed cells in an order of their own": (
            u.full_spec(
                head_size=32,
                dtype=torch.uint8,
                state_content_bytes=72,
                kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD,
            ),
            {name: torch.zeros(8, 2, 16, 72, dtype=torch.uint8)},
            dict(formats={name: LayerFormat(order=TokenOrder.CPU_VECTORS)}),
        ),
        "ring of a backend that was not seen": (
            ring,
            {name: cache},
            dict(formats={name: unseen}),
        ),
        "ring of packed rows": (
            replace(ring, dtype=torch.uint8, head_size=16),
            {name: cache.view(torch.uint8)},
            {},
        ),
        "ring of kernel blocks": (ring, {name: u.random_cache(16, spec)}, {}),
        "ring of other slots": (replace(ring, block_size=8), {name: cache}, {}),
        "ring of rows that do not fill a page": (
            ring,
            {name: cache},
            dict(formats={name: LayerFormat(ring_row=48)}),
        ),
        "rings that differ": (
            UniformTypeKVCacheSpecs(
                block_size=16, kv_cache_specs={name: ring, other: ring}
            ),
            {name: cache, other: cache.clone()},
            dict(formats={name: LayerFormat(ring_group=2)}),
        ),
        "rings and tokens": (
            UniformTypeKVCacheSpecs(
                block_size=16, kv_cache_specs={name: ring, other: spec}
            ),
            {name: cache, other: cache.clone()},
            {},
        ),
        "indexer": (
            MLAAttentionSpec(
                **{**mla, "dtype": torch.uint8, "head_size": 16},
                cache_role=SparseCacheRole.INDEXER,
            ),
            {name: latent.view(torch.uint8)},
            {},
        ),
        "too few blocks": (spec, {name: cache[:7]}, {}),
        "more heads": (spec, {name: u.random_cache(8, spec, heads=3)}, {}),
        "fewer heads": (spec, {name: single}, {}),
        "block size": (u.full_spec(block_size=32), {name: cache}, {}),
        "strides": (spec, {name: torch.zeros(8, 2, 16, 19)[..., 1:17].half()}, {}),
        "replication unknown": (one_head, {name: single}, dict(tp_size=2)),
        "two modules": (
            spec,
            {name: cache, "draft.layers.0.attn": cache.clone()},
            {},
        ),
        "no number": (spec, {"model.attn": cache}, {}),
        "two numbers": (spec, {"model.layers.0.1.attn": cache}, {}),
        "order unknown": (
            spec,
            {name: cache},
            dict(formats={name: LayerFormat(unknown="packed in its own way")}),
        ),
    }


SKIPPED_AS = {
    "compressed": Skipped.COMPRESSED,
    "states that do not divide a block": Skipped.COMPRESSED,
    "ring of a backend that was not seen": Skipped.BACKEND,
    "ring of packed rows": Skipped.PACKED_CELLS,
    "rings that differ": Skipped.RINGS,
    "rings and tokens": Skipped.STATES_AND_TOKENS,
    "one compressed layer of a uniform group": Skipped.COMPRESSED,
    "too many heads": Skipped.TOO_MANY_HEADS,
    "too many heads of all ranks": Skipped.TOO_MANY_HEADS,
    "too many heads of two caches": Skipped.TOO_MANY_HEADS,
    "head slots": Skipped.PACKED_HEADS,
    "as many head slots as heads": Skipped.PACKED_HEADS,
    "packed cells": Skipped.PACKED_CELLS,
    "bytes of no format": Skipped.PACKED_CELLS,
    "another cell kind": Skipped.BACKEND,
    "no cache": Skipped.NO_CACHE,
    "tiles cut by kernel blocks": Skipped.BACKEND,
    "tiles that do not fill a block": Skipped.BACKEND,
    "packed cells in an order of their own": Skipped.BACKEND,
    "replication unknown": Skipped.REPLICAS,
    "two modules": Skipped.LAYER_NAMES,
    "no number": Skipped.LAYER_NAMES,
    "two numbers": Skipped.LAYER_NAMES,
    "order unknown": Skipped.BACKEND,
}
"""The category of each case; of those that are not here, it is the memory layout."""


@pytest.mark.parametrize("case", skip_cases())
def test_a_skipped_group_is_said_and_the_one_beside_it_is_summed(case):
    spec, caches, kwargs = skip_cases()[case]
    if case == "strides":
        odd = torch.zeros(8 * 2 * 16 * 17, dtype=torch.float16)
        caches = {u.names(0)[0]: odd.as_strided((8, 2, 16, 16), (544, 272, 17, 1))}
    good = u.full_spec(heads=2)
    beside = {"model.layers.9.attn": u.random_cache(8, good, seed=3)}
    cfg = u.config(8, (caches or u.names(0), spec), (beside, good))
    w = u.worker(cfg, {**caches, **beside}, **kwargs)
    blocks = KVChecksumBlocks(57, {0: (1, [5, 2, 7]), 1: (1, [5, 2, 7])})
    record = u.send_record(w, blocks)
    assert set(record.skipped_groups) == {0}
    category = Skipped.of(record.skipped_groups[0])
    assert category is SKIPPED_AS.get(case, Skipped.MEMORY_LAYOUT)
    assert set(record.checksums["r"]) == {1}
    if kwargs.get("tp_size", 1) == 1:
        expected = u.expected_sums({9: beside["model.layers.9.attn"]}, [5, 2, 7], 1, 57)
        assert u.values_of(record, group_id=1) == expected


@pytest.mark.parametrize("caches_per_layer", [1, 2])
def test_as_many_heads_as_a_layer_may_have_are_covered(caches_per_layer):
    """Zeros add nothing, so the sum is that of the one head that is not zero."""
    heads = 2**16 // caches_per_layer
    spec = u.full_spec(heads, head_size=1)
    names = ["model.layers.3.attn", "model.layers.3.indexer"][:caches_per_layer]
    caches = {n: torch.zeros(8, heads, 16, 2, dtype=torch.bfloat16) for n in names}
    last = caches[names[-1]][5, -1].copy_(torch.randn(16, 2)).view(torch.uint8)
    specs = UniformTypeKVCacheSpecs(
        block_size=16, kv_cache_specs=dict.fromkeys(names, spec)
    )
    w = u.worker(u.config(8, (names, specs)), caches)
    record = u.send_record(w, KVChecksumBlocks(57, {0: (1, [5])}))
    expected = reference.slice_sum(last.numpy(), 3, 2**16 - 1, 16, 57)
    assert u.values_of(record) == [expected]


@pytest.mark.parametrize(
    "spec",
    [
        HiddenStateCacheSpec(
            block_size=16, num_kv_heads=1, head_size=16, dtype=torch.bfloat16
        ),
        ChunkedLocalAttentionSpec(
            block_size=16,
            num_kv_heads=1,
            head_size=8,
            dtype=torch.bfloat16,
            attention_chunk_size=64,
        ),
    ],
)
def test_other_token_major_specs_are_covered(spec):
    caches = layer_caches(spec)
    w = u.worker(u.config(8, (named(caches), spec)), named(caches))
    got = u.values_of(u.send_record(w, BLOCKS))
    assert got == u.expected_sums(caches, [5, 2, 7], 1, 57)


# ---- fingerprints


def test_fingerprints_do_not_depend_on_pp_or_block_size():
    spec = u.full_spec()
    caches = layer_caches(spec)
    stages = [named({n: c}) for n, c in caches.items()]
    whole = u.worker(u.config(8, (named(caches), spec)), named(caches))
    parts = [u.worker(u.config(8, (s, spec)), s) for s in stages]
    large = u.full_spec(block_size=32)
    wide = named(layer_caches(large))
    other_size = u.worker(u.config(8, (wide, large)), wide)
    print_of = {w: w.groups[0].fingerprint for w in (whole, *parts, other_size)}
    assert print_of[whole] == sum(print_of[p] for p in parts) % 2**64
    assert print_of[whole] == print_of[other_size]
    other = u.worker(u.config(8, (stages[0], spec)), stages[0])
    assert other.groups[0].fingerprint != print_of[whole]


def test_no_step_takes_a_variant_that_the_warm_up_did_not_compile():
    """Look at what numba compiled: arrays of one layout, however rows and sums lie.

    Groups beside each other, several columns and states of several units slice them.
    """
    spec = u.full_spec()
    latents = MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        head_size=32,
        dtype=torch.bfloat16,
        tokens_per_state=32,
    )
    a, b = (
        named(layer_caches(spec)),
        {"model.layers.7.attn": u.random_cache(8, latents)},
    )
    w = u.worker(u.config(8, (a, spec), (b, latents)), {**a, **b})
    variants = numba_kernel._sum_layers.signatures.copy()
    blocks = KVChecksumBlocks(150, {0: (0, [3, 1, 4] * 3), 1: (0, [4, 2, 6])})
    record = u.send_record(w, blocks)
    two_columns = torch.zeros((len(u.values_of(record)), 2), dtype=torch.int64)
    rows = torch.tensor([[3, 1], [0, 16], [16, 16]])
    w._sums[0][0][1](rows, two_columns[:2, 1])
    alone = torch.zeros(2, dtype=torch.int64)
    w._sums[0][0][1](rows, alone)
    assert torch.equal(two_columns[:2, 1], alone) and alone.all()
    assert numba_kernel._sum_layers.signatures == variants
    for variant in variants:
        arrays = [x for x in variant if isinstance(x, numba.types.Array)]
        assert {array.layout for array in arrays} == {"C"}
        assert {x for x in variant if x not in arrays} == {numba.types.int64}


# ---- life of a request


def two_group_worker():
    spec, window = u.full_spec(), u.full_spec(heads=3)
    a, b = named(layer_caches(spec)), {"model.layers.7.attn": u.random_cache(8, window)}
    return u.worker(u.config(8, (a, spec), (b, window)), {**a, **b})


def test_loads_are_summed_when_they_finish_and_forgotten_otherwise():
    w = two_group_worker()
    work = {r: BLOCKS for r in ("done", "failed", "aborted", "waiting")}
    w.bind(KVChecksumScheduled(reqs_to_recv=work))
    assert w.post_forward(None, set(), set()) is None
    w.bind(None)
    output = w.post_forward({"done", "failed"}, {"failed"}, {"aborted"})
    (record,) = output.finalize()
    assert set(record.checksums) == {"done"}
    assert set(w._recvs) == {"waiting"}
    w.bind(None)
    assert w.post_forward({"aborted", "failed"}, set(), set()) is None


def test_a_send_is_summed_once_in_its_step():
    w = two_group_worker()
    assert u.send_record(w, BLOCKS).seqs == {"r": 0}
    assert w.finalize_step(None) is None
    w.bind(None)
    assert w.post_forward(None, set(), set()) is None


def test_a_send_of_a_step_that_never_ended_is_not_summed_in_the_next():
    w = two_group_worker()
    w.bind(KVChecksumScheduled(reqs_to_send={"r": BLOCKS}))
    w.bind(None)
    assert w.post_forward(None, set(), set()) is None


@pytest.mark.parametrize("kind", ["reqs_to_send", "full_blocks", "sync_loads"])
def test_what_a_step_writes_is_summed_behind_the_drafter(kind):
    w = two_group_worker()
    w.bind(KVChecksumScheduled(**{kind: {"r": BLOCKS}}))
    assert w.post_forward(None, set(), set(), defer_sends=True) is None
    w.groups[0].layers[0].blocks[5] += 1  # the drafter writes
    (record,) = w.finalize_step(None).finalize()
    late = u.send_record(w, BLOCKS)
    assert u.values_of(record) == u.values_of(late)


def test_a_step_sums_its_loads_its_sends_and_what_it_fills():
    """Each has a record of its own, whatever else the step sums."""
    w = two_group_worker()
    w.bind(KVChecksumScheduled(reqs_to_recv={"loaded": BLOCKS}))
    w.bind(
        KVChecksumScheduled(reqs_to_send={"sent": BLOCKS}, full_blocks={"full": BLOCKS})
    )
    records = w.post_forward({"loaded"}, set(), set()).finalize()
    assert [[*record.checksums] for record in records] == [
        ["loaded"],
        ["sent"],
        ["full"],
    ]
    alone = u.values_of(u.send_record(w, BLOCKS))
    for record, name in zip(records, ("loaded", "sent", "full"), strict=True):
        assert u.values_of(record, name) == alone


def test_several_requests_and_groups_with_odd_numbers_of_rows():
    w = two_group_worker()
    work = {
        "a": KVChecksumBlocks(5, {0: (0, [3]), 1: (0, [4])}, seq=1),
        "b": KVChecksumBlocks(57, {0: (1, [5, 2, 7])}, seq=2),
        "c": KVChecksumBlocks(40, {0: (1, [6, 1]), 1: (2, [2])}, seq=3),
        "none": KVChecksumBlocks(9, {}, seq=4),
    }
    w.bind(KVChecksumScheduled(reqs_to_send=work))
    (record,) = w.post_forward(None, set(), set()).finalize()
    assert record.seqs == {"a": 1, "b": 2, "c": 3, "none": 4}
    assert record.checksums["none"] == {}
    for req_id, blocks in work.items():
        alone = u.send_record(w, blocks)
        for group_id in blocks.groups:
            assert u.values_of(record, req_id, group_id) == u.values_of(
                alone, group_id=group_id
            )
            assert (
                record.checksums[req_id][group_id].start == blocks.groups[group_id][0]
            )


def test_every_group_starts_at_an_even_column():
    """Keep reads of its rows 16-byte aligned."""
    w = two_group_worker()
    work = {"a": KVChecksumBlocks(57, {0: (1, [5, 2, 7]), 1: (0, [4])})}
    rows, segments, parts = build_rows(w.groups, work)
    assert [segment for _, segment in segments] == [slice(0, 3), slice(4, 5)]
    used = rows[:, :5].tolist()
    assert used == [[5, 2, 7, 0, 4], [16, 32, 48, 0, 0], [16, 16, 9, 0, 16]]
    assert [part.rows for part in parts] == [slice(0, 3), slice(4, 5)]


def test_a_worker_without_layers_of_the_model_still_reports():
    spec = u.full_spec()
    w = u.worker(u.config(8, ([], spec)), {})
    record = u.send_record(w, BLOCKS)
    assert record.checksums == {"r": {}} and record.skipped_groups == {}


def test_pickling_and_aggregation():
    w = two_group_worker()
    w.bind(KVChecksumScheduled(reqs_to_send={"r": BLOCKS}))
    output = w.post_forward(None, set(), set())
    copy = pickle.loads(pickle.dumps(output))
    assert isinstance(copy, KVChecksumOutput)
    both = copy.aggregate(output).aggregate(None).finalize()
    assert len(both) == 2
    assert u.values_of(both[0]) == u.values_of(both[1])


def test_the_engine_step_never_waits_for_the_device():
    w = two_group_worker()
    for group in w.groups.values():
        for layer in group.layers:
            layer.blocks = layer.blocks.as_subclass(u.SyncingTensor)
            layer.factors = layer.factors.as_subclass(u.SyncingTensor)
    w._prepare(torch_reference.prepare)  # what a device runs; numba reads host memory
    w.bind(KVChecksumScheduled(reqs_to_send={"r": BLOCKS}))
    assert w.post_forward(None, set(), set()) is not None
    with pytest.raises(AssertionError):
        w.groups[0].layers[0].blocks[0].sum().item()


def test_received_payloads_ride_a_record_of_their_own():
    spec = u.full_spec()
    w = u.worker(
        u.config(4, (u.names(0), spec)), {u.names(0)[0]: u.random_cache(4, spec)}
    )
    assert w.post_forward(None, set(), set(), received={}) is None
    blocks = KVChecksumBlocks(16, {0: (0, [1])})
    w.bind(KVChecksumScheduled(reqs_to_recv={"r": blocks}))
    output = w.post_forward({"r"}, set(), set(), received={"r": b"1", "x": b"2"})
    records = pickle.loads(pickle.dumps(output)).finalize()
    assert [r.received for r in records if r.received] == [{"r": b"1", "x": b"2"}]
    assert [set(r.checksums) for r in records if r.checksums] == [{"r"}]
