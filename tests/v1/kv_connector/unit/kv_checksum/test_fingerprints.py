# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test fingerprints: which layers a group's sums cover, and how bytes are read."""

import hashlib
from dataclasses import replace
from types import SimpleNamespace

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
from vllm.distributed.kv_transfer.kv_checksum.stored import BlockRun
from vllm.distributed.kv_transfer.kv_checksum.verdict import Unverified
from vllm.distributed.kv_transfer.kv_checksum.worker import formats
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.platforms import current_platform
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import (
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
)

from .rig import caches as u
from .rig import instances as rig
from .rig.states import DTYPES, FAMILIES
from .rig.versions import ON_EVERY_RANK

FP8 = dict(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)


def worker_of(
    spec,
    cache_dtype="auto",
    backend=FlashAttentionBackend,
    number=0,
    order=None,
    **tp,
):
    """Return a worker of a layer, asked as by `create_kv_checksum_worker`."""
    name, cache = u.names(number)[0], u.random_cache(8, spec)
    layer = SimpleNamespace(
        kv_cache_dtype=cache_dtype, get_attn_backend=lambda: backend
    )
    found = formats.layer_format(None, name, layer, cache)
    if order is not None:
        found = replace(found, order=order)
    w = u.worker(
        u.config(8, ([name], spec)), {name: cache}, formats={name: found}, **tp
    )
    assert w.skipped == {}
    return w


def print_of(*args, **kwargs):
    return worker_of(*args, **kwargs).groups[0].fingerprint


def known(text):
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


# ---- known answers: these never change


def test_attention_layers_have_known_fingerprints():
    text = b"model.layers.0.self_attn.attn|FullAttentionSpec|torch.bfloat16|NONE|2x8+8"
    assert print_of(u.full_spec()) == known(text) == 4096530074958836457
    text = b"model.layers.3.self_attn.attn|FullAttentionSpec|torch.float8_e5m2|"
    text += b"FP8_PER_TENSOR|4x16+16"
    spec = u.full_spec(heads=4, head_size=16, **FP8)
    found = print_of(spec, "fp8_e5m2", number=3)
    assert found == known(text) == 13293058193193676441


def test_state_layers_have_known_fingerprints(monkeypatch):
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: "DS")
    family = FAMILIES["gated delta net"]
    splits = [family.splits(1), None]
    texts = [
        b"[12, 12, 16][3]torch.bfloat16;[8][2, 3]torch.float32;",
        b"[40, 3]torch.bfloat16;[8, 2, 3]torch.float32;",
    ]
    numbers = [14688803857614111730, 17856782987895152969]
    for split, text, number in zip(splits, texts, numbers, strict=True):
        spec = MambaSpec(64, shapes=family.shapes(1), dtypes=DTYPES, state_splits=split)
        page = torch.zeros(4, 1, 1, 40 * 3 * 2 + 48 * 4, dtype=torch.int8)
        caches = {"model.layers.2.mixer": page}
        w = u.worker(u.config(4, (caches, spec)), caches)
        text = b"model.layers.2.mixer|MambaSpec|" + text
        assert w.groups[0].fingerprint == known(text) == number


# ---- what they tell apart, and what not


def test_the_cache_dtype_is_what_it_means_and_not_its_name(monkeypatch):
    fp8 = u.full_spec(**FP8)
    e4m3 = print_of(fp8, "fp8_e4m3")
    assert e4m3 == print_of(fp8, "fp8")
    assert e4m3 != print_of(fp8, "fp8_e5m2")
    assert print_of(u.full_spec(), "auto") == print_of(u.full_spec(), "bfloat16")
    half = u.full_spec(dtype=torch.float16)
    assert print_of(half, "float16") == print_of(half, "auto")
    assert print_of(half) != print_of(u.full_spec())
    e5m2 = print_of(fp8, "fp8_e5m2")
    monkeypatch.setattr(
        type(current_platform), "fp8_dtype", lambda *_: torch.float8_e4m3fnuz
    )
    of_fnuz = {print_of(fp8, "fp8_e4m3"), print_of(fp8, "fp8_e5m2")}
    assert len(of_fnuz | {e4m3, e5m2}) == 4


def test_scales_per_token_and_head_are_told_apart():
    prints = set()
    for kind in ("int8", "fp8"):
        mode = KVQuantMode[f"{kind.upper()}_PER_TOKEN_HEAD"]
        spec = u.full_spec(
            dtype=torch.uint8, state_content_bytes=24, kv_quant_mode=mode
        )
        name = f"{kind}_per_token_head"
        prints.add(print_of(spec, name, TritonAttentionBackend))
    assert len(prints | {print_of(u.full_spec(**FP8), "fp8")}) == 3


def test_latents_and_indexers_are_told_apart(monkeypatch):
    latent = dict(block_size=16, num_kv_heads=1, head_size=576, **ON_EVERY_RANK)
    specs = [
        MLAAttentionSpec(dtype=torch.bfloat16, cache_dtype_str="auto", **latent),
        MLAAttentionSpec(**FP8, cache_dtype_str="fp8", **latent),
        MLAAttentionSpec(
            **FP8, cache_dtype_str="fp8_ds_mla", state_content_bytes=656, **latent
        ),
    ]
    prints = [print_of(s, s.cache_dtype_str, FlashMLASparseBackend) for s in specs]
    assert len(set(prints)) == 3
    # Without a layer the spec alone says it.
    for spec, found in zip(specs, prints, strict=True):
        caches = {u.names(0)[0]: u.random_cache(8, spec)}
        alone = u.worker(u.config(8, (caches, spec)), caches)
        assert alone.groups[0].fingerprint == found

    def indexer(mx_scales):
        from vllm.utils import deep_gemm

        name = "mqa_logits_use_mx_scales"  # not in vLLM 0.32.0
        monkeypatch.setattr(deep_gemm, name, lambda: mx_scales, raising=False)
        layer = SimpleNamespace(
            uses_shuffled_layout=False,
            kv_cache=torch.empty(0),
            get_attn_backend=lambda: DeepseekV32IndexerBackend,
        )
        return formats.layer_format(None, "i", layer, torch.empty(8, 1, 16, 132))

    assert indexer(True).cache_dtype != indexer(False).cache_dtype


def test_backend_layout_block_size_and_order_do_not_count():
    spec = u.full_spec(block_size=32, head_size=32)
    one = print_of(spec)
    assert one == print_of(spec, backend=TritonAttentionBackend)
    assert one == print_of(replace(spec, block_size=64))
    for order in (formats.TokenOrder.CPU_VECTORS, formats.TokenOrder.CPU_TILES):
        assert one == print_of(spec, order=order)


def test_heads_are_those_of_the_whole_model_at_any_tp_size():
    whole = print_of(u.full_spec(heads=4))
    for tp, heads in ((1, 4), (2, 2), (4, 1), (8, 1)):
        spec = u.full_spec(heads=heads)
        for rank in range(tp):
            tp_of = dict(tp_rank=rank, tp_size=tp, uniform=4)
            assert print_of(spec, **tp_of) == whole
    assert print_of(u.full_spec(heads=2)) != whole


@pytest.mark.parametrize("sizes", [dict(head_size=16), dict(head_size_v=4)])
def test_head_sizes_of_keys_and_of_values_count(sizes):
    assert print_of(u.full_spec(**sizes)) != print_of(u.full_spec())
    other = u.full_spec(head_size=12, head_size_v=4)
    assert print_of(other) != print_of(u.full_spec())  # as many bytes


# ---- what follows from it


def verdict_of(p, d):
    """Return D's verdict of a load of 57 tokens from P, by their workers alone."""
    blocks = KVChecksumBlocks(57, {0: (1, [5, 2, 7])})
    checks = []
    for side in (p, d):
        record = u.send_record(side, blocks)
        checks.append(replica_checks(add_records([record], "r", 0)))
    sent = GroupChecksums(p.groups[0].fingerprint, 16, 1, np.asarray(checks[0][0]))
    payload = KVChecksumPayload(57, 1, {0: sent})
    local = LocalGroup(d.groups[0].fingerprint, Units(16, 1), 1, checks[1])
    return judge(payload, {0: local}, 57)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ((u.full_spec(**FP8), "fp8_e4m3"), (u.full_spec(**FP8), "fp8_e5m2")),
        ((u.full_spec(heads=4), "auto"), (u.full_spec(heads=2), "auto")),
        ((u.full_spec(head_size=16), "auto"), (u.full_spec(head_size=8), "auto")),
    ],
    ids=["cache dtypes", "head counts", "head sizes"],
)
def test_kv_that_is_read_otherwise_is_neither_verified_nor_a_mismatch(theirs, ours):
    verdict = verdict_of(worker_of(*theirs), worker_of(*ours))
    assert (verdict.outcome, verdict.reason) == ("unverified", Unverified.FINGERPRINT)
    same = verdict_of(worker_of(*ours), worker_of(*ours))
    assert same.outcome == "verified"


def test_a_store_shared_with_another_cache_dtype_fails_like_another_models():
    entries = {}
    for cache_dtype in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        w = worker_of(u.full_spec(**FP8), cache_dtype)
        kept = w.init_block_checksums([0])
        w.save_block_checksums([BlockRun(0, 0, [3], [bytes(range(32))])])
        entries[cache_dtype] = int(kept[3])
    assert entries["fp8"] == entries["fp8_e4m3"] != entries["fp8_e5m2"]


class Fp8Instance(rig.Instance):
    """An instance of fp8 KV; its layers name the cache dtype."""

    def __init__(self, *args, cache_dtype, **settings):
        self.cache_dtype = cache_dtype
        super().__init__(*args, **settings)

    def token_specs(self, window):
        return [u.full_spec(rig.HEADS, self.block_size, rig.HEAD_SIZE, **FP8)]

    def make_worker(self, kv_config, stage, rank):
        layer = SimpleNamespace(
            kv_cache_dtype=self.cache_dtype,
            get_attn_backend=lambda: FlashAttentionBackend,
        )
        here = self.caches_of(stage, rank)
        (group,) = kv_config.kv_cache_groups
        spec = self.local_spec(group.kv_cache_spec)
        return u.worker(
            u.config(self.num_blocks, (list(here), spec)),
            here,
            tp_rank=rank,
            tp_size=self.tp,
            pp_rank=stage,
            uniform=rig.HEADS,
            formats={
                name: formats.layer_format(None, name, layer, cache)
                for name, cache in here.items()
            },
        )


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (2, 4)])
@pytest.mark.parametrize(
    ("theirs", "ours", "outcome"),
    [
        ("fp8", "fp8_e4m3", "verified"),
        ("fp8_e4m3", "fp8_e5m2", "unverified"),
    ],
)
def test_loads_between_cache_dtypes(
    model, transport, monkeypatch, p_tp, d_tp, theirs, ours, outcome
):
    in_bf16 = rig.token_kv
    monkeypatch.setattr(
        rig,
        "token_kv",
        lambda *a: in_bf16(*a).to(torch.float8_e4m3fn).view(torch.uint8),
    )
    p = Fp8Instance(
        model, "kv_producer", transport=transport, cache_dtype=theirs, tp=p_tp
    )
    d = Fp8Instance(
        model, "kv_consumer", transport=transport, cache_dtype=ours, tp=d_tp
    )
    rig.load(p, d, 100)
    assert d.loads(outcome) == 1
    assert d.loads("verified") + d.loads("mismatch") + d.loads("unverified") == 1
    assert d.stats.get("unverified:fingerprint", 0) == (outcome == "unverified")
