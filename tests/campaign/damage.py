# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Damage drawn places of one block on one worker, in each way of a campaign.

The kinds of the fault drill (`fault_damage.KINDS`) hit fixed places; these do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm.distributed.kv_transfer.kv_checksum.fault_drill.damage import NotApplicable

from .models import Generator


@dataclass
class Block:
    """The bytes of one block that count on one worker.

    Attributes:
        layers: per layer, bytes ``(kernel blocks, heads, slots, cell)``, views.
        slots: the slots that count, in order; each holds what is called a token here.

    """

    layers: list[np.ndarray]
    slots: Sequence[int]

    def __post_init__(self) -> None:
        self.valid = len(self.slots)
        _, self.heads, self.tokens, self.cell = self.layers[0].shape
        self.width = next(w for w in (8, 4, 2, 1) if self.cell % w == 0)
        self.per_token = self.cell // self.width
        self.words = self.heads * self.valid * self.per_token

    def token(self, layer: int, head: int, token: int) -> np.ndarray:
        kernel, slot = divmod(int(self.slots[token]), self.tokens)
        return self.layers[layer][kernel, head, slot]

    def word(self, layer: int, number: int) -> np.ndarray:
        """Return a piece as one unsigned integer, a view, by its place in its layer."""
        head, rest = divmod(number, self.valid * self.per_token)
        token, piece = divmod(rest, self.per_token)
        at = piece * self.width
        cell = self.token(layer, head, token)[at : at + self.width]
        return cell.view(f"u{self.width}")

    def draw_words(self, random: Generator, number: int) -> list[np.ndarray]:
        """Return different words of any layers."""
        total = self.words * len(self.layers)
        if number > total:
            raise NotApplicable(f"the block has fewer than {number} words")
        drawn: set[int] = set()
        while len(drawn) < number:
            drawn.add(int(random.integers(total)))
        return [self.word(*divmod(i, self.words)) for i in drawn]


Damage = Callable[[Generator, Block], None]


def _bit(random: Generator, block: Block) -> None:
    (word,) = block.draw_words(random, 1)
    word ^= _bit_of(word, int(random.integers(64)))


def _bit_of(word: np.ndarray, bit: int) -> np.ndarray:
    return np.array(1 << bit % (8 * word.itemsize)).astype(word.dtype)


def _byte(random: Generator, block: Block) -> None:
    (word,) = block.draw_words(random, 1)
    word.view(np.uint8)[random.integers(word.itemsize)] ^= random.integers(
        1, 256, dtype=np.uint8
    )


def _bytes(random: Generator, block: Block) -> None:
    """Change 2 to 16 bytes anywhere, each to another value."""
    number = min(int(random.integers(2, 17)), block.words * len(block.layers))
    for word in block.draw_words(random, number):
        word.view(np.uint8)[random.integers(word.itemsize)] ^= random.integers(
            1, 256, dtype=np.uint8
        )


def _run(random: Generator, block: Block, most: int) -> list[np.ndarray]:
    """Return neighbouring words of one layer, in the checksum's order."""
    layer = int(random.integers(len(block.layers)))
    number = min(int(random.integers(2, most)), block.words)
    first = int(random.integers(block.words - number + 1))
    return [block.word(layer, first + i) for i in range(number)]


def _burst(random: Generator, block: Block) -> None:
    """Fill 2 to 32 neighbouring words with any other content."""
    for word in _run(random, block, 33):
        word[:] = random.integers(0, 256, word.itemsize, np.uint8).view(word.dtype)


def _zero_run(random: Generator, block: Block) -> None:
    for word in _run(random, block, 33):
        word[:] = 0


def _late_words(random: Generator, block: Block) -> None:
    """Move words one place on, from somewhere on."""
    run = _run(random, block, 65)
    for to, source in zip(run[:0:-1], run[-2::-1], strict=True):
        to[:] = source


def _rotated_words(random: Generator, block: Block) -> None:
    """Rotate a run of words, as if rows of a state were read at other offsets."""
    run = _run(random, block, 65)
    kept = [word.copy() for word in run]
    by = int(random.integers(1, len(run))) if len(run) > 1 else 0
    for at, word in enumerate(run):
        word[:] = kept[at - by]


def _exchanged_words(random: Generator, block: Block) -> None:
    a, b = block.draw_words(random, 2)
    kept = a.copy()
    a[:], b[:] = b, kept


def _exchanged_tokens(random: Generator, block: Block) -> None:
    """Exchange two tokens of one head in one layer."""
    if block.valid < 2:
        raise NotApplicable("the block has fewer than 2 tokens")
    layer = int(random.integers(len(block.layers)))
    head = int(random.integers(block.heads))
    left = int(random.integers(block.valid))
    right = (left + int(random.integers(1, block.valid))) % block.valid
    a, b = (block.token(layer, head, t) for t in (left, right))
    kept = a.copy()
    a[:], b[:] = b, kept


def _equal_sum(random: Generator, block: Block) -> None:
    """Add to one word as much as is taken from another."""
    a, b = block.draw_words(random, 2)
    delta = random.integers(1, 256, a.itemsize, np.uint8).view(a.dtype)
    a += delta
    b -= delta


def _equal_xor(random: Generator, block: Block) -> None:
    """Flip the same bits, any, in two words."""
    a, b = block.draw_words(random, 2)
    mask = random.integers(0, 256, a.itemsize, np.uint8).view(a.dtype)
    a ^= mask
    b ^= mask


def lanes(bits: tuple[int, ...], number: int, spacing: int | None) -> Damage:
    """Flip the same bits in several words: anywhere, or so far apart in a layer.

    A spacing of 0 is drawn. Bits wrap around in words narrower than 8 bytes.
    """

    def damage(random: Generator, block: Block) -> None:
        if spacing is None:
            words = block.draw_words(random, number)
        else:
            most = (block.words - 1) // (number - 1)
            if most < max(1, spacing):
                raise NotApplicable("the block has too few words")
            step = spacing or int(random.integers(1, most + 1))
            first = int(random.integers(block.words - step * (number - 1)))
            layer = int(random.integers(len(block.layers)))
            words = [block.word(layer, first + i * step) for i in range(number)]
        for bit in bits:
            for word in words:
                word ^= _bit_of(word, bit)

    return damage


def _any_lane(random: Generator, block: Block) -> None:
    """Flip one bit, any, in 2, 3, 4 or 8 words."""
    number = (2, 3, 4, 8)[random.integers(4)]
    lanes((int(random.integers(64)),), number, None)(random, block)


def _any_spaced_lane(random: Generator, block: Block) -> None:
    """Flip one bit, any, in 4 words at any equal spacing."""
    lanes((int(random.integers(64)),), 4, 0)(random, block)


DRAWN: dict[str, Damage] = {
    "one bit": _bit,
    "one byte": _byte,
    "2 to 16 bytes": _bytes,
    "2 to 32 words overwritten": _burst,
    "2 to 32 words zeroed": _zero_run,
    "words one place late": _late_words,
    "a run of words rotated": _rotated_words,
    "two words exchanged": _exchanged_words,
    "two tokens of a head exchanged": _exchanged_tokens,
    "+d and -d in 2 words": _equal_sum,
    "equal bits in 2 words": _equal_xor,
    "lane: bit 63 in 2 words": lanes((63,), 2, None),
    "lane: bit 62 in 2 words": lanes((62,), 2, None),
    "lane: bit 0 in 4 spaced words": lanes((0,), 4, 0),
    "lane: bit 15 in 4 spaced words": lanes((15,), 4, 0),
    "lane: bit 31 in 4 spaced words": lanes((31,), 4, 0),
    "lane: bit 32 in 4 spaced words": lanes((32,), 4, 0),
    "lane: bit 15 in 8 words in a row": lanes((15,), 8, 1),
    "lane: bits 63 and 31 in 2 words": lanes((63, 31), 2, None),
    "lane: bf16 signs in 2 words": lanes((63, 47, 31, 15), 2, None),
    "lane: any bit in 2, 3, 4, 8 words": _any_lane,
    "lane: any bit in 4 spaced words": _any_spaced_lane,
}
"""Damage to one block of one worker at drawn places, by kind."""
