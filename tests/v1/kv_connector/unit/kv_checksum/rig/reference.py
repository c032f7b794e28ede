# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Define the checksum in plain NumPy, sharing no code with the feature."""

import numpy as np
import torch

GOLDEN = 0x9E3779B97F4A7C15
HEADS = 2**16
MASK = 2**64 - 1


def pieces_of(cell_bytes: np.ndarray, width: int | None = None) -> np.ndarray:
    """Return the uint64 pieces of ``(..., bytes)`` uint8 cells, as the definition."""
    content = cell_bytes.shape[-1]
    width = width or next(w for w in (8, 4, 2) if content % w == 0)
    return np.ascontiguousarray(cell_bytes).view(f"<u{width}").astype(np.uint64)


def slice_sum(
    cells: np.ndarray,
    layer: int,
    head: int,
    first: int,
    num_tokens: int,
    width: int | None = None,
) -> int:
    """Sum of one layer and head in one block.

    `cells` is uint8 ``(tokens, bytes)``; `first` the first token's position;
    `width` the bytes of a piece where it does not follow from a cell's.
    """
    x = pieces_of(cells, width)
    tokens, pieces = x.shape
    m = GOLDEN * (2 * (layer * HEADS + head) + 1) & MASK
    position = first + np.arange(tokens, dtype=np.uint64)[:, None]
    j = position * np.uint64(pieces) + np.arange(pieces, dtype=np.uint64)
    w = np.uint64(m) * (np.uint64(2) * j + np.uint64(1))
    y = (x ^ (x >> np.uint64(33))) * w
    t = (y >> np.uint64(32)) * np.uint64(0x9E3779B1)
    term = y ^ ((t ^ (t >> np.uint64(32))) & np.uint64(0xFFFFFFFF))
    return int(term[position[:, 0] < num_tokens].sum(dtype=np.uint64))


def unit_size(block_size: int) -> int:
    """Return the number of tokens that a sum covers."""
    return 16 if block_size % 16 == 0 else block_size


def unit_sums(
    layers: dict[int, np.ndarray], first: int, num_tokens: int, first_head: int = 0
) -> list[int]:
    """Return the sums of one block's units; `layers` as `block_sum`."""
    (tokens,) = {heads.shape[1] for heads in layers.values()}
    size = unit_size(tokens)
    return [
        block_sum(
            {n: heads[:, at : at + size] for n, heads in layers.items()},
            first + at,
            num_tokens,
            first_head,
        )
        for at in range(0, tokens, size)
    ]


def by_blocks(sums: list[int], block_size: int) -> list[int]:
    """Return the sums of whole blocks, from those of their units."""
    number = block_size // unit_size(block_size)
    return [sum(sums[i : i + number]) & MASK for i in range(0, len(sums), number)]


def prompt_digests(token_ids: list[int]) -> tuple[int, int]:
    """Return what a payload says of the prompt that it was made for."""
    whole_units = len(token_ids) // 16 * 16
    return prompt_digest(token_ids), prompt_digest(token_ids[:whole_units])


def prompt_digest(token_ids: list[int]) -> int:
    """Return the number of some tokens, and the sum of the terms of their ids."""
    total = len(token_ids)
    for j in range(0, len(token_ids), 2):
        total += prompt_term(j, *token_ids[j : j + 2])
    return total & MASK or 1


def prompt_term(first: int, low: int, high: int = 0) -> int:
    """Return the term of two tokens' ids, the first of which has number `first`."""
    x = low | high << 32
    y = (x ^ (x >> 33)) * GOLDEN * (first + 1) & MASK
    t = (y >> 32) * 0x9E3779B1
    return y ^ ((t ^ (t >> 32)) & (2**32 - 1))


def block_sum(
    layers: dict[int, np.ndarray], first: int, num_tokens: int, first_head: int = 0
) -> int:
    """Return one block's checksum; `layers`: number -> ``(heads, tokens, bytes)``."""
    return (
        sum(
            slice_sum(heads[h], layer, first_head + h, first, num_tokens)
            for layer, heads in layers.items()
            for h in range(len(heads))
        )
        & MASK
    )


def logical_bytes(cache: torch.Tensor) -> np.ndarray:
    """Return uint8 ``(B, H, N, bytes)`` of a ``[B, H, N, C]`` cache, any layout."""
    return cache.contiguous().view(torch.uint8).numpy()


def state_sum(states: list[np.ndarray], layer: int) -> int:
    """Return the checksum of one unsharded layer's states, each ``(rows, elements)``.

    Rows are numbered across the states; a row counts as one token whose pieces are
    its elements.
    """
    total = row = 0
    for state in states:
        for elements in state:
            width = elements.dtype.itemsize
            cell = np.ascontiguousarray(elements).view(np.uint8)[None]
            total += slice_sum(cell, layer, row, 0, 1, width)
            row += 1
    return total & MASK
