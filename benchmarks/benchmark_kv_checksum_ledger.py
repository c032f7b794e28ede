# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the ledger costs on the engine's thread: microseconds per step.

Measured is `BlockPool.cache_full_blocks` for all blocks that become full in a step, of
stock vLLM, with checksums off, and on, where the blocks are also noted, handed to the
workers, and their sums entered when they come back ("ledger": this alone); "later" are the
steps behind one that fills very many, which enter the rest. The ledger is full before it starts, so that every
entry overwrites one. The three take turns, step by step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from originals import original_module

from vllm.distributed.kv_transfer.kv_checksum.checksum import (
    KVChecksumGroup,
    KVChecksumRecord,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.ledger import Ledger
from vllm.distributed.kv_transfer.kv_checksum.scheduler.ledger_loads import (
    FULL_BLOCKS,
    LedgerLoads,
)
from vllm.v1.core import block_pool as patched
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)

BLOCK_SIZE = 16
CASES = {
    "64 requests that decode": (64, 16),
    "1,024 requests that decode": (1024, 16),
    "the end of 128k tokens": (1, 1),
}
"""Requests, and how many steps pass until each of them has filled a block."""

Step = Callable[[], None]


class Filling(SimpleNamespace):
    """A request whose blocks become full, as far as vLLM's block pool looks at it."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def new_hashes(number: int, seed: int) -> list[bytes]:
    return [hashlib.sha256(f"{seed} {i}".encode()).digest() for i in range(number)]


def make_ledger(num_entries: int) -> LedgerLoads:
    """A full ledger of a model with one KV cache group."""
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
    )
    config = KVCacheConfig(100_000, [], [KVCacheGroupSpec(["model.layers.0"], spec)])
    ledger = LedgerLoads(Ledger(num_entries), config, BLOCK_SIZE, 1)
    rng = np.random.default_rng(0)
    for _ in range(0, num_entries, 2**16):
        keys = rng.integers(0, 2**63, 2**16).astype(np.uint64)
        ledger.ledger.enter(keys, keys)
    return ledger


class Engine:
    """A block pool, and the ledger where checksums are on."""

    def __init__(self, module: Any, requests: int, ledger: LedgerLoads | None) -> None:
        self.pool = module.BlockPool(100_000, True, BLOCK_SIZE)
        self.ledger = ledger
        if ledger is not None:
            self.pool.kv_checksum_ledger = ledger
        self.requests = [
            Filling(request_id=f"r{i}", block_hashes=[]) for i in range(requests)
        ]
        self.scheduled = {r.request_id: 1 for r in self.requests}
        self.seq = 0
        # Seconds of the last step that were spent in the ledger, but for notes.
        self.own = 0.0

    def step(self, number: int, blocks: int, every: int) -> float:
        """Fill `blocks` blocks of the requests whose turn it is; seconds taken."""
        turn = self.requests[number % every :: every]
        held = []
        for i, request in enumerate(turn):
            request.block_hashes = new_hashes(blocks, number * 100_000 + i)
            held.append(self.pool.get_new_blocks(blocks))
        self.seq += 1
        sums: np.ndarray = np.arange(blocks * len(turn), dtype=np.uint64)[:, None]
        part = KVChecksumGroup(0, ((1, 0),), sums)
        began = time.perf_counter()
        for request, own in zip(turn, held, strict=True):
            self.pool.cache_full_blocks(request, own, 0, blocks, BLOCK_SIZE, 0)
        if self.ledger is not None:
            cached = time.perf_counter()
            asked = self.ledger.take_full_blocks(self.scheduled, self.seq)
            took = time.perf_counter() - began
            self.own = time.perf_counter() - cached
            assert asked is not None
            record = KVChecksumRecord(
                0,
                0,
                {FULL_BLOCKS: {0: part}},
                fingerprints={0: 1},
                num_tokens={FULL_BLOCKS: asked.num_tokens},
                seqs={FULL_BLOCKS: self.seq},
            )
            began = time.perf_counter()
            for full in self.ledger.pending():
                full.take(record)
            self.ledger.enter_reported()
            took += time.perf_counter() - began
            self.own += time.perf_counter() - began
        else:
            took = time.perf_counter() - began
        for own in held:
            self.pool.free_blocks(own)
        return took

    def later_step(self) -> float | None:
        """A step that fills no block; seconds taken, or None if no sum waits."""
        if self.ledger is None or not self.ledger.num_waiting:
            return None
        began = time.perf_counter()
        self.ledger.enter_reported()
        return time.perf_counter() - began


def measure(requests: int, every: int, repeats: int, entries: int) -> dict[str, float]:
    blocks = 1 if every > 1 else 131072 // BLOCK_SIZE
    engines = {
        "stock": Engine(original_module(patched), requests, None),
        "off": Engine(patched, requests, None),
        "on": Engine(patched, requests, make_ledger(entries)),
    }
    took: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(repeats + 3):
        for name, engine in engines.items():
            seconds = engine.step(number, blocks, every)
            if number >= 3:
                took[name].append(seconds)
                if engine.ledger is not None:
                    took.setdefault("ledger", []).append(engine.own)
            while (seconds := engine.later_step()) is not None:  # type: ignore[assignment]
                took.setdefault("later", []).append(seconds)
    return {name: statistics.median(t) * 1e6 for name, t in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=100, metavar="STEPS")
    parser.add_argument(
        "--entries", type=int, default=2**20, metavar="N", help="of the ledger"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="results, by case")
    args = parser.parse_args()
    ledger = Ledger(args.entries)
    print(f"{ledger.num_bytes / args.entries:.0f} bytes per entry")
    print(f"{'a step with':<30}{'stock us':>10}{'off us':>10}{'on us':>10}", end="")
    print(f"{'ledger us':>11}{'later us':>10}")
    found = {}
    for name, (requests, every) in CASES.items():
        us = measure(requests, every, args.repeats, args.entries)
        print(
            f"{name:<30}", *(f"{us[k]:>9.1f}" for k in ("stock", "off", "on")), end=""
        )
        print(f"{us['ledger']:>11.1f}{us.get('later', 0):>10.1f}", flush=True)
        found[name] = us
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
