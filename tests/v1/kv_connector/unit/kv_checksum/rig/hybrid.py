# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Make instances with a group of states beside attention, or of states alone."""

import zlib

import numpy as np
import torch

from vllm.model_executor.layers.mamba import mamba_utils
from vllm.v1.kv_cache_interface import MambaSpec

from . import caches as u
from . import instances as rig
from .states import (
    DRAFTING,
    DTYPES,
    FAMILIES,
    local_states,
    page_of,
    unsharded,
)

STATE_LAYERS = (8, 9)


class Hybrid(rig.Instance):
    """An instance with a group of state layers behind the token groups.

    Args:
        mode: vLLM's `mamba_cache_mode`; "align" has prefix caching.
        scratch: speculative scratch blocks per request.
        splits: whether the layers tell how TP splits their states.
        tokens: whether there are attention layers at all.
        states_last: whether the last PP stage holds all states.

    """

    def __init__(
        self,
        model,
        role,
        *,
        mode="none",
        scratch=0,
        family="mamba2, 1 group",
        splits=True,
        tokens=True,
        states_last=False,
        **settings,
    ):
        self.mode, self.splits = mode, splits
        self.family = {**FAMILIES, **DRAFTING}[family]
        self.family_name = family
        self.scratch, self.tokens = scratch, tokens
        self.states_last = states_last
        self.state_size = settings.get("block_size", 16) if mode == "align" else 2048
        self.states = {}
        super().__init__(model, role, **settings)

    def make_kv_config(self, groups):
        cache = self.config.cache_config
        cache.mamba_cache_mode = self.mode
        cache.enable_prefix_caching = self.mode == "align"
        if not self.tokens:
            groups, self.layers = [], []
        spec = self.local_spec(None, tp=1)
        self.pages = {
            (n, rank): torch.randint(
                -128, 128, (self.num_blocks, 1, 1, self.page_bytes()), dtype=torch.int8
            )
            for n in STATE_LAYERS
            for rank in range(self.tp)
        }
        return u.config(self.num_blocks, *groups, (u.names(*STATE_LAYERS), spec))

    def page_bytes(self):
        spec = self.local_spec(None)
        return spec.state_content_size_bytes

    def local_spec(self, spec, tp=None):
        if spec is not None and not isinstance(spec, MambaSpec):
            return super().local_spec(spec)
        tp = tp or self.tp
        return MambaSpec(
            block_size=self.state_size,
            shapes=self.family.shapes(tp),
            dtypes=DTYPES,
            mamba_cache_mode=self.mode,
            num_speculative_blocks=self.scratch,
            state_splits=self.family.splits(tp) if self.splits else None,
        )

    def caches_of(self, stage, rank):
        caches = super().caches_of(stage, rank) if self.tokens else {}
        for i, n in enumerate(STATE_LAYERS):
            where = i * self.pp // len(STATE_LAYERS)
            if stage == (self.pp - 1 if self.states_last else where):
                caches[u.names(n)[0]] = self.pages[n, rank]
        return caches

    def put_state(self, block, layer, states):
        self.states[layer, block] = states
        for rank in range(self.tp):
            local = local_states(self.family, states, rank, self.tp)
            page = page_of(*local, mamba_utils.get_conv_state_layout())
            self.pages[layer, rank][block, 0, 0] = torch.frombuffer(
                bytearray(page), dtype=torch.int8
            )

    def running(self, request, tokens):
        """Return the block that workers write the state after `tokens` tokens into."""
        rows = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        row = rows[len(self.layers)]
        return row[(tokens - 1) // self.state_size if self.mode == "align" else 0]

    def write(self, request, first, last):
        super().write(request, first, last)
        for n in STATE_LAYERS:
            seed = zlib.crc32(str([n, *request.all_token_ids[:last]]).encode())
            self.put_state(self.running(request, last), n, unsharded(self.family, seed))

    def copy_states(self, producer, ours, theirs):
        """Pair the blocks from the end, as Mooncake does where scratch is sent too."""
        ours, theirs = ([b for b in x[len(self.layers)] if b] for x in (ours, theirs))
        for to, source in zip(ours, theirs[-len(ours) :], strict=True):
            for n in STATE_LAYERS:
                if (n, source) in producer.states:
                    self.put_state(to, n, self.fitted(*producer.states[n, source]))
                    self.damage_state(to)

    def fitted(self, conv, temporal):
        """Return a producer's states, conv rows cut or filled to this side's."""
        rows = np.zeros((len(conv), self.family.length), conv.dtype)
        length = min(rows.shape[1], conv.shape[1])
        rows[:, :length] = conv[:, :length]
        return rows, temporal

    damage_state = staticmethod(lambda block: None)

    def flip_state_bit(self, block):
        self.pages[STATE_LAYERS[1], self.tp - 1][block, 0, 0, -3] ^= 8


def pair(model, p=None, d=None, **both):
    return (
        Hybrid(model, "kv_producer", **{**both, **(p or {})}),
        Hybrid(model, "kv_consumer", **{**both, **(d or {})}),
    )
