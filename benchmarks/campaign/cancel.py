# SPDX-License-Identifier: Apache-2.0
"""Damage whose changes cancel in a weighted sum, so that only the last fold shows it."""

from __future__ import annotations

import math

import kv_checksum_reference as reference
import numpy as np

from .models import Attention
from .sides import Side
from .strike import Chunk


def changes_cancel(side: Side, chunk: Chunk, old: bytes, new: bytes) -> bool:
    """Whether the checksum without its last fold, ``(x ^ (x >> 33)) * w``, is the same.

    Evenly spaced weights cancel: of heads, layers and tokens, ``w_a - w_b - w_c + w_d``
    is 0 at the corners of a rectangle. The last fold then tells the changes apart by
    the low bits of what was there, and KV of few values may have none.

    Args:
        old, new: what `strike.content` gives of the chunk, before and after.
    """
    group, tp = side.groups[chunk.group], side.split.tp
    if not isinstance(group, Attention):
        return False
    replicas = max(1, tp // group.heads)
    totals = [0] * replicas
    at = 0
    for worker in side.target.workers[chunk.group]:
        heads = group.heads_of(worker.rank, tp)
        for index in worker.indices:
            for i in range(len(chunk.ids)):
                shape = chunk.valid(i), heads.stop - heads.start, group.cell_bytes
                size = math.prod(shape)
                cells = [
                    np.frombuffer(x[at : at + size], np.uint8).reshape(shape)
                    for x in (old, new)
                ]
                at += size
                first = (chunk.start + i) * chunk.block_size
                for head in range(shape[1]):
                    totals[worker.rank % replicas] += _change(
                        [c[:, head] for c in cells],
                        group.layers[index],
                        heads.start + head,
                        first,
                    )
    return not any(total % 2**64 for total in totals)


def _change(cells: list[np.ndarray], layer: int, head: int, first: int) -> int:
    """Of one slice, bytes ``(tokens, cell)`` before and after."""
    before, after = (reference.pieces_of(c) for c in cells)
    tokens, pieces = before.shape
    j = (first + np.arange(tokens, dtype=np.uint64)[:, None]) * np.uint64(pieces)
    j = j + np.arange(pieces, dtype=np.uint64)
    m = reference.GOLDEN * (2 * (layer * reference.HEADS + head) + 1)
    w = np.uint64(m & reference.MASK) * (np.uint64(2) * j + np.uint64(1))
    mixed = [x ^ (x >> np.uint64(33)) for x in (before, after)]
    return int(((mixed[1] - mixed[0]) * w).sum(dtype=np.uint64))
