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
            # How a unit is read: see `_reading` and `_tiles`.
            *("is_dense", "is_one_run", "per_column", "is_side_by_side"),
            *("tiles", "tile_stride", "tile_pieces", "pairs"),
            # How many records are summed together, from this one on.
            "views",
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
    runs = _runs_of_tiles(layers)
    records: np.ndarray = np.zeros(len(runs), _LAYER)
    number = 0
    for record, tiles in zip(records, runs, strict=True):
        layer = tiles[0]
        fields = (
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
            *_reading(layer),
            *_tiles(tiles),
            1,
        )
        for name, value in zip(_LAYER.names or (), fields, strict=True):
            record[name] = value
        number += len(layer.factors)
    _join_views([tiles[0] for tiles in runs], records)
    return LayerTable(
        np.empty(0, _UNSIGNED[size]),
        records,
        torch.cat([tiles[0].factors for tiles in runs]).numpy().view(np.uint64),
        [layer.units for layer in layers],
    )


def _reading(layer: LayerView) -> tuple[bool, bool, int, bool]:
    """Return how tokens lie.

    Returns:
        Whether every token's pieces follow one another, whether all of them do, what
        the number of a piece grows by in a run, and whether the pieces of one number
        of all heads are neighbours.

    """
    *_, width = layer.units.shape
    *_, head, token, piece = layer.units.stride()
    side_by_side = head == 1 and piece != 1
    dense = layer.elements_per_piece == 1 and (piece == 1 or width == 1)
    per_column = layer.pieces if width == 1 else 1
    one_run = token == width and width in (1, layer.pieces)
    return dense and not side_by_side, one_run, per_column, side_by_side


def _follows(layer: LayerView, last: LayerView, first: LayerView) -> bool:
    """Tell whether a view is the tile behind the `last` one of a run."""
    size, second = layer.units.element_size(), layer
    return (
        layer.elements_per_piece > 1
        and second.units.shape == first.units.shape
        and second.units.stride() == first.units.stride()
        and layer.pieces == first.pieces
        and layer.state_ratio == first.state_ratio
        and torch.equal(layer.factors, first.factors)
        and layer.first_piece - last.first_piece
        == layer.units.shape[-1] // layer.elements_per_piece
        and layer.units.data_ptr() > last.units.data_ptr()
        and (layer.units.data_ptr() - last.units.data_ptr()) % size == 0
    )


def _runs_of_tiles(layers: Sequence[LayerView]) -> list[list[LayerView]]:
    """Collect views that differ in where they begin, by one step, to runs."""
    runs: list[list[LayerView]] = []
    for layer in layers:
        run = runs[-1] if runs else []
        if (
            run
            and _follows(layer, run[-1], run[0])
            and (
                len(run) == 1
                or layer.units.data_ptr() - run[-1].units.data_ptr()
                == run[1].units.data_ptr() - run[0].units.data_ptr()
            )
        ):
            run.append(layer)
        else:
            runs.append([layer])
    return runs


def _tiles(run: Sequence[LayerView]) -> tuple[int, int, int, int]:
    """Return number, stride and pieces of a run's tiles, and their vectors of pairs.

    These are 0 unless a unit's tiles are dense lines of one element of two tokens,
    the next element of both, and so on.
    """
    first = run[0]
    size = first.units.element_size()
    _, _, _, parts, _, tokens, width = first.units.shape
    _, _, _, part, _, token, piece = first.units.stride()
    vectors = 0
    if (
        (tokens, token, piece, width, part) == (2, 1, 2, 16, 32)
        and first.elements_per_piece * size == 8
        and first.elements_per_piece > 1
        and parts * 32 * size % 64 == 0
    ):
        vectors = parts * 32 * size // 64
    stride = 0
    if len(run) > 1:
        stride = (run[1].units.data_ptr() - first.units.data_ptr()) // size
    return len(run), stride, width // first.elements_per_piece, vectors


def _join_views(layers: Sequence[LayerView], records: np.ndarray) -> None:
    """Set how many views are summed together: dense ones of one layer and its units."""
    begin = 0
    for i in range(1, len(layers) + 1):
        if i < len(layers) and (
            records[begin]["is_dense"]
            and records[i]["is_dense"]
            and layers[i].name == layers[begin].name
            and layers[i].units.shape[:3] == layers[begin].units.shape[:3]
            and layers[i].state_ratio == layers[begin].state_ratio
            and layers[i].units_per_state == layers[begin].units_per_state
        ):
            continue
        records[begin]["views"] = i - begin
        begin = i


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
