# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Draw evenly spaced damage, and count the sets that each check misses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numba import njit

from .checks import (
    HEADS,
    LAYERS,
    PIECES,
    adler_change,
    checksum_change,
    crc_change,
    weight,
)

DAMAGE = ("one bit flipped", "values rotated", "values reversed")
FLIP, ROTATE, REVERSE = range(3)

MAX_PLACES = 64
"""More than any of `PLACES` draws."""

_BLOCKS = 8192
"""Positions of the block in its request, from which one is drawn: 131,072 tokens."""

_POOL = 4096
"""Values drawn once per kind of KV, of which pieces are made."""

# SplitMix64's constants but for the step, which is not the golden ratio here: the
# checksum multiplies by that.
_STEP = np.uint64(0xD1342543DE82EF95)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ONE, _16, _27, _30, _31, _32 = (np.uint64(n) for n in (1, 16, 27, 30, 31, 32))
_CHUNK, _63 = np.uint64(0xFFFF), np.uint64(63)


@dataclass(frozen=True)
class Places:
    """A grid of places: so many layers, heads and pieces, each evenly spaced."""

    name: str
    layers: tuple[int, int] = (1, 1)
    heads: tuple[int, int] = (1, 1)
    pieces: tuple[int, int] = (1, 1)

    @property
    def ranges(self) -> np.ndarray:
        """Return the least and the largest number of layers, heads and pieces."""
        return np.array([self.layers, self.heads, self.pieces], np.int64)


PLACES = (
    Places("4 pieces", pieces=(4, 4)),
    Places("8 pieces", pieces=(8, 8)),
    Places("16 pieces", pieces=(16, 16)),
    Places("2 to 8 layers", layers=(2, 8)),
    Places("2 to 8 heads", heads=(2, 8)),
    Places("2 layers x 2 heads", (2, 2), (2, 2)),
    Places("2 to 8 layers x 2 to 8 heads", (2, 8), (2, 8)),
)

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
ZEROS, NORMAL = "all zeros", "normal"
FEW_VALUES = {"0 and -0": (0.0, -0.0), "0, 1 and -1": (0.0, 1.0, -1.0)}


@dataclass(frozen=True)
class KV:
    """The contents of KV: values from `pool`, bit patterns of `bits` bits each."""

    name: str
    dtype: str
    bits: int
    pool: np.ndarray

    @property
    def few(self) -> bool:
        """Return whether this is not the control."""
        return self.name != NORMAL


def _kv(name: str, dtype: torch.dtype, values: np.ndarray) -> KV:
    width = dtype.itemsize
    stored = torch.from_numpy(values.astype(np.float32)).to(dtype)
    patterns = stored.view(torch.uint8).numpy().view(f"<u{width}").astype(np.uint64)
    return KV(name, str(dtype).removeprefix("torch."), 8 * width, patterns)


def kinds_of_kv(seed: int) -> list[KV]:
    """Return every kind of KV; zeros once, as all formats store the same bytes."""
    normal = np.random.default_rng(seed).standard_normal(_POOL)
    kinds = [KV(ZEROS, "any", 64, np.zeros(1, np.uint64))]
    for dtype in DTYPES:
        kinds += [_kv(name, dtype, np.array(v)) for name, v in FEW_VALUES.items()]
        kinds.append(_kv(NORMAL, dtype, normal))
    return kinds


class Set(NamedTuple):
    """Places of one set, and their pieces before and after the damage."""

    coordinates: np.ndarray
    numbers: np.ndarray
    weights: np.ndarray
    before: np.ndarray
    after: np.ndarray


def empty_set() -> Set:
    """Return room for a set of any size."""
    room: list[np.ndarray] = [np.zeros(MAX_PLACES, np.uint64) for _ in range(4)]
    return Set(np.zeros((MAX_PLACES, 3), np.uint64), *room)


@njit(nogil=True, cache=True)
def draw(state: np.ndarray) -> np.uint64:
    """Return 64 random bits (SplitMix64)."""
    state[0] += _STEP
    z = state[0]
    z = (z ^ (z >> _30)) * _MIX1
    z = (z ^ (z >> _27)) * _MIX2
    return z ^ (z >> _31)


@njit(nogil=True, cache=True)
def _below(state: np.ndarray, limit: int) -> np.signedinteger:
    # Signed, as numba makes floats of signed and unsigned integers added.
    return np.int64(((draw(state) >> _32) * np.uint64(limit)) >> _32)


@njit(nogil=True, cache=True)
def _spaced(
    state: np.ndarray, low: int, high: int, limit: int
) -> tuple[np.signedinteger, np.signedinteger, np.signedinteger]:
    """Draw how many of `limit` there are, the first, and the distance of two."""
    number = low + _below(state, high - low + 1)
    step = np.int64(1)
    if number > 1:
        step += _below(state, (limit - 1) // (number - 1))
    first = _below(state, limit - (number - 1) * step)
    return number, first, step


@njit(nogil=True, cache=True)
def _draw_places(state: np.ndarray, ranges: np.ndarray, drawn: Set) -> int:
    """Draw a grid of places into `drawn`; return how many there are."""
    layers, layer, next_layer = _spaced(state, ranges[0, 0], ranges[0, 1], LAYERS)
    heads, head, next_head = _spaced(state, ranges[1, 0], ranges[1, 1], HEADS)
    pieces, piece, next_piece = _spaced(state, ranges[2, 0], ranges[2, 1], PIECES)
    before_block = _below(state, _BLOCKS) * PIECES
    n = 0
    for a in range(layers):
        for b in range(heads):
            for c in range(pieces):
                at = layer + a * next_layer, head + b * next_head
                k = piece + c * next_piece
                one, two, j = np.uint64(at[0]), np.uint64(at[1]), before_block + k
                drawn.coordinates[n, 0] = one
                drawn.coordinates[n, 1] = two
                drawn.coordinates[n, 2] = np.uint64(j)
                drawn.numbers[n] = np.uint64((at[0] * HEADS + at[1]) * PIECES + k)
                drawn.weights[n] = weight(one, two, np.uint64(j))
                n += 1
    return n


@njit(nogil=True, cache=True)
def _draw_piece(state: np.ndarray, bits: int, pool: np.ndarray) -> np.uint64:
    """Return 8 bytes of values from the pool."""
    x, chunks = np.uint64(0), np.uint64(0)
    for k in range(64 // bits):
        if k % 4 == 0:
            chunks = draw(state)
        value = pool[((chunks & _CHUNK) * np.uint64(len(pool))) >> _16]
        x |= value << np.uint64(k * bits)
        chunks >>= _16
    return x


@njit(nogil=True, cache=True)
def _damage(state: np.ndarray, damage: int, n: int, drawn: Set) -> bool:
    """Damage the first `n` places; return whether that changed a byte."""
    before, after = drawn.before, drawn.after
    flip = _ONE << (draw(state) & _63) if damage == FLIP else np.uint64(0)
    changed = False
    for i in range(n):
        source = i
        if damage == ROTATE:
            source = i + 1 if i + 1 < n else 0
        elif damage == REVERSE:
            source = n - 1 - i
        after[i] = before[source] ^ flip
        changed = changed or after[i] != before[i]
    return changed


@njit(nogil=True, cache=True)
def draw_set(
    state: np.ndarray,
    ranges: np.ndarray,
    damage: int,
    bits: int,
    pool: np.ndarray,
    drawn: Set,
) -> int:
    """Draw a set that the damage changes into `drawn`; return its number of places.

    What is left as it was, such as equal values rotated, is drawn again.
    """
    while True:
        n = _draw_places(state, ranges, drawn)
        for i in range(n):
            drawn.before[i] = _draw_piece(state, bits, pool)
        if _damage(state, damage, n, drawn):
            return n


@njit(nogil=True, cache=True)
def count_missed(
    seed: np.uint64,
    sets: int,
    ranges: np.ndarray,
    damage: int,
    bits: int,
    pool: np.ndarray,
    definitions: tuple[int, int],
    tables: tuple[np.ndarray, np.ndarray],
    drawn: Set,
) -> np.ndarray:
    """Draw so many sets; return how many of them each of `NAMES` misses.

    `definitions` are those of the first two checks.
    """
    state = np.array([seed], np.uint64)
    missed: np.ndarray = np.zeros(4, np.int64)
    for _ in range(sets):
        n = draw_set(state, ranges, damage, bits, pool, drawn)
        numbers, weights = drawn.numbers[:n], drawn.weights[:n]
        before, after = drawn.before[:n], drawn.after[:n]
        for k in range(2):
            if checksum_change(weights, before, after, definitions[k]) == 0:
                missed[k] += 1
        low, high = adler_change(numbers, before, after)
        if low == 0 and high == 0:
            missed[2] += 1
        if crc_change(numbers, before, after, tables[0], tables[1]) == 0:
            missed[3] += 1
    return missed
