# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test HiSparse: caches in host memory beside an indexer, as vLLM plans and allocates.

What is fake: the host pool is ordinary memory, and the workers' executor.
"""

from types import SimpleNamespace

import pytest
import torch

from vllm.config import HiSparseConfig
from vllm.distributed.kv_transfer.kv_checksum import KVChecksumBlocks, support
from vllm.distributed.kv_transfer.kv_checksum.checksum import Skipped
from vllm.distributed.kv_transfer.kv_checksum.connectors import mooncake_store
from vllm.distributed.kv_transfer.kv_checksum.scheduler.factory import (
    create_kv_checksum_scheduler,
)
from vllm.v1.hisparse import binding, layout
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

from .rig import caches as u
from .rig import instances as rig
from .rig.store import STORES, Executor
from .rig.versions import ON_EVERY_RANK, needs

pytestmark = needs("0.31.0", "such plan of host-resident caches for groups of one spec")

NUM_BLOCKS = 40
BLOCKS = KVChecksumBlocks(57, {0: (1, [5, 2, 7]), 1: (1, [5, 2, 7])})


def planned(config):
    """Return vLLM's groups of sparse latents and indexers; as many host blocks."""
    latents = MLAAttentionSpec(
        block_size=16,
        num_kv_heads=1,
        head_size=64,
        dtype=torch.bfloat16,
        **ON_EVERY_RANK,
        cache_role=SparseCacheRole.SPARSE,
    )
    specs = {}
    for name in u.names(0, 1, suffix="self_attn"):
        specs[f"{name}.attn"] = latents
        specs[f"{name}.indexer.k_cache"] = u.INDEXER
    config.attention_config.hisparse_config = HiSparseConfig(device_buffer_size=64)
    config.cache_config.kv_cache_layout = "BLNHC"
    config.cache_config.num_gpu_blocks_override = NUM_BLOCKS
    config.model_config.hf_config.index_topk = 16
    config.model_config.max_model_len = 16 * (NUM_BLOCKS - 2)
    groups = layout.get_hisparse_kv_cache_groups(config, specs)
    host_bytes = NUM_BLOCKS * groups[0].kv_cache_spec.page_size_bytes
    return layout.get_hisparse_kv_cache_config(config, groups, 1 << 24, host_bytes)


def allocated(config, plan):
    """Return the caches that vLLM makes of a plan, with random bytes."""
    pool = SimpleNamespace(allocate=lambda size: torch.empty(size, dtype=torch.int8))
    caches = binding.allocate_hisparse_kv_caches(
        plan,
        torch.device("cpu"),
        config.cache_config.get_resolved_kv_cache_layout(),
        [16] * len(plan.kv_cache_groups),
        pool,
    )
    for cache in caches.values():
        raw = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
        raw.random_()
    return caches


def hisparse(model, connector="NixlConnector", **settings):
    """Return a configuration, vLLM's plan for it, its caches and a worker over them."""
    settings = {**STORES.get(connector, {}), **settings}
    config = rig.vllm_config(
        model, "kv_both", kv_connector=connector, **rig.NO_LEDGER, **settings
    )
    plan = planned(config)
    caches = allocated(config, plan)
    return config, plan, caches, u.worker(plan, caches)


def test_host_resident_caches_are_skipped_and_the_indexer_beside_them_is_summed(model):
    _, plan, caches, w = hisparse(model)
    assert plan.host_group_ids == (0,)
    assert plan.hisparse_host_num_blocks == plan.num_blocks == NUM_BLOCKS
    assert plan.transfer_group_ids == (0, 1)
    record = u.send_record(w, BLOCKS)
    assert Skipped.of(record.skipped_groups.pop(0)) is Skipped.HOST_RESIDENT
    assert record.skipped_groups == {} and set(record.checksums["r"]) == {1}
    whole = u.values_of(record, group_id=1)
    for group_id, seen in ((0, False), (1, True)):
        for name in plan.kv_cache_groups[group_id].layer_names:
            byte = caches[name][2].view(torch.uint8)[0, 0]
            byte[3] ^= 4
            assert (u.values_of(u.send_record(w, BLOCKS), group_id=1) != whole) is seen
            byte[3] ^= 4


@pytest.mark.parametrize("connector", STORES)
def test_no_store_holds_checksums_of_host_resident_caches(model, connector, log):
    config, plan, _, w = hisparse(model, connector)
    support.ask_workers(config, plan, Executor(w.skipped))
    (one,) = support.connector_coverage(config, plan)
    assert one.not_checked.startswith(f"{connector} stores no KV checksums: ")
    assert "host-resident" in one.not_checked
    with pytest.raises(ValueError, match="KV cache group 0: host_resident"):
        w.init_block_checksums(plan.prefix_cacheable_group_ids)
    pool = SimpleNamespace(block_pool=SimpleNamespace(hash_block_size=16))
    create_kv_checksum_scheduler(config, None, pool, plan)
    (line,) = [x for x in log if x.startswith("WARNING KV checksums are off")]
    assert "host-resident" in line and "counted as unverified" in line


@pytest.mark.parametrize("connector", STORES)
def test_fail_closed_refuses_stores_of_host_resident_caches(model, connector):
    closed = dict(kv_checksum_fail_closed=True)
    config, plan, _, w = hisparse(model, connector, **closed)
    with pytest.raises(ValueError, match=f"{connector} stores .*host-resident"):
        support.ask_workers(config, plan, Executor(w.skipped))
        support.refuse_unchecked(config, plan)


def test_mooncake_s_store_knows_from_the_plan_alone(model):
    """Its workers register regions before they could be asked."""
    config, plan, _, _ = hisparse(model, "MooncakeStoreConnector")
    assert plan.kv_checksum_skipped is None
    assert "host-resident" in mooncake_store.why_not_stored(config, plan)
