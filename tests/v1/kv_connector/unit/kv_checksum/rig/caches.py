# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Make caches, groups and sums for tests of workers and schedulers."""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch

from vllm.distributed.kv_transfer.kv_checksum import (
    KVChecksumBlocks,
    KVChecksumRecord,
    KVChecksumScheduled,
    KVChecksumWorker,
)
from vllm.distributed.kv_transfer.kv_checksum.checksum import (
    add_records,
    replica_checks,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SparseCacheRole,
)

from . import reference
from .versions import ON_EVERY_RANK

INDEXER = MLAAttentionSpec(
    block_size=16,
    num_kv_heads=1,
    head_size=132,
    dtype=torch.uint8,
    **ON_EVERY_RANK,
    cache_role=SparseCacheRole.INDEXER,
)
"""DeepSeek's sparse indexer: 128 value bytes and a float32 scale per token."""


def full_spec(heads=2, block_size=16, head_size=8, dtype=torch.bfloat16, **kwargs):
    return FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=heads,
        head_size=head_size,
        dtype=dtype,
        **kwargs,
    )


def names(*numbers: int, suffix="self_attn.attn") -> list[str]:
    return [f"model.layers.{n}.{suffix}" for n in numbers]


def config(num_blocks, *groups, kept=()) -> KVCacheConfig:
    """Return the config of ``(layer names, spec)`` groups; none of `kept` is moved."""
    made = [KVCacheGroupSpec(list(n), spec) for n, spec in groups]
    for group_id in kept:
        made[group_id].enable_kv_transfer = False
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=made
    )


def random_cache(num_blocks, spec, heads=None, seed=0) -> torch.Tensor:
    """Return a head-major ``[B, H, N, C]`` cache with random bytes."""
    torch.manual_seed(seed)
    size = torch.empty(0, dtype=spec.dtype).element_size()
    content = spec.state_content_size_bytes // size
    shape = (num_blocks, heads or spec.num_heads, spec.block_size, content * size)
    raw = torch.randint(0, 256, shape, dtype=torch.uint8)
    return raw.view(spec.dtype)


def worker(cfg, caches, *, tp_rank=0, tp_size=1, pp_rank=0, uniform=None, **kwargs):
    return KVChecksumWorker(
        cfg,
        caches,
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=pp_rank,
        uniform_kv_heads=uniform,
        **kwargs,
    )


def send_record(w, blocks: KVChecksumBlocks, req_id="r") -> KVChecksumRecord:
    w.bind(KVChecksumScheduled(reqs_to_send={req_id: blocks}))
    output = w.post_forward(None, set(), set())
    (record,) = output.finalize()
    return record


def whole_sums(workers, blocks, group_id=0) -> list[list[int]]:
    """Return the units' sums of all workers together, per replica check."""
    records = [send_record(w, blocks) for w in workers]
    checks = replica_checks(add_records(records, "r", group_id))
    return [[int(v) for v in check] for check in checks]


def expected_sums(layers: dict[int, torch.Tensor], ids, start, num_tokens) -> list[int]:
    """Evaluate the definition over global caches ``[B, H, N, C]``, by units."""
    data = {n: reference.logical_bytes(c) for n, c in layers.items()}
    size = next(iter(data.values())).shape[2]
    return [
        value
        for i, block in enumerate(ids)
        for value in reference.unit_sums(
            {n: d[block] for n, d in data.items()}, (start + i) * size, num_tokens
        )
    ]


def values_of(record, req_id="r", group_id=0, column=0) -> list[int]:
    values = record.checksums[req_id][group_id].values[:, column]
    assert values.dtype == np.uint64
    return [int(v) for v in values]


def groups_of(blocks: KVChecksumBlocks) -> dict[int, tuple[int, list[int]]]:
    """Return `blocks.groups` with plain lists, for comparisons."""
    return {g: (start, list(ids)) for g, (start, ids) in blocks.groups.items()}


class Request(SimpleNamespace):
    """A scheduler's request, as far as checksums read it."""

    prompt_token_ids: Sequence[int] | None = ()
    prompt_embeds = None
    mm_features = ()
    lora_request = None
    num_tokens = 0
    _block_hasher = None

    @property
    def _all_token_ids(self):
        """Return the prompt: nothing is decoded."""
        return self.prompt_token_ids


class SyncingTensor(torch.Tensor):
    """Raises on whatever would wait for a device."""

    _banned = ("item", "cpu", "tolist", "numpy", "__bool__", "nonzero")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in cls._banned:
            raise AssertionError(f"{func.__name__} on the engine step")
        return super().__torch_function__(func, types, args, kwargs or {})
