# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Describe layers to the compiled code of the CPU path, as an array of records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm.distributed.kv_transfer.kv_checksum.worker.views import LayerView

_AHEAD_BYTES, _MOST_AHEAD = 8192, 16
"""How far to look ahead: about so many bytes, and so many units at most.

Processors do not guess where the next unit is if blocks are in random order, and the
arithmetic leaves them no room to look as far ahead as memory is slow. Much more would
not stay in the first cache until it is used.
"""

_UNSIGNED = {8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}

_LAYER: np.dtype = np.dtype(
    [
        (name, np.int64)
        for name in (
            # Where units begin, the dims of `units`, and its strides in elements.
            "address",
            *("blocks", "outer", "inner", "parts", "heads", "tokens", "width"),
            *("block_stride", "outer_stride", "inner_stride", "part_stride"),
            *("head_stride", "token_stride", "piece_stride"),
            # See `LayerView`.
            *("pieces", "first_piece", "elements_per_piece", "units_per_state"),
            *("tokens_per_states", "states"),
            # Where the layer's factors begin, and how far to look ahead: see `_ahead`.
            *("first_factor", "units_ahead", "heads_ahead", "elements_ahead"),
        )
    ]
)


@dataclass
class LayerTable:
    """Layers whose elements are of one width.

    Attributes:
        like: an empty array of the unsigned type of the elements.
        layers: an array of `_LAYER`.
        factors: uint64, those of all layers.
        units: the views, which keep the caches alive.

    """

    like: np.ndarray
    layers: np.ndarray
    factors: np.ndarray
    units: list[torch.Tensor]


def layer_tables(layers: Sequence[LayerView]) -> list[LayerTable]:
    """Describe layers, by the width of their elements."""
    by_size: dict[int, list[LayerView]] = {}
    for layer in layers:
        by_size.setdefault(layer.units.element_size(), []).append(layer)
    return [_table(size, same) for size, same in by_size.items()]


def _table(size: int, layers: Sequence[LayerView]) -> LayerTable:
    records: np.ndarray = np.zeros(len(layers), _LAYER)
    number = 0
    for i, layer in enumerate(layers):
        records[i] = (
            layer.units.data_ptr(),
            *layer.units.shape,
            *layer.units.stride(),
            layer.pieces,
            layer.first_piece,
            layer.elements_per_piece,
            layer.units_per_state,
            *layer.state_ratio,
            number,
            *_ahead(layer.units),
        )
        number += len(layer.factors)
    return LayerTable(
        np.empty(0, _UNSIGNED[size]),
        records,
        torch.cat([layer.factors for layer in layers]).numpy().view(np.uint64),
        [layer.units for layer in layers],
    )


def _ahead(units: torch.Tensor) -> tuple[int, int, int]:
    """Return how far to look ahead, in units, heads and elements.

    Small units look so many units ahead, of which the heads are at the same place.
    Others look to a later head, in the last ones of the next unit. Where one head
    is much, it looks so many elements ahead in itself.
    """
    size, heads = units.element_size(), units.shape[4]
    head_bytes = max(1, units[0, 0, 0, :, 0].numel() * size)
    if heads * head_bytes <= _AHEAD_BYTES:
        return min(_AHEAD_BYTES // (heads * head_bytes), _MOST_AHEAD), heads, 0
    if head_bytes <= 2 * _AHEAD_BYTES:
        return 1, min(-(-_AHEAD_BYTES // head_bytes), heads), 0
    return 1, 0, _AHEAD_BYTES // size
