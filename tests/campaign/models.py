# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Describe KV cache groups, and how an instance splits and stores them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple
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

STATE_PADDING = 16
"""Bytes of a state's page behind the states; they do not count."""


@dataclass(frozen=True)
class Kept:
    """How the slots of a block hold what is kept of tokens.

    Attributes:
        ratio: tokens of the state that a slot holds.
        ring: slots of a ring, and the tokens that are compressed together; None if
            blocks hold no rings.

    """

    ratio: int = 1
    ring: tuple[int, int] | None = None


class Part(NamedTuple):
    """What counts of one layer's cache, or a segment of it.

    Attributes:
        covered: bytes ``(blocks, kernel blocks, heads, slots, cell)``, a view.
        kept: what its slots hold.
        index: which layer of the group it is, and which segment.

    """

    covered: np.ndarray
    kept: Kept
    index: Any


@dataclass(frozen=True)
class Split:
    """An instance's split of a model, and the layout of its caches.

    Attributes:
        consumes: 1 on D, 0 on P.

    """

    tp: int
    pp: int
    block_size: int
    layout: str
    conv_layout: str
    consumes: int = 0

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

    holds = "tokens"

    def formats(self, here: Sequence[int]) -> dict[str, Any]:
        return {}

    def spec(self, split: Split, tp: int, here: Sequence[int] = ()) -> Any:
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
        self, split: Split, rank: int, num_blocks: int, random: Generator, index: int
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
        fill(blocks, ids, content[index][:, self.heads_of(rank, split.tp)])

    def parts(
        self, cache: torch.Tensor, split: Split, num_blocks: int, index: int
    ) -> list[Part]:
        covered = cache.view(torch.uint8).unflatten(0, (num_blocks, -1)).numpy()
        return [Part(covered, Kept(), index)]


@dataclass(frozen=True)
class States:
    """A group of layers with states; `family` is one of `kv_checksum_states`."""

    family: str
    layers: tuple[int, ...]

    holds = "state"

    @property
    def _states(self) -> Any:
        return states.FAMILIES[self.family]

    def formats(self, here: Sequence[int]) -> dict[str, Any]:
        return {}

    def spec(self, split: Split, tp: int, here: Sequence[int] = ()) -> MambaSpec:
        with conv_layout(split.conv_layout):
            return MambaSpec(
                block_size=2048,
                shapes=self._states.shapes(tp),
                dtypes=states.DTYPES,
                state_splits=self._states.splits(tp),
            )

    def new_cache(
        self, split: Split, rank: int, num_blocks: int, random: Generator, index: int
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

    def parts(
        self, cache: torch.Tensor, split: Split, num_blocks: int, index: int
    ) -> list[Part]:
        size = self.spec(split, split.tp).state_content_size_bytes
        covered = cache.view(torch.uint8)[:, None, :, :, :size].numpy()
        return [Part(covered, Kept(), index)]


def fill(blocks: np.ndarray, ids: Sequence[int], content: np.ndarray) -> None:
    """Write a request's bytes into its blocks; slots behind keep what was there.

    Args:
        blocks: ``(blocks, kernel blocks, heads, slots, cell)``, changed in place.
        ids: the request's blocks.
        content: ``(slots of the request, heads, cell)``.

    """
    _, ratio, heads, slots, cell = blocks.shape
    whole = blocks[ids].transpose(0, 1, 3, 2, 4).reshape(-1, heads, cell)
    whole[: len(content)] = content
    whole = whole.reshape(len(ids), ratio, slots, heads, cell)
    blocks[ids] = whole.transpose(0, 1, 3, 2, 4)


def conv_layout(layout: str) -> AbstractContextManager[object]:
    """Set the conv states' layout in the one place that vLLM's functions ask."""
    return patch.object(mamba_utils, "get_conv_state_layout", lambda: layout)


LAYOUTS = {layout.__name__: layout for layout in cells.LAYOUTS}


def compared_size(p_size: int, d_size: int) -> int:
    """Return the tokens that are compared as one, if one block size fits the other."""
    return max(16 if size % 16 == 0 else size for size in (p_size, d_size))
