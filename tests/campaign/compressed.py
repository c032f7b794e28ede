# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Draw the groups of models that compress: states of several tokens, and rings.

Groups mix layers of several tokens per state, ordinary ones among them. What counts is
told by rules of this module and of `models.Kept`, whatever the feature says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from kv_checksum.rig import caches as u

from vllm.distributed.kv_transfer.kv_checksum.worker.formats import LayerFormat
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
    get_kv_quant_mode,
)

from .models import Generator, Kept, Part, Split, fill

COMMON = dict(num_kv_heads=1, max_tp_shards=1)


@dataclass(frozen=True)
class Layer:
    """One layer's cache.

    Attributes:
        kind: how its states are kept.
        ratio: tokens per state.

    """

    kind: str
    ratio: int = 1

    @property
    def segments(self) -> tuple[int, ...]:
        """Bytes of a state's segments; each lies apart, for all states of a block."""
        return {
            "V4 latents": (576, 8),
            "V4.1 latents": (528,),
            "indexer": (128, 4),
            "rows": (48,),
            "summaries": (256,),
            "keys and values": (32,),
        }[self.kind]

    def spec(self, block_size: int, heads: int) -> Any:
        """Return the spec of one rank, which holds `heads` heads of keys and values."""
        size = dict(block_size=block_size, tokens_per_state=self.ratio)
        if self.kind in ("V4 latents", "V4.1 latents"):
            return MLAAttentionSpec(
                **size,
                **COMMON,
                head_size=512,
                dtype=torch.uint8,
                cache_dtype_str="fp8_ds_mla",
                model_version="deepseek_v4",
                kv_quant_mode=get_kv_quant_mode("fp8_ds_mla"),
                state_content_bytes=sum(self.segments),
            )
        if self.kind == "indexer":
            return MLAAttentionSpec(
                **size,
                **COMMON,
                head_size=132,
                dtype=torch.uint8,
                cache_role=SparseCacheRole.INDEXER,
            )
        if self.kind == "rows":
            return MLAAttentionSpec(
                **size, num_kv_heads=1, head_size=24, dtype=torch.bfloat16
            )
        if self.kind == "summaries":
            return FullAttentionSpec(
                **size,
                num_kv_heads=1,
                head_size=256,
                head_size_v=0,
                dtype=torch.uint8,
            )
        return FullAttentionSpec(
            **size, num_kv_heads=heads, head_size=8, dtype=torch.bfloat16
        )

    def format(self, heads: int) -> LayerFormat:
        """Return what layers tell beside their specs; `heads` are the model's."""
        if self.kind == "summaries":
            return LayerFormat(kind="SUMMARY", shards=1)
        return LayerFormat(shards=heads if self.kind == "keys and values" else None)


@dataclass(frozen=True)
class Latents:
    """A group of layers some of which keep one state for several tokens.

    Attributes:
        layers: their numbers.
        kinds: what each keeps.
        heads: KV heads of the unsharded model, of its layers with keys and values.
        padding: bytes behind the states of a block, which do not count.
        few: whether its bytes take few values.

    """

    family: str
    layers: tuple[int, ...]
    kinds: tuple[Layer, ...]
    heads: int
    padding: int
    few: bool

    holds = "latents"

    def spec(self, split: Split, tp: int, here: Sequence[int]) -> Any:
        heads = max(1, self.heads // tp)
        specs = {
            u.names(self.layers[i])[0]: self.kinds[i].spec(split.block_size, heads)
            for i in here or range(len(self.layers))
        }
        return UniformTypeKVCacheSpecs(
            block_size=split.block_size, kv_cache_specs=specs
        )

    def formats(self, here: Sequence[int]) -> dict[str, LayerFormat]:
        return {
            u.names(self.layers[i])[0]: self.kinds[i].format(self.heads) for i in here
        }

    def _heads(self, index: int, rank: int, tp: int) -> slice:
        """Return the global heads of a layer that a TP rank holds."""
        if self.kinds[index].kind != "keys and values":
            return slice(0, 1)
        local, replicas = max(1, self.heads // tp), max(1, tp // self.heads)
        first = rank // replicas * local
        return slice(first, first + local)

    def new_cache(
        self, split: Split, rank: int, num_blocks: int, random: Generator, index: int
    ) -> torch.Tensor:
        layer, heads = self.kinds[index], self._heads(index, rank, split.tp)
        number, states = heads.stop - heads.start, split.block_size // layer.ratio
        cell = sum(layer.segments)
        page = number * states * cell
        whole = random.integers(0, 256, (num_blocks, page + self.padding), np.uint8)
        raw = torch.from_numpy(whole)
        cache = raw.as_strided(
            (num_blocks, number, states, cell),
            (page + self.padding, states * cell, cell, 1),
        )
        dense = layer.kind in ("rows", "keys and values")
        return cache.view(torch.bfloat16) if dense else cache

    def content(self, num_tokens: int, seed: int) -> list[np.ndarray]:
        """Return a request's states, bytes ``(states, heads, cell)`` by layer."""
        random = np.random.default_rng(seed)
        high = 2 if self.few else 256
        return [
            random.integers(
                0,
                high,
                (
                    num_tokens // layer.ratio,
                    self._heads(i, 0, 1).stop,
                    sum(layer.segments),
                ),
                np.uint8,
            )
            for i, layer in enumerate(self.kinds)
        ]

    def put(
        self,
        blocks: np.ndarray,
        split: Split,
        rank: int,
        index: tuple[int, slice],
        ids: Sequence[int],
        content: Any,
    ) -> None:
        """Write a request's states; slots of open groups keep what was there."""
        layer, columns = index
        heads = self._heads(layer, rank, split.tp)
        fill(blocks, ids, content[layer][:, heads, columns])

    def parts(
        self, cache: torch.Tensor, split: Split, num_blocks: int, index: int
    ) -> list[Part]:
        """Return the segments of a layer's cache."""
        layer, found, before = self.kinds[index], [], 0
        raw = cache.view(torch.uint8)
        _, heads, states, cell = raw.shape
        for size in layer.segments:
            where = (heads * states * cell, states * cell, size, 1)
            segment = raw.as_strided(
                (num_blocks, 1, heads, states, size),
                (raw.stride(0), *where),
                raw.storage_offset() + before * states,
            )
            columns = slice(before, before + size)
            kept = Kept(layer.ratio)
            found.append(Part(segment.numpy(), kept, (index, columns)))
            before += size
        return found


@dataclass(frozen=True)
class Rings:
    """A group of layers whose blocks keep the raw rows of a request's last tokens.

    Attributes:
        layers: their numbers.
        together: tokens that are compressed together.
        slots: rows of a block on P and on D, which may differ.
        heads: heads of a row.
        row: bytes of a row and head.
        odd: whether rows fill a page whose spec tells another shape, as Step5's.

    """

    family: str
    layers: tuple[int, ...]
    together: int
    slots: tuple[int, int]
    heads: int
    row: int
    odd: bool

    holds = "ring"

    def _slots(self, split: Split) -> int:
        return self.slots[split.consumes]

    def spec(self, split: Split, tp: int, here: Sequence[int]) -> Any:
        slots, row = self._slots(split), self.row
        if self.odd:
            slots, row = 16, slots * row // 16
        return CircularBufferSpec(
            block_size=slots,
            num_kv_heads=self.heads,
            head_size=row // 2,
            head_size_v=0,
            dtype=torch.bfloat16,
        )

    def formats(self, here: Sequence[int]) -> dict[str, LayerFormat]:
        row = self.row if self.odd else None
        one = LayerFormat(shards=1, ring_group=self.together, ring_row=row)
        return {u.names(self.layers[i])[0]: one for i in here}

    def new_cache(
        self, split: Split, rank: int, num_blocks: int, random: Generator, index: int
    ) -> torch.Tensor:
        spec = self.spec(split, split.tp, ())
        shape = (num_blocks, self.heads, spec.block_size, 2 * spec.head_size)
        stale = torch.from_numpy(random.integers(0, 256, shape, np.uint8))
        return stale.view(torch.bfloat16)

    def content(self, num_tokens: int, seed: int) -> list[np.ndarray]:
        """Return a request's raw rows, bytes ``(tokens, heads, row)`` by layer."""
        random = np.random.default_rng(seed)
        shape = (num_tokens, self.heads, self.row)
        return [random.integers(0, 256, shape, np.uint8) for _ in self.layers]

    def put(
        self,
        blocks: np.ndarray,
        split: Split,
        rank: int,
        index: int,
        ids: Sequence[int],
        content: Any,
    ) -> None:
        """Write the rows of the open group; other slots keep what was there."""
        rows, slots = content[index], self._slots(split)
        for position in open_positions(len(rows), self.together):
            blocks[ids[0], 0, :, position % slots] = rows[position]

    def parts(
        self, cache: torch.Tensor, split: Split, num_blocks: int, index: int
    ) -> list[Part]:
        slots = self._slots(split)
        raw = cache.view(torch.uint8).numpy()
        raw = raw.reshape(num_blocks, 1, self.heads, slots, self.row)
        return [Part(raw, Kept(ring=(slots, self.together)), index)]


def open_positions(num_tokens: int, together: int) -> list[int]:
    """Return the tokens whose raw rows a step behind so many tokens may read.

    They are those of the last token's group, without the token that completes it.
    """
    first = (num_tokens - 1) // together * together
    return [p for p in range(first, num_tokens) if p % together != together - 1]


# ---- families

PATTERNS: dict[str, tuple[Layer, ...]] = {
    "DeepSeek-V4": (
        Layer("V4 latents", 4),
        Layer("V4 latents", 128),
        Layer("indexer", 4),
    ),
    "DeepSeek-V4.1": (
        Layer("V4.1 latents", 2),
        Layer("indexer", 2),
        Layer("V4.1 latents"),
        Layer("indexer"),
    ),
    "GLM-5": (Layer("indexer", 16), Layer("rows"), Layer("indexer", 4)),
    "Qwen4": (Layer("rows", 8), Layer("keys and values")),
    "Step5": (Layer("summaries", 8), Layer("keys and values")),
}
"""Layers of each family's mixed group."""

RING_SIZES = {
    "DeepSeek-V4.1": (2, 8, 1, 64),
    "GLM-5": (4, 16, 2, 48),
    "Qwen4": (4, 8, 1, 280),
    "Step5": (8, 11, 1, 64),
}
"""Tokens that are compressed together, slots, heads, bytes of a row."""

FAMILIES = tuple(
    (family, f"{family} ring") if family in RING_SIZES else (family,)
    for family in PATTERNS
)


def draw_group(
    random: Generator, family: str, layers: tuple[int, ...], heads: int
) -> Latents | Rings:
    """Draw a group of a family, or its group of rings."""
    if family.endswith(" ring"):
        together, slots, ring_heads, row = RING_SIZES[family.removesuffix(" ring")]
        odd = family.startswith("Step5")
        other = slots if odd or random.random() < 0.8 else 2 * slots
        sizes = (slots, other) if random.random() < 0.5 else (other, slots)
        return Rings(family, layers, together, sizes, ring_heads, row, odd)
    pattern = PATTERNS[family]
    # At least one of them compresses.
    kinds = [pattern[0]] + [
        pattern[random.integers(len(pattern))] for _ in range(len(layers) - 1)
    ]
    order = random.permutation(len(kinds))
    return Latents(
        family,
        layers,
        tuple(kinds[i] for i in order),
        heads,
        int(random.choice([0, 64])),
        bool(random.random() < 0.3),
    )


def fits(groups: Sequence[Any], sizes: tuple[int, int]) -> bool:
    """Tell whether blocks of these sizes hold whole states of every layer."""
    return all(
        size % layer.ratio == 0 and unit_fits(size, layer.ratio)
        for group in groups
        if isinstance(group, Latents)
        for layer in group.kinds
        for size in sizes
    )


def unit_fits(block_size: int, ratio: int) -> bool:
    """Tell whether units and states nest."""
    unit = block_size if block_size % 16 else 16
    return unit % ratio == 0 or ratio % unit == 0
