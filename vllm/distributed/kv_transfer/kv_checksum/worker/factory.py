# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Create the workers' part of the feature where a configuration needs sums."""

from collections.abc import Mapping
from typing import Any

import torch

from vllm.distributed.kv_transfer.kv_checksum.support import sums_blocks
from vllm.distributed.kv_transfer.kv_checksum.worker.formats import layer_formats
from vllm.distributed.kv_transfer.kv_checksum.worker.worker import KVChecksumWorker


def create_kv_checksum_worker(
    vllm_config: Any, connector: Any, kv_caches: Mapping[str, torch.Tensor]
) -> KVChecksumWorker | None:
    """Create the worker's part and hand it to the connector.

    Return None if no load needs sums.

    Args:
        vllm_config: vLLM's configuration.
        connector: this worker's connector, of which nothing is read with checksums off.
        kv_caches: per layer name, its cache.

    """
    if not sums_blocks(vllm_config):
        return None
    kv_cache_config = connector._kv_cache_config
    if not sums_blocks(vllm_config, kv_cache_config):
        return None
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tp = get_tp_group()
    worker = KVChecksumWorker(
        kv_cache_config,
        kv_caches,
        tp_rank=tp.rank_in_group,
        tp_size=tp.world_size,
        pp_rank=get_pp_group().rank_in_group,
        uniform_kv_heads=_uniform_kv_heads(vllm_config),
        formats=layer_formats(vllm_config, kv_caches),
    )
    # All ranks decide alike what is stored: a value is one of all of them or of none.
    for group in (tp, get_pp_group()):
        worker.skipped_anywhere = _of_all_ranks(worker.skipped_anywhere, group)
    connector.set_kv_checksum_worker(worker)
    return worker


def _of_all_ranks(skipped: dict[int, str], group: Any) -> dict[int, str]:
    """What the ranks of a process group skip, all together."""
    if group.world_size == 1:
        return skipped
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, skipped, group=group.cpu_group)
    return {i: reason for one in reversed(found) for i, reason in one.items()}


def _uniform_kv_heads(vllm_config: Any) -> int | None:
    """The KV head count that every layer, a draft model's too, shares, or None."""
    model = vllm_config.model_config
    heads = model.get_total_num_kv_heads()
    if model.model_arch_config.per_layer_overrides:
        return None
    if getattr(model.hf_text_config, "num_global_key_value_heads", None):
        return None
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and draft.get_total_num_kv_heads() != heads:
        return None
    return heads
