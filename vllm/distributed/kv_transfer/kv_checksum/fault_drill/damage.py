# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Damage loads as faulty transfers do, for the fault drill and for tests.

Each kind of damage was publicly reported for some engine, connector or driver.
`inflict` damages the loaded blocks of one KV cache group on one worker;
`damage_payload` damages the payload that came with them. A kind that cannot be done to
a load (one block cannot be exchanged with itself) raises `NotApplicable`, so that no
drill seems to pass because it did nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class NotApplicable(ValueError):
    """Raised if damage cannot be done to a load; the message says why."""


@dataclass(frozen=True)
class LayerCache:
    """One layer's cache on this worker.

    Attributes:
        cache: ``[B, H, N, C]``, any dtype and strides with dense content.
        num_blocks: blocks in the cache; ``B`` counts kernel blocks.
        transposed_keys: whether the cache is kept in the order
            `formats.TokenOrder.CPU_VECTORS`.
        tiles: whether it is kept in the order `formats.TokenOrder.CPU_TILES`; then
            single tokens cannot be damaged.

    """

    cache: torch.Tensor
    num_blocks: int
    transposed_keys: bool = False
    tiles: bool = False

    @property
    def blocks(self) -> torch.Tensor:
        """View the cache as bytes ``(num_blocks, kernel blocks, H, N, bytes)``."""
        return self.cache.view(torch.uint8).unflatten(0, (self.num_blocks, -1))

    @property
    def tokens_per_block(self) -> int:
        return self.blocks.shape[1] * self.blocks.shape[3]

    def cells(self, block: int) -> list[torch.Tensor]:
        """View a block's keys and values, ``(kernel blocks, H, N, elements)`` each.

        There is one view instead of two if a token has an odd number of elements.

        Raises:
            NotApplicable: the tokens are in tiles.

        """
        if self.tiles:
            raise NotApplicable("CPU attention keeps these tokens in tiles (AMX)")
        integers = self.cache.view(_INTEGERS[self.cache.element_size()])
        raw = integers.unflatten(0, (self.num_blocks, -1))[block]
        ratio, heads, tokens, content = raw.shape
        if content % 2:
            return [raw]
        if not self.transposed_keys:
            return [raw[..., : content // 2], raw[..., content // 2 :]]
        keys, values = raw.view(ratio, heads, 2, -1).unbind(2)
        keys = keys.view(ratio, heads, content // 2, tokens).transpose(-1, -2)
        return [keys, values.view(ratio, heads, tokens, content // 2)]

    def token(self, block: int, slot: int) -> list[torch.Tensor]:
        """View a token's keys and values, ``(H, elements)`` each, as `cells` does."""
        tokens = self.blocks.shape[3]
        return [c[slot // tokens, :, slot % tokens] for c in self.cells(block)]


@dataclass(frozen=True)
class LoadedBlocks:
    """The blocks of one load in one KV cache group that a worker holds.

    Attributes:
        layers: the group's layers here, in order; a shared cache is listed once.
        block_ids: the loaded blocks, in request order.
        start: position in the request of the first of them.
        num_tokens: tokens of the request that the load covers.
        others: blocks of another request, the source of stale bytes.
        hits: number of the first blocks that a fault in single blocks damages.

    """

    layers: list[LayerCache]
    block_ids: list[int]
    start: int
    num_tokens: int
    others: list[int] = field(default_factory=list)
    hits: int = 1

    def valid(self, at: int) -> int:
        """Return the number of the load's tokens in its block number `at`."""
        size = self.layers[0].tokens_per_block
        return max(0, min(size, self.num_tokens - (self.start + at) * size))

    def other(self, at: int) -> int:
        if not self.others:
            raise NotApplicable("there was no other load before")
        return self.others[at % len(self.others)]


Damage = Callable[[LoadedBlocks], None]


def _need_blocks(load: LoadedBlocks, number: int) -> None:
    if len(load.block_ids) < number:
        raise NotApplicable(f"the load has fewer than {number} blocks")


def _need_tokens(load: LoadedBlocks, at: int, number: int) -> None:
    if load.valid(at) < number:
        raise NotApplicable(f"the block has fewer than {number} tokens")


def _exchange(left: torch.Tensor, right: torch.Tensor) -> None:
    kept = left.clone()
    left.copy_(right)
    right.copy_(kept)


# ---- 1: bits and bytes


def _xor(offset: int, mask: int) -> Damage:
    """Flip bits of one byte of each hit block.

    A negative `offset` counts from the end of the block's first element.
    """

    def damage(load: LoadedBlocks) -> None:
        for layer in load.layers:
            at = offset if offset >= 0 else layer.cache.element_size() + offset
            for block in load.block_ids[: load.hits]:
                layer.blocks[block, 0, 0, 0, at] ^= mask

    return damage


def _zero(num_bytes: int) -> Damage:
    """Zero the first bytes of each hit block, in its order of heads and tokens."""

    def damage(load: LoadedBlocks) -> None:
        for layer in load.layers:
            ratio, heads, tokens, width = layer.blocks.shape[1:]
            if num_bytes > ratio * heads * tokens * width:
                raise NotApplicable(f"a block has fewer than {num_bytes} bytes")
            for block in load.block_ids[: load.hits]:
                for row in range(-(-num_bytes // width)):
                    kernel, rest = divmod(row, heads * tokens)
                    cell = layer.blocks[block, kernel, rest // tokens, rest % tokens]
                    cell[: num_bytes - row * width] = 0

    return damage


def _lanes(mask: int, words: tuple[int, ...]) -> Damage:
    """Flip the bits of `mask` in these 8-byte words of each hit block."""
    signed = mask - 2**64 if mask >= 2**63 else mask

    def damage(load: LoadedBlocks) -> None:
        hit = load.block_ids[: load.hits]
        for at in range(len(hit)):
            _need_tokens(load, at, load.layers[0].tokens_per_block)
        tokens, width = load.layers[0].blocks.shape[3:]
        if width % 8 or max(words) >= tokens * width // 8:
            raise NotApplicable("a head's tokens do not hold these 8-byte words")
        for layer in load.layers:
            for block in hit:
                rows = layer.blocks[block, 0, 0].view(torch.int64)
                for word in words:
                    rows[word // rows.shape[1], word % rows.shape[1]] ^= signed

    return damage


# ---- 2 to 4: whole blocks


def _zero_block(load: LoadedBlocks) -> None:
    for layer in load.layers:
        layer.blocks[load.block_ids[: load.hits]] = 0


def _stale_block(load: LoadedBlocks) -> None:
    for at, block in enumerate(load.block_ids[: load.hits]):
        for layer in load.layers:
            layer.blocks[block] = layer.blocks[load.other(at)]


def _other_request(load: LoadedBlocks) -> None:
    for at, block in enumerate(load.block_ids):
        for layer in load.layers:
            layer.blocks[block] = layer.blocks[load.other(at)]


def _shift_blocks(load: LoadedBlocks) -> None:
    sources = [*load.block_ids[1:], load.other(0)]
    for layer in load.layers:
        layer.blocks[load.block_ids] = layer.blocks[sources]


def _swap_blocks(load: LoadedBlocks) -> None:
    _need_blocks(load, 2)
    for layer in load.layers:
        _exchange(layer.blocks[load.block_ids[0]], layer.blocks[load.block_ids[1]])


# ---- 5: tokens


def _swap_tokens(load: LoadedBlocks) -> None:
    _need_tokens(load, 0, 2)
    for layer in load.layers:
        for left, right in zip(
            layer.token(load.block_ids[0], 0),
            layer.token(load.block_ids[0], load.valid(0) - 1),
            strict=True,
        ):
            _exchange(left, right)


def _token_off_by_one(load: LoadedBlocks) -> None:
    """Copy the first token to the second's slot."""
    _need_tokens(load, 0, 2)
    for layer in load.layers:
        for first, second in zip(
            layer.token(load.block_ids[0], 0),
            layer.token(load.block_ids[0], 1),
            strict=True,
        ):
            second.copy_(first)


def _last_token_missing(load: LoadedBlocks) -> None:
    """Fill the last token's slot with stale bytes."""
    last = len(load.block_ids) - 1
    _need_tokens(load, last, 1)
    slot = load.valid(last) - 1
    for layer in load.layers:
        for cell, stale in zip(
            layer.token(load.block_ids[last], slot),
            layer.token(load.other(last), slot),
            strict=True,
        ):
            cell.copy_(stale)


# ---- 6 to 8: what stands where within blocks


def _need_heads(load: LoadedBlocks) -> int:
    heads = load.layers[0].blocks.shape[2]
    if heads < 2:
        raise NotApplicable("this worker holds one KV head")
    return heads


def _roll_heads(load: LoadedBlocks) -> None:
    heads = _need_heads(load)
    for layer in load.layers:
        for block in load.block_ids:
            for cells in layer.cells(block):
                cells.copy_(cells.roll(heads // 2, dims=1))


def _head_major_as_token_major(load: LoadedBlocks) -> None:
    heads = _need_heads(load)
    for layer in load.layers:
        for block in load.block_ids:
            for cells in layer.cells(block):
                ratio, _, tokens, content = cells.shape
                read = cells.reshape(ratio, tokens, heads, content)
                cells.copy_(read.transpose(1, 2).clone())


def _roll_layers(load: LoadedBlocks) -> None:
    if len(load.layers) < 2:
        raise NotApplicable("this worker holds one layer of the group")
    kept = [layer.blocks[load.block_ids] for layer in load.layers]
    half = len(kept) // 2
    for layer, bytes_ in zip(load.layers, kept[half:] + kept[:half], strict=True):
        layer.blocks[load.block_ids] = bytes_


def _swap_kv(load: LoadedBlocks) -> None:
    for layer in load.layers:
        for block in load.block_ids:
            cells = layer.cells(block)
            if len(cells) < 2 or layer.tokens_per_block < 2:
                raise NotApplicable("the cache does not hold keys and values")
            _exchange(*cells)


@dataclass(frozen=True)
class Kind:
    """One kind of damage.

    Attributes:
        damage: the function that damages a load.
        one_layer: whether it damages only the group's first layer here, or all.

    """

    damage: Damage
    one_layer: bool = False


_SIGNS = 0x8000_8000_8000_8000

KINDS: dict[str, Kind] = {
    # A top bit of a float, so that the damage shows in the answer.
    "bit_flip": Kind(_xor(-1, 0x40), True),
    "byte": Kind(_xor(0, 0xFF), True),
    "zero_64_bytes": Kind(_zero(64), True),
    "zero_4096_bytes": Kind(_zero(4096), True),
    "lane_bit_63": Kind(_lanes(1 << 63, (0, 4)), True),
    "lane_bit_62": Kind(_lanes(1 << 62, (0, 4)), True),
    "lane_bits_63_31": Kind(_lanes(1 << 63 | 1 << 31, (0, 4)), True),
    "lane_signs": Kind(_lanes(_SIGNS, (0, 4)), True),
    "lane_4_spaced_words": Kind(_lanes(1 << 15, (0, 5, 10, 15)), True),
    "lane_8_words": Kind(_lanes(1 << 15, tuple(range(8))), True),
    "zero_block": Kind(_zero_block),
    "stale_block": Kind(_stale_block),
    "other_request": Kind(_other_request),
    "shift_blocks": Kind(_shift_blocks),
    "swap_blocks": Kind(_swap_blocks),
    "swap_tokens": Kind(_swap_tokens),
    "token_off_by_one": Kind(_token_off_by_one),
    "last_token_missing": Kind(_last_token_missing),
    "roll_heads": Kind(_roll_heads),
    "head_major_as_token_major": Kind(_head_major_as_token_major),
    "roll_layers": Kind(_roll_layers),
    "swap_kv": Kind(_swap_kv),
}
"""The kinds of damage to loaded KV."""

PAYLOAD_KINDS = (
    "lost_payload",
    "other_version_payload",
    "other_request_payload",
    "cut_payload",
)
"""The kinds of damage to the payload that came with a load."""


def inflict(kind: str, load: LoadedBlocks) -> None:
    """Damage `load` in place.

    Raises:
        NotApplicable: this load cannot be damaged in this way; nothing was changed.

    """
    chosen = KINDS[kind]
    if not load.layers or not load.block_ids:
        raise NotApplicable("nothing of the load is on this worker")
    layers = load.layers[:1] if chosen.one_layer else load.layers
    chosen.damage(
        LoadedBlocks(
            layers, load.block_ids, load.start, load.num_tokens, load.others, load.hits
        )
    )


def damage_payload(kind: str, payload: bytes, other: bytes | None) -> bytes | None:
    """Return the bytes that arrive instead of `payload`; None for no payload.

    Args:
        kind: one of `PAYLOAD_KINDS`.
        payload: the bytes that were sent.
        other: the payload of another request, if there was one.

    Raises:
        NotApplicable: there was no other request.
        ValueError: `kind` is not known.

    """
    if kind == "lost_payload":
        return None
    if kind == "cut_payload":
        return payload[: len(payload) // 2]
    if kind == "other_version_payload":
        version, body = msgspec.msgpack.decode(payload, type=tuple[int, msgspec.Raw])
        return msgspec.msgpack.encode((version + 1, body))
    if kind != "other_request_payload":
        raise ValueError(f"unknown kind of payload damage {kind!r}")
    if other is None:
        raise NotApplicable("there was no other load before")
    return other
