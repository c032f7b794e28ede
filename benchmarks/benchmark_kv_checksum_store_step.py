# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Measure what storing checksums adds to a step: `save_block_checksums` of its full blocks.

`host` is the engine thread's time: rows, tags and queueing, with the layers' sums
left out. `sums` is the rest, on the device (on the CPU in the same thread). A value
grows by 8 bytes per block and rank; no key and no call to the store is added.
"""

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Callable

import torch

from vllm.distributed.kv_transfer.kv_checksum import KVChecksumWorker
from vllm.distributed.kv_transfer.kv_checksum.stored import BlockRun
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)

BLOCK_SIZE, HEADS, HEAD_SIZE = 16, 8, 128
SIZES = [1, 64, 512, 4096]
"""Full blocks of one request that a step stores."""


def worker_of(layers: int, num_blocks: int, device: str) -> KVChecksumWorker:
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=HEADS,
        head_size=HEAD_SIZE,
        dtype=torch.bfloat16,
    )
    shape = (num_blocks, HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    caches = {
        f"model.layers.{n}.self_attn.attn": torch.zeros(
            shape, dtype=torch.bfloat16, device=device
        )
        for n in range(layers)
    }
    config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(list(caches), spec)],
    )
    worker = KVChecksumWorker(
        config, caches, tp_rank=0, tp_size=1, pp_rank=0, uniform_kv_heads=HEADS
    )
    worker.init_block_checksums([0])
    return worker


def median_us(
    act: Callable[[], None], device: str, repeats: int, whole: bool = True
) -> float:
    """Return the median time of `act`, until the device is done if `whole`."""
    times = []
    for _ in range(repeats):
        if device != "cpu":
            torch.cuda.synchronize()
        began = time.perf_counter()
        act()
        if whole and device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="one line per size")
    args = parser.parse_args()
    worker = worker_of(args.layers, max(SIZES) + 1, args.device)
    sums = worker._sums
    block_bytes = args.layers * HEADS * BLOCK_SIZE * 2 * HEAD_SIZE * 2
    for number in SIZES:
        hashes = [hashlib.sha256(b"%d" % i).digest() for i in range(number)]
        run = BlockRun(0, 0, list(range(1, number + 1)), hashes)

        def save(run: BlockRun = run) -> None:
            worker.save_block_checksums([run])

        whole = median_us(save, args.device, args.repeats)
        worker._sums = {0: []}
        host = median_us(save, args.device, args.repeats, whole=False)
        worker._sums = sums
        line = {
            "blocks": number,
            "host_us": round(host, 1),
            "sums_us": round(whole - host, 1),
            "stored_bytes": number * (block_bytes + 8),
            "of_them_checksums": number * 8,
        }
        if args.json:
            print(json.dumps(line))
        else:
            print(
                f"{number:5} blocks: host {host:8.1f} us, sums {whole - host:10.1f} us, "
                f"{8 / (block_bytes + 8):.5%} of the bytes stored"
            )


if __name__ == "__main__":
    main()
