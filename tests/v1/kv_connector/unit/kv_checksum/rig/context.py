# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run instances under context parallelism, which deals out tokens to ranks.

Where a token's KV lies is what vLLM's own slot mapping says, and which blocks meet is
what NIXL's own planning says.
"""

from types import SimpleNamespace

import torch

from vllm.distributed.kv_transfer.kv_checksum.worker.views import ContextShard
from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import (
    NixlBaseConnectorWorker,
)
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.worker import block_table

from . import caches as u
from . import instances as rig
from .transports import FAKES
from .versions import older_than

HEAD_SIZE = 16
ELSEWHERE = -1


def slots(row, positions, block_size, size, rank):
    """Return the slots of tokens on one rank; `ELSEWHERE` where another holds them.

    Args:
        row: the request's block ids.
        positions: the tokens, int64.
        block_size: tokens per block, also of one rank's.
        size: ranks that tokens are dealt out to.
        rank: one of them.

    """
    table = torch.tensor([list(row)], dtype=torch.int32)
    found = torch.full((len(positions),), ELSEWHERE, dtype=torch.int64)
    more = {}
    if older_than("0.32.0"):
        # Blocks of the cache and of the kernel are one here.
        more = {"block_size": block_size, "BLOCKS_PER_KV_BLOCK": 1}
    block_table.ComputeSlotMappingKernel.kernel[(2,)](
        num_tokens=len(positions),
        max_num_tokens=len(positions),
        query_start_loc_ptr=torch.tensor([0, len(positions)], dtype=torch.int32),
        positions_ptr=positions,
        block_table_ptr=table,
        block_table_stride=table.stride(0),
        slot_mapping_ptr=found,
        KV_CACHE_BLOCK_SIZE=block_size,
        TOTAL_CP_WORLD_SIZE=size,
        TOTAL_CP_RANK=rank,
        CP_KV_CACHE_INTERLEAVE_SIZE=block_size if size > 1 else 1,
        PAD_ID=ELSEWHERE,
        BLOCK_SIZE=1024,
        **more,
    )
    return found


def shard(rank, size, block_size):
    """Return what a worker is told: vLLM deals out blocks where NIXL moves them."""
    return ContextShard(size, rank % size, block_size if size > 1 else 1)


class ContextPull(FAKES["pull"]):
    """Copies blocks between ranks as NIXL's workers plan it."""

    def __init__(self):
        super().__init__()
        self.local_hits: dict = {}

    def take_metadata(self, meta):
        super().take_metadata(meta)
        for req_id, req_meta in meta.reqs_to_recv.items():
            self.local_hits[req_id] = req_meta.local_num_computed_blocks

    def copy(self, instance, producer, req_id, local, their_id, their_blocks):
        (ours,), (theirs,) = local, their_blocks
        hits = (self.local_hits.pop(req_id) or [0])[0]
        for rank in range(instance.tp):
            for source in sources(instance, rank, producer):
                if max(instance.dcp, producer.dcp) > 1:
                    to, taken = NixlBaseConnectorWorker._apply_dcp_prefix_caching(
                        None,
                        list(ours),
                        list(theirs),
                        remote_rank=source,
                        local_dcp_size=instance.dcp,
                        local_dcp_rank=rank % instance.dcp,
                        remote_dcp_size=producer.dcp,
                        local_num_computed_blocks=hits,
                    )
                else:
                    to, taken = list(ours), list(theirs)[len(theirs) - len(ours) :]
                for n, cache in instance.rank_kv[rank].items():
                    cache[to] = producer.rank_kv[source][n][taken]
        instance.damage(instance, req_id, ours)


def sources(instance, rank, producer):
    """Return the producer's ranks that a rank reads from, as NIXL chooses them."""
    topology = SimpleNamespace(
        dcp_size=instance.dcp,
        dcp_rank=rank % instance.dcp,
        tp_rank=rank,
        tp_size=instance.tp,
    )
    for name in ("tp_ratio", "dcp_source_ranks"):
        setattr(topology, name, getattr(TransferTopology, name).__get__(topology))
    ranks = TransferTopology.handshake_target_ranks(topology, producer.tp, producer.dcp)
    # Copies are alike, so one of them is read.
    return ranks if producer.dcp > 1 else ranks[:1]


class ContextInstance(rig.Instance):
    """An instance of latents (MLA), whose tokens are dealt out to its TP ranks.

    `dcp` is 1 or `tp`, as NIXL wants it.
    """

    def __init__(self, model, role, *, dcp=1, **settings):
        self.dcp, self.rank_kv = dcp, []
        super().__init__(model, role, dcp=dcp, **settings)
        self.transport = ContextPull()

    def token_specs(self, window):
        return [
            MLAAttentionSpec(
                block_size=self.block_size,
                num_kv_heads=1,
                head_size=HEAD_SIZE,
                dtype=torch.bfloat16,
            )
        ]

    def local_spec(self, spec):
        return spec

    def caches_of(self, stage, rank):
        if not self.rank_kv:
            # Each rank's blocks hold their previous owners' bytes.
            self.rank_kv = [
                {
                    n: u.random_cache(self.num_blocks, self.specs[0], seed=7 * r + n)
                    for n in self.layers[0]
                }
                for r in range(self.tp)
            ]
        return {u.names(n)[0]: c for n, c in self.rank_kv[rank].items()}

    def make_worker(self, kv_config, stage, rank):
        return u.worker(
            self.worker_kv_config(kv_config, stage, rank),
            self.caches_of(stage, rank),
            tp_rank=rank,
            tp_size=self.tp,
            context=shard(rank, self.dcp, self.block_size),
        )

    def places(self, request, at):
        """Yield, per rank, which of the tokens it holds, and their slots."""
        (row,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        for rank in range(self.tp):
            found = slots(row, at, self.block_size, self.dcp, rank % self.dcp)
            here = found != ELSEWHERE
            yield rank, here, found[here]

    def write(self, request, first, last):
        at = torch.arange(first, last)
        ids = torch.tensor(list(request.all_token_ids))[at]
        for rank, here, found in self.places(request, at):
            for n, cache in self.rank_kv[rank].items():
                cells = latents(n, at[here], ids[here], cache)
                cache[found // self.block_size, :, found % self.block_size] = cells

    def answer_kv_is_right(self, request):
        ids = torch.tensor(list(request.prompt_token_ids))
        at = torch.arange(len(ids))
        for rank, here, found in self.places(request, at):
            for n, cache in self.rank_kv[rank].items():
                held = cache[found // self.block_size, :, found % self.block_size]
                if not torch.equal(held, latents(n, at[here], ids[here], cache)):
                    return False
        return True


def latents(layer, at, ids, cache):
    """Return what the forward writes for tokens at some positions."""
    return rig.token_kv(layer, at, ids)[:, :1, : cache.shape[-1]]


def pair(model, p, d, **both):
    """Return a producer and a consumer, with settings of each and of both."""
    return tuple(
        ContextInstance(model, role, **{**both, **settings})
        for role, settings in (("kv_producer", p), ("kv_consumer", d))
    )
