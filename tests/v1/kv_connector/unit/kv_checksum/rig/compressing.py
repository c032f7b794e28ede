# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Make instances whose layers compress: groups of mixed latents, and rings."""

from types import SimpleNamespace

import torch

from vllm.distributed.kv_transfer.kv_checksum.worker.formats import LayerFormat
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from . import caches as u
from . import instances as rig

LATENTS = {8: 1, 9: 4, 10: 64}
"""Tokens per state, by layer of the group of latents."""

RING_LAYER, RING_GROUP = 11, 4
WIDTH = 16


class Compressing(rig.Instance):
    """An instance with a group of latents, plain and compressed, and one of rings.

    Args:
        ring: slots of a ring.

    """

    def __init__(self, model, role, *, ring=8, **settings):
        self.ring = ring
        # What happens to a load's blocks of latents and to its ring.
        self.damage_latents = lambda blocks: None
        self.damage_ring = lambda block: None
        super().__init__(model, role, **settings)

    def make_kv_config(self, groups):
        common = dict(num_kv_heads=1, head_size=WIDTH, dtype=torch.bfloat16)
        specs = {
            u.names(n)[0]: MLAAttentionSpec(
                block_size=self.block_size, tokens_per_state=ratio, **common
            )
            for n, ratio in LATENTS.items()
        }
        latents = UniformTypeKVCacheSpecs(
            block_size=self.block_size, kv_cache_specs=specs
        )
        ring = CircularBufferSpec(block_size=self.ring, head_size_v=0, **common)
        self.latents = {
            n: torch.randn(self.num_blocks, 1, spec.num_states, WIDTH).bfloat16()
            for n, spec in zip(LATENTS, specs.values(), strict=True)
        }
        self.rings = torch.randn(self.num_blocks, 1, self.ring, WIDTH).bfloat16()
        return u.config(
            self.num_blocks,
            *groups,
            (u.names(*LATENTS), latents),
            (u.names(RING_LAYER), ring),
        )

    def layers_with_backends(self):
        """Return layers of backends that were seen writing such caches."""
        # vLLM 0.32.0 lacks them.
        from vllm.models.qwen4_exp.common.qsa_cache import QSAStateBackend
        from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

        plain = SimpleNamespace(get_attn_backend=lambda: CPUMLABackend)
        layers = {u.names(n)[0]: plain for n, ratio in LATENTS.items() if ratio == 1}
        qsa = SimpleNamespace(
            get_attn_backend=lambda: QSAStateBackend, compress_ratio=RING_GROUP
        )
        compressing = [n for n, ratio in LATENTS.items() if ratio > 1]
        return layers | dict.fromkeys(u.names(*compressing, RING_LAYER), qsa)

    def local_spec(self, spec):
        plain = type(spec) is FullAttentionSpec
        return super().local_spec(spec) if plain else spec

    def caches_of(self, stage, rank):
        caches = super().caches_of(stage, rank)
        last = self.pp - 1
        for n, cache in self.latents.items():
            if stage == (0 if n == 8 else last):
                caches[u.names(n)[0]] = cache
        if stage == last:
            caches[u.names(RING_LAYER)[0]] = self.rings
        return caches

    def worker_kv_config(self, kv_config, stage, rank):
        config = super().worker_kv_config(kv_config, stage, rank)
        for group in config.kv_cache_groups:
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                here = {n: spec.kv_cache_specs[n] for n in group.layer_names}
                group.kv_cache_spec = UniformTypeKVCacheSpecs(
                    block_size=spec.block_size, kv_cache_specs=here
                )
        return config

    def make_worker(self, kv_config, stage, rank):
        ring = LayerFormat(ring_group=RING_GROUP, shards=1)
        return u.worker(
            self.worker_kv_config(kv_config, stage, rank),
            self.caches_of(stage, rank),
            tp_rank=rank,
            tp_size=self.tp,
            pp_rank=stage,
            uniform=rig.HEADS,
            formats={u.names(RING_LAYER)[0]: ring},
        )

    def rows(self, request):
        """Return the request's blocks of latents and of the ring."""
        rows = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return rows[len(self.layers) :]

    def write(self, request, first, last):
        super().write(request, first, last)
        blocks, (ring,) = self.rows(request)
        ids = list(request.all_token_ids)
        for n, ratio in LATENTS.items():
            per_block = self.block_size // ratio
            for state in range(first // ratio, last // ratio):
                seed = hash((n, *ids[state * ratio : (state + 1) * ratio])) % 2**31
                generator = torch.Generator().manual_seed(seed)
                self.latents[n][blocks[state // per_block], 0, state % per_block] = (
                    torch.randn(WIDTH, generator=generator).bfloat16()
                )
        for position in range(max(first, last - self.ring), last):
            generator = torch.Generator().manual_seed(position * 1000 + ids[position])
            row = torch.randn(WIDTH, generator=generator).bfloat16()
            self.rings[ring, 0, position % self.ring] = row

    def copy_states(self, producer, ours, theirs):
        """Copy latents by state, whatever the block sizes, and the ring by slot."""
        (blocks, (ring,)), (their_blocks, (their_ring,)) = ours[-2:], theirs[-2:]
        (number,) = {
            r.num_computed_tokens
            for r in self.scheduler.requests.values()
            if self.rows(r)[1][:1] == [ring]
        }
        skipped = -(-number // self.block_size) - len(blocks)
        for n, ratio in LATENTS.items():
            mine, other = self.block_size // ratio, producer.block_size // ratio
            # Whole blocks travel, with what lies behind the last state.
            for state in range(skipped * mine, len(their_blocks) * other):
                block = state // mine - skipped
                if block < len(blocks):
                    self.latents[n][blocks[block], 0, state % mine] = producer.latents[
                        n
                    ][their_blocks[state // other], 0, state % other]
        for position in range(max(0, number - self.ring), number):
            self.rings[ring, 0, position % self.ring] = producer.rings[
                their_ring, 0, position % producer.ring
            ]
        self.damage_latents(blocks)
        self.damage_ring(ring)


def pair(model, p=None, d=None, **both):
    return (
        Compressing(model, "kv_producer", **{**both, **(p or {})}),
        Compressing(model, "kv_consumer", **{**both, **(d or {})}),
    )
