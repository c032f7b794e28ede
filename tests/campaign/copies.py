# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Put bytes of other blocks into a loaded block: of a group or a load, or in part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm.distributed.kv_transfer.kv_checksum.fault_drill.damage import NotApplicable

from .models import Generator

if TYPE_CHECKING:
    from .strike import Chunk, Target, Worker


def inflict(
    kind: str,
    target: Target,
    chunks: list[Chunk],
    chunk: Chunk,
    at: int,
    random: Generator,
) -> None:
    """Damage one block of a chunk on one worker.

    Args:
        kind: what is put there; its words tell.
        target: the instance's caches.
        chunks: all that was loaded, where other blocks are found.
        chunk: what is damaged.
        at: number of the worker.
        random: draws.

    Raises:
        NotApplicable: there is no such other block; nothing was changed.

    """
    worker = target.workers[chunk.group][at]
    to = chunk.ids[random.integers(len(chunk.ids))]
    if kind.startswith("half"):
        others = target.others[chunk.group]
        _half_written(worker, to, others[random.integers(len(others))], random)
        return
    same_group = not kind.endswith("group")
    found = [
        other
        for other in chunks
        if (other.group == chunk.group) == same_group
        and (other.req_id == chunk.req_id) != same_group
        and target.workers[other.group][at].layers
    ]
    if not found:
        raise NotApplicable("nothing else was loaded")
    other = found[random.integers(len(found))]
    source = target.workers[other.group][at]
    block = other.ids[random.integers(len(other.ids))]
    for i in range(len(worker.layers)):
        written = _bytes(source, i % len(source.layers), block)
        mine = _bytes(worker, i, to)
        number = min(len(mine), len(written))
        mine[:number] = written[:number]


def _half_written(worker: Worker, to: int, stale: int, random: Generator) -> None:
    """Let the copy end: the layers behind, or the bytes behind, are old."""
    layers = list(range(len(worker.layers)))
    by_layer = len(layers) > 1 and random.random() < 0.5
    for i in layers[int(random.integers(1, len(layers))) :] if by_layer else layers:
        mine = _bytes(worker, i, to)
        first = 0 if by_layer else int(random.integers(len(mine)))
        mine[first:] = _bytes(worker, i, stale)[first:]


def _bytes(worker: Worker, layer: int, block: int) -> np.ndarray:
    """Return a block's bytes in one layer, a view.

    Raises:
        NotApplicable: they do not follow one another.

    """
    raw = worker.layers[layer].blocks[block]
    if not raw.is_contiguous():
        raise NotApplicable("the bytes of a block lie apart")
    found: np.ndarray = raw.view(-1).numpy()
    return found
