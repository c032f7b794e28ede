# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compute how four checks of a block change, from the changed pieces alone.

Shares no code with the feature, so that either can be held against the other. No check
needs the rest of the block: the checksum is a sum over pieces, CRC-32 is linear, and of
Adler-32 the change depends on the changed bytes and their places.
"""

from __future__ import annotations

import numpy as np
from numba import njit

LAYERS, HEADS, PIECES = 64, 8, 512
"""What a block holds: 64 layers of 8 KV heads, 16 tokens of 32 pieces (256 bytes, such as
K and V of 64 bfloat16 values each) in every slice."""

BLOCK_PIECES = LAYERS * HEADS * PIECES
"""Pieces of a block, in the order layer, head, token, piece: 2 MiB."""

NAMES = ("definition 1", "definition 2", "Adler-32", "CRC-32")

_ONE, _TWO, _8, _32, _33 = (np.uint64(n) for n in (1, 2, 8, 32, 33))
_BYTE, _LOW = np.uint64(0xFF), np.uint64(0xFFFFFFFF)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FOLD = np.uint64(0x9E3779B1)
_HEADS_PER_LAYER = np.uint64(2**16)
_ADLER = 65521
_POLYNOMIAL = np.uint32(0xEDB88320)


@njit(nogil=True, cache=True)
def weight(layer: np.uint64, head: np.uint64, j: np.uint64) -> np.uint64:
    """Return the weight of piece `j` of a request's slice."""
    factor = _GOLDEN * (_TWO * (layer * _HEADS_PER_LAYER + head) + _ONE)
    return factor * (_TWO * j + _ONE)


@njit(nogil=True, cache=True)
def term(x: np.uint64, w: np.uint64, definition: int) -> np.uint64:
    """Return what piece `x` adds to the checksum, by definition 1 or 2."""
    y = (x ^ (x >> _33)) * w
    high = y >> _32
    if definition == 1:
        return y ^ high
    t = high * _FOLD
    return y ^ ((t ^ (t >> _32)) & _LOW)


@njit(nogil=True, cache=True)
def checksum_change(
    weights: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    definition: int,
) -> np.uint64:
    """Return the checksum after the damage minus the one before, mod 2**64."""
    change = np.uint64(0)
    for i in range(len(weights)):
        change += term(after[i], weights[i], definition)
        change -= term(before[i], weights[i], definition)
    return change


@njit(nogil=True, cache=True)
def adler_change(
    numbers: np.ndarray, before: np.ndarray, after: np.ndarray
) -> tuple[int, int]:
    """Return how both halves of the block's Adler-32 change, mod 65521.

    `numbers` are the changed pieces' numbers in the block.
    """
    low, high = 0, 0
    for i in range(len(numbers)):
        behind = (BLOCK_PIECES - np.int64(numbers[i])) * 8
        old, new = before[i], after[i]
        for k in range(8):
            change = np.int64(new & _BYTE) - np.int64(old & _BYTE)
            low += change
            high += change * (behind - k)
            old >>= _8
            new >>= _8
    return low % _ADLER, high % _ADLER


@njit(nogil=True, cache=True)
def _times(a: np.uint32, b: np.uint32) -> np.uint32:
    """Multiply two polynomials, lowest power in the highest bit, modulo CRC-32's."""
    product = np.uint32(0)
    for k in range(32):
        product ^= b & -((a >> np.uint32(31 - k)) & np.uint32(1))
        b = (b >> np.uint32(1)) ^ (_POLYNOMIAL & -(b & np.uint32(1)))
    return product


@njit(cache=True)
def crc_tables() -> tuple[np.ndarray, np.ndarray]:
    """Return CRC-32's table of bytes, and x**(64 * k) for every k in the block."""
    table: np.ndarray = np.zeros(256, np.uint32)
    for byte in range(256):
        crc = np.uint32(byte)
        for _ in range(8):
            crc = (crc >> np.uint32(1)) ^ (_POLYNOMIAL & -(crc & np.uint32(1)))
        table[byte] = crc
    powers: np.ndarray = np.zeros(BLOCK_PIECES, np.uint32)
    powers[0] = np.uint32(1 << 31)
    step = np.uint32(1 << 31)
    for _ in range(64):
        step = (step >> np.uint32(1)) ^ (_POLYNOMIAL & -(step & np.uint32(1)))
    for k in range(1, BLOCK_PIECES):
        powers[k] = _times(powers[k - 1], step)
    return table, powers


@njit(nogil=True, cache=True)
def crc_change(
    numbers: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    table: np.ndarray,
    powers: np.ndarray,
) -> np.uint32:
    """Return the block's CRC-32 after the damage XOR the one before.

    That is the CRC of the difference's bytes alone, without the initial and the final
    inversion: each piece's remainder, times x once per bit that lies behind it.
    """
    change = np.uint32(0)
    for i in range(len(numbers)):
        rest = before[i] ^ after[i]
        crc = np.uint32(0)
        for _ in range(8):
            byte = (np.uint64(crc) ^ rest) & _BYTE
            crc = table[byte] ^ (crc >> np.uint32(8))
            rest >>= _8
        change ^= _times(powers[BLOCK_PIECES - 1 - np.int64(numbers[i])], crc)
    return change
