# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Create the workers' part of the feature where a configuration needs sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from vllm.distributed.kv_transfer.kv_checksum.support import sums_blocks
from vllm.distributed.kv_transfer.kv_checksum.worker.formats import layer_formats
from vllm.distributed.kv_transfer.kv_checksum.worker.views import ContextShard
from vllm.distributed.kv_transfer.kv_checksum.worker.worker import KVChecksumWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.parallel_state import GroupCoordinator


def create_kv_checksum_worker(
    vllm_config: VllmConfig,
    connector: KVConnectorBase_V1,
    kv_caches: Mapping[str, torch.Tensor],
) -> KVChecksumWorker | None:
    """Create the worker's part and hand it to the connector.

    Return None if no load needs sums.

    Args:
        vllm_config: vLLM's configuration.
        connector: this worker's connector; nothing of it is read with checksums off.
        kv_caches: per layer name, its cache.

    """
    if not sums_blocks(vllm_config):
        return None
    kv_cache_config = connector._kv_cache_config
    if not sums_blocks(vllm_config, kv_cache_config):
        return None
    from vllm.distributed.parallel_state import (
        get_pcp_group,
        get_pp_group,
        get_tp_group,
    )

    parallel = vllm_config.parallel_config
    dcp, over_pcp = parallel.decode_context_parallel_size, False
    ranks = get_tp_group()
    if parallel.prefill_context_parallel_size > 1:
        over_pcp = dcp > 1
        if over_pcp:
            ranks = get_pcp_group()
        elif get_pcp_group().rank_in_group:
            return None  # a copy of what PCP rank 0 holds and transfers
    context = ContextShard(
        dcp, ranks.rank_in_group % dcp, parallel.cp_kv_cache_interleave_size
    )
    worker = KVChecksumWorker(
        kv_cache_config,
        kv_caches,
        tp_rank=ranks.rank_in_group,
        tp_size=ranks.world_size,
        pp_rank=get_pp_group().rank_in_group,
        uniform_kv_heads=_uniform_kv_heads(vllm_config),
        formats=layer_formats(vllm_config, kv_caches),
        context=context,
        over_pcp=over_pcp,
    )
    # All ranks decide alike what is stored: checksums are stored by all or by none.
    for group in (ranks, get_pp_group()):
        worker.skipped_anywhere = _of_all_ranks(worker.skipped_anywhere, group)
    connector.set_kv_checksum_worker(worker)
    return worker


def _of_all_ranks(skipped: dict[int, str], group: GroupCoordinator) -> dict[int, str]:
    """Merge the skipped groups of all ranks of a process group: reasons by group id."""
    if group.world_size == 1:
        return skipped
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, skipped, group=group.cpu_group)
    return {i: reason for one in reversed(found) for i, reason in one.items()}


def _uniform_kv_heads(vllm_config: VllmConfig) -> int | None:
    """Return the KV head count that all layers share, a draft model's too, or None."""
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
