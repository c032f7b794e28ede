# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Draw model layouts: KV cache groups, and how an instance splits and stores them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from kv_checksum.rig import cells, states

from vllm.model_executor.layers.mamba import mamba_utils
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

Generator = np.random.Generator

# For tensors this small, threads cost more than they bring.
torch.set_num_threads(1)

FAMILIES = (
    ("GQA",),
    ("MLA",),
    ("sliding window",),
    ("GQA", "sliding window"),
    ("mamba2, 1 group",),
    ("gated delta net",),
    ("GQA", "mamba2, 4 groups"),
    ("GQA", "gated delta net"),
    ("GQA", "kda"),
)
"""KV cache groups of the models that are drawn."""

STATE_PADDING = 16
"""Bytes of a state's page behind the states; they do not count."""


@dataclass(frozen=True)
class Split:
    """An instance's split of a model, and the layout of its caches."""

    tp: int
    pp: int
    block_size: int
    layout: str
    conv_layout: str

    def stage(self, index: int, layers: int) -> int:
        """Return the PP stage of a group's layer number `index`."""
        return index * self.pp // layers


@dataclass(frozen=True)
class Attention:
    """A group of attention layers.

    Attributes:
        layers: their numbers.
        heads: KV heads of the unsharded model.
        values: how its KV is drawn.

    """

    family: str
    layers: tuple[int, ...]
    heads: int
    head_size: int
    dtype: torch.dtype
    window: int
    values: str

    def spec(self, split: Split, tp: int) -> Any:
        size = dict(
            block_size=split.block_size, head_size=self.head_size, dtype=self.dtype
        )
        heads = max(1, self.heads // tp)
        if self.family == "MLA":
            return MLAAttentionSpec(num_kv_heads=1, **size)
        if self.family == "GQA":
            return FullAttentionSpec(num_kv_heads=heads, **size)
        return SlidingWindowSpec(num_kv_heads=heads, sliding_window=self.window, **size)

    @property
    def cell_bytes(self) -> int:
        parts = 1 if self.family == "MLA" else 2
        return parts * self.head_size * self.dtype.itemsize

    def heads_of(self, rank: int, tp: int) -> slice:
        """Return the global heads that a TP rank holds."""
        local, replicas = max(1, self.heads // tp), max(1, tp // self.heads)
        first = rank // replicas * local
        return slice(first, first + local)

    def new_cache(
        self, split: Split, rank: int, num_blocks: int, random: Generator
    ) -> torch.Tensor:
        heads = self.heads_of(rank, split.tp)
        shape = (
            num_blocks,
            heads.stop - heads.start,
            split.block_size,
            self.cell_bytes,
        )
        stale = torch.from_numpy(random.integers(0, 256, shape, np.uint8))
        return LAYOUTS[split.layout](stale).view(self.dtype)

    def content(self, num_tokens: int, seed: int) -> np.ndarray:
        """Return a request's KV: bytes ``(layers, tokens, heads, cell)``."""
        random = np.random.default_rng(seed)
        elements = self.cell_bytes // self.dtype.itemsize
        shape = (len(self.layers), num_tokens, self.heads, elements)
        if self.values == "any bytes":
            return random.integers(0, 256, (*shape[:3], self.cell_bytes), np.uint8)
        drawn = random.standard_normal(shape, np.float32)
        if self.values == "few values":
            drawn = np.sign(drawn) * (np.abs(drawn) > 1)
        return torch.from_numpy(drawn).to(self.dtype).view(torch.uint8).numpy()

    def put(
        self,
        blocks: np.ndarray,
        split: Split,
        rank: int,
        index: int,
        ids: Sequence[int],
        content: Any,
    ) -> None:
        """Write a request's KV of layer `index` into its blocks on one rank.

        Slots behind the last token keep what was there.
        """
        _, ratio, heads, tokens, cell = blocks.shape
        whole = blocks[ids].transpose(0, 1, 3, 2, 4).reshape(-1, heads, cell)
        mine = content[index][:, self.heads_of(rank, split.tp)]
        whole[: len(mine)] = mine
        whole = whole.reshape(len(ids), ratio, tokens, heads, cell)
        blocks[ids] = whole.transpose(0, 1, 3, 2, 4)

    def covered(self, cache: torch.Tensor, split: Split, num_blocks: int) -> np.ndarray:
        """Return the covered bytes ``(blocks, kernel blocks, heads, tokens, cell)``."""
        return cache.view(torch.uint8).unflatten(0, (num_blocks, -1)).numpy()


@dataclass(frozen=True)
class States:
    """A group of layers with states; `family` is one of `kv_checksum_states`."""

    family: str
    layers: tuple[int, ...]

    @property
    def _states(self) -> Any:
        return states.FAMILIES[self.family]

    def spec(self, split: Split, tp: int) -> MambaSpec:
        with conv_layout(split.conv_layout):
            return MambaSpec(
                block_size=2048,
                shapes=self._states.shapes(tp),
                dtypes=states.DTYPES,
                state_splits=self._states.splits(tp),
            )

    def new_cache(
        self, split: Split, rank: int, num_blocks: int, random: Generator
    ) -> torch.Tensor:
        size = self.spec(split, split.tp).state_content_size_bytes
        shape = (num_blocks, 1, 1, size + -size % 8 + STATE_PADDING)
        return torch.from_numpy(random.integers(-128, 128, shape, np.int8))

    def content(self, num_tokens: int, seed: int) -> list[Any]:
        """Return a request's states, unsharded, by layer."""
        return [
            states.unsharded(self._states, [seed, n]) for n in range(len(self.layers))
        ]

    def put(
        self,
        blocks: np.ndarray,
        split: Split,
        rank: int,
        index: int,
        ids: Sequence[int],
        content: Any,
    ) -> None:
        local = states.local_states(self._states, content[index], rank, split.tp)
        page = states.page_of(*local, split.conv_layout)
        blocks[ids[0], 0, 0, 0] = np.frombuffer(page, np.uint8)

    def covered(self, cache: torch.Tensor, split: Split, num_blocks: int) -> np.ndarray:
        size = self.spec(split, split.tp).state_content_size_bytes
        return cache.view(torch.uint8)[:, None, :, :, :size].numpy()


Group = Attention | States


def conv_layout(layout: str) -> AbstractContextManager[object]:
    """Set the conv states' layout in the one place that vLLM's functions ask."""
    return patch.object(mamba_utils, "get_conv_state_layout", lambda: layout)


LAYOUTS = {layout.__name__: layout for layout in cells.LAYOUTS}

DTYPES_AND_SIZES = (
    (torch.bfloat16, 8),
    (torch.bfloat16, 16),
    (torch.float32, 8),
    (torch.float8_e4m3fn, 16),
    (torch.float8_e4m3fn, 6),
    (torch.float8_e4m3fn, 5),
)

BLOCK_SIZES = (
    (16, 16),
    (8, 8),
    (32, 32),
    (16, 32),
    (32, 16),
    (8, 32),
    (32, 8),
    (96, 64),
    (24, 8),
)


def compared_size(p_size: int, d_size: int) -> int:
    """Return the tokens that are compared as one, if one block size fits the other."""
    return max(16 if size % 16 == 0 else size for size in (p_size, d_size))


def draw_model(random: Generator) -> list[Group]:
    """Return a model's KV cache groups; layer numbers are spread over groups."""
    families = FAMILIES[random.integers(len(FAMILIES))]
    numbers = random.permutation(60)[: 4 * len(families)]
    heads = int(2 ** random.integers(4))
    groups: list[Group] = []
    for at, family in enumerate(families):
        count = int(random.integers(1, 5))
        layers = tuple(sorted(map(int, numbers[4 * at : 4 * at + count])))
        if family in states.FAMILIES:
            groups.append(States(family, layers))
            continue
        dtype, head_size = DTYPES_AND_SIZES[random.integers(len(DTYPES_AND_SIZES))]
        groups.append(
            Attention(
                family,
                layers,
                1 if family == "MLA" else heads,
                2 * head_size if family == "MLA" else head_size,
                dtype,
                int(random.integers(20, 200)),
                str(random.choice(["normal", "normal", "any bytes", "few values"])),
            )
        )
    return groups


def draw_splits(random: Generator) -> tuple[Split, Split]:
    """Draw how P and D split the model."""
    sizes = BLOCK_SIZES[random.integers(len(BLOCK_SIZES))]

    def split(block_size: int) -> Split:
        return Split(
            int(2 ** random.integers(3)),
            int(random.integers(1, 3)),
            block_size,
            str(random.choice(list(LAYOUTS))),
            str(random.choice(["DS", "SD"])),
        )

    return split(sizes[0]), split(sizes[1])
