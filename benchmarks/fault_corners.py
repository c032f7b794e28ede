# SPDX-License-Identifier: Apache-2.0
"""How often the same bit flipped at four corners is missed, by what KV holds.

Weights of the corners of a rectangle (two layers, two KV heads, one piece of one token)
cancel: ``w_a - w_b - w_c + w_d == 0``. Where the flips have these signs, only the
checksum's last fold tells the damage apart. This is the worst damage known; it is
drawn here on purpose.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent / "kernels"))
from without_vllm import stand_in_for_vllm  # noqa: E402

stand_in_for_vllm()

from vllm.distributed.kv_transfer.kv_checksum.checksum import (  # noqa: E402
    GOLDEN_FACTOR,
    MAX_KV_HEADS_PER_LAYER,
    checksum_terms,
)

Generator = np.random.Generator

KV: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "normal": lambda drawn: drawn,
    "0, 1 and -1": lambda drawn: np.sign(drawn) * (np.abs(drawn) > 1),
    "0 and -0": lambda drawn: np.sign(drawn) * 0,
}
DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn)
BITS = (7, 15, 30, 31, 47, 62, 63)


def pieces(kv: str, dtype: torch.dtype, number: int, random: Generator) -> np.ndarray:
    """uint64 ``(number,)``: 8-byte pieces of such values."""
    drawn = random.standard_normal((number, 8 // dtype.itemsize), np.float32)
    values = torch.from_numpy(KV[kv](drawn)).to(dtype)
    return values.view(torch.uint8).numpy().view(np.uint64).ravel()


def corner_weights(number: int, random: Generator) -> list[np.ndarray]:
    """Weights of one piece in two layers and two heads, each uint64 ``(number,)``."""
    one, two = np.uint64(1), np.uint64(2)
    layers = random.permuted(np.tile(np.arange(60), (number, 1)), axis=1)[:, :2]
    heads = random.permuted(np.tile(np.arange(8), (number, 1)), axis=1)[:, :2]
    odd = two * random.integers(0, 2**18, number, np.uint64) + one
    weights = []
    for layer in layers.T.astype(np.uint64):
        for head in heads.T.astype(np.uint64):
            place = layer * np.uint64(MAX_KV_HEADS_PER_LAYER) + head
            weights.append(np.uint64(GOLDEN_FACTOR) * (two * place + one) * odd)
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--n", type=int, default=1_000_000, help="trials per cell")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--json", action="store_true", help="one JSON object at the end"
    )
    args = parser.parse_args()
    random = np.random.default_rng(args.seed)
    results: dict[str, dict[int, int]] = {}
    print(f"missed of {args.n:,} flips of one bit at four corners, by bit of the piece")
    for dtype in DTYPES:
        for kv in KV:
            weights = corner_weights(args.n, random)
            missed = {}
            for bit in BITS:
                flip = np.uint64(1 << bit)
                change = np.zeros(args.n, np.uint64)
                for w in weights:
                    x = pieces(kv, dtype, args.n, random)
                    change += checksum_terms(x ^ flip, w) - checksum_terms(x, w)
                missed[bit] = int((change == 0).sum())
            name = f"{str(dtype).removeprefix('torch.')}, {kv}"
            results[name] = missed
            shown = "  ".join(f"{bit}: {n:,}" for bit, n in missed.items())
            print(f"{name:<28}{shown}", flush=True)
    if args.json:
        print(json.dumps({"n": args.n, "seed": args.seed, "missed": results}))


if __name__ == "__main__":
    main()
