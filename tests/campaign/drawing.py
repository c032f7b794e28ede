# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Draw models, and how the two instances split and store them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kv_checksum.rig import states

from . import compressed
from .models import LAYOUTS, Attention, Generator, Split, States

Group = Attention | States | compressed.Latents | compressed.Rings

PLAIN = (
    ("GQA",),
    ("MLA",),
    ("sliding window",),
    ("GQA", "sliding window"),
    ("mamba2, 1 group",),
    ("gated delta net",),
    ("GQA", "mamba2, 4 groups"),
    ("GQA", "gated delta net"),
    ("GQA", "kda"),
)
"""KV cache groups of models that keep every token, or states."""

FAMILIES = {
    "all": (*PLAIN, *compressed.FAMILIES),
    "compressed": (*compressed.FAMILIES, ("sliding window", "Step5", "Step5 ring")),
}
"""KV cache groups of the models that are drawn, by what is asked for."""

DTYPES_AND_SIZES = (
    (torch.bfloat16, 8),
    (torch.bfloat16, 16),
    (torch.float32, 8),
    (torch.float8_e4m3fn, 16),
    (torch.float8_e4m3fn, 6),
    (torch.float8_e4m3fn, 5),
)

BLOCK_SIZES = (
    (16, 16),
    (8, 8),
    (32, 32),
    (16, 32),
    (32, 16),
    (8, 32),
    (32, 8),
    (96, 64),
    (24, 8),
)

LARGE_BLOCK_SIZES = ((64, 64), (64, 128), (128, 64), (128, 128), (256, 128))
"""Further ones, of models that compress."""


def where(depth: str, seed: int, number: int, only: str) -> str:
    """Return the options that repeat a batch."""
    families = "" if only == "all" else f" --families {only}"
    return f"--depth {depth} --seed {seed} --batch {number}{families}"


def draw_model(random: Generator, only: str = "all") -> list[Group]:
    """Return a model's KV cache groups; layer numbers are spread over groups.

    Args:
        random: draws.
        only: a key of `FAMILIES`.

    """
    families = FAMILIES[only][random.integers(len(FAMILIES[only]))]
    numbers = random.permutation(60)[: 4 * len(families)]
    heads = int(2 ** random.integers(4))
    groups: list[Group] = []
    for at, family in enumerate(families):
        count = int(random.integers(1, 5))
        layers = tuple(sorted(map(int, numbers[4 * at : 4 * at + count])))
        if family in states.FAMILIES:
            groups.append(States(family, layers))
            continue
        if family.removesuffix(" ring") in compressed.PATTERNS:
            groups.append(compressed.draw_group(random, family, layers, heads))
            continue
        dtype, head_size = DTYPES_AND_SIZES[random.integers(len(DTYPES_AND_SIZES))]
        groups.append(
            Attention(
                family,
                layers,
                1 if family == "MLA" else heads,
                2 * head_size if family == "MLA" else head_size,
                dtype,
                int(random.integers(20, 200)),
                str(random.choice(["normal", "normal", "any bytes", "few values"])),
            )
        )
    return groups


def draw_splits(random: Generator, groups: Sequence[Group] = ()) -> tuple[Split, Split]:
    """Draw how P and D split the model of these groups."""
    sizes = BLOCK_SIZES[random.integers(len(BLOCK_SIZES))]
    if any(isinstance(group, compressed.Latents) for group in groups):
        fitting = [
            pair
            for pair in (*BLOCK_SIZES, *LARGE_BLOCK_SIZES)
            if compressed.fits(groups, pair)
        ]
        sizes = fitting[random.integers(len(fitting))]

    def split(block_size: int, consumes: int) -> Split:
        return Split(
            int(2 ** random.integers(3)),
            int(random.integers(1, 3)),
            block_size,
            str(random.choice(list(LAYOUTS))),
            str(random.choice(["DS", "SD"])),
            consumes,
        )

    return split(sizes[0], 0), split(sizes[1], 1)
