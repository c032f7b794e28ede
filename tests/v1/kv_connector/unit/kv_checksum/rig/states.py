# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Make unsharded states of Mamba-like layers, and each TP rank's pages of them.

Shapes and splits come from vLLM's own calculator; where a rank's rows lie is built
here from unsharded states, independently of the feature.
"""

from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

NUM_BLOCKS, PADDING, ROWS_BETWEEN = 5, 24, 7


@dataclass
class Family:
    """Global conv segments, temporal rows, and vLLM's functions for them.

    `replicated` are the conv segments that every rank holds whole; `length` is that of
    a conv row.
    """

    conv: tuple[int, ...]
    temporal: int
    per_row: tuple[int, ...]
    shapes: object
    splits: object
    replicated: tuple[int, ...] = ()
    length: int = 3


CALC = MambaStateShapeCalculator


def mamba2(n_groups, drafts=0):
    sizes = dict(intermediate_size=16, n_groups=n_groups, num_heads=8, state_size=6)
    return Family(
        (16, 6 * n_groups, 6 * n_groups),
        8,
        (2, 6),
        lambda tp: CALC.mamba2_state_shape(
            tp, head_dim=2, conv_kernel=4, num_spec=drafts, **sizes
        ),
        lambda tp: CALC.mamba2_state_splits(tp, **sizes),
        (1, 2) if n_groups == 1 else (),
        3 + drafts,
    )


def gdn():
    sizes = dict(num_k_heads=4, num_v_heads=8, head_k_dim=3, head_v_dim=2)
    return Family(
        (12, 12, 16),
        8,
        (2, 3),
        lambda tp: CALC.gated_delta_net_state_shape(tp, conv_kernel_size=4, **sizes),
        lambda tp: CALC.gated_delta_net_state_splits(tp, **sizes),
    )


def kda():
    heads, dim = 8, 3
    return Family(
        (heads * dim,) * 3,
        heads,
        (dim, dim),
        lambda tp: CALC.kda_state_shape(tp, heads, dim, conv_kernel_size=4),
        lambda tp: CALC.kda_state_splits(tp, heads, dim),
    )


FAMILIES = {
    "mamba1": Family(
        (16,),
        16,
        (5,),
        lambda tp: CALC.mamba1_state_shape(tp, 16, 5, 4),
        lambda tp: CALC.mamba1_state_splits(tp, 16),
    ),
    "mamba2, 1 group": mamba2(1),
    "mamba2, 4 groups": mamba2(4),
    "gated delta net": gdn(),
    "kda": kda(),
}
DRAFTING = {"mamba2, 1 group, 2 drafts": mamba2(1, drafts=2)}
"""Families whose conv states have room for drafted tokens; no campaign draws them."""

DTYPES = (torch.bfloat16, torch.float32)
WORDS = {torch.bfloat16: np.uint16, torch.float32: np.uint32}


def unsharded(family, seed, dtypes=DTYPES):
    """Return conv rows ``(dim, state_len)`` and temporal rows, as unsigned words."""
    draw = np.random.default_rng(seed)
    shapes = (
        (sum(family.conv), family.length),
        (family.temporal, prod(family.per_row)),
    )
    return [
        draw.integers(0, 2 ** (8 * dtype.itemsize), shape).astype(WORDS[dtype])
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


def local_states(family, states, rank, tp):
    """Return a rank's share of each conv segment and of the temporal rows."""
    conv, temporal = states
    parts, at = [], 0
    for i, size in enumerate(family.conv):
        segment = conv[at : at + size]
        share = size if i in family.replicated else size // tp
        first = 0 if i in family.replicated else rank * share
        parts.append(segment[first : first + share])
        at += size
    rows = family.temporal // tp
    return np.concatenate(parts), temporal[rank * rows : (rank + 1) * rows]


def page_of(conv, temporal, layout, extra=b""):
    oriented = conv if layout == "DS" else np.ascontiguousarray(conv.T)
    return oriented.tobytes() + temporal.tobytes() + extra


def cache_of(page, seed=0):
    """Return ``[B, 1, 1, C]`` int8 with `page` in block 3; padded pages, an offset."""
    content = len(page)
    content += -content % 8
    raw = np.random.default_rng(seed).integers(
        -128, 128, (NUM_BLOCKS, ROWS_BETWEEN, content + PADDING)
    )
    raw = torch.from_numpy(raw.astype(np.int8))
    raw[3, 1, : len(page)] = torch.frombuffer(bytearray(page), dtype=torch.int8)
    return raw[:, 1, : len(page)].view(NUM_BLOCKS, 1, 1, len(page))
