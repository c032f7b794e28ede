# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Measure the summing of KV blocks, beside a plain copy and a plain read of the same bytes.

On a GPU the Triton kernel and the PyTorch path are measured, on the CPU the numba
path and the PyTorch path; their sums must agree. Needs torch, and Triton or numba;
vLLM need not be installed.
"""

import argparse
import json
import platform
import statistics
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from without_vllm import stand_in_for_vllm

stand_in_for_vllm()

from vllm.distributed.kv_transfer.kv_checksum.worker.kernels import torch_reference  # noqa: E402
from vllm.distributed.kv_transfer.kv_checksum.worker.views import LayerView  # noqa: E402


@dataclass
class Shape:
    """One layer's block: heads, states, 8-byte pieces per state and head.

    A state is a token's, or that of several tokens. Rings have one unit per slot.
    """

    name: str
    heads: int
    states: int
    pieces: int
    tokens_per_state: int = 1
    unit_tokens: int | None = None

    @property
    def block_bytes(self) -> int:
        return 8 * self.heads * self.states * self.pieces

    @property
    def block_tokens(self) -> int:
        return self.states * self.tokens_per_state


SHAPES = [
    Shape("GQA: 8 heads of 128, bf16, 16 tokens", 8, 16, 64),
    Shape("GQA, TP 8: 1 head of 128, bf16, 16 tokens", 1, 16, 64),
    Shape("MLA: 576, bf16, 64 tokens", 1, 64, 144),
    Shape("Mamba-2: 128 state rows of 64 x 128, fp32", 128, 1, 4096),
    Shape("DeepSeek-V4: 64 latents of 584 bytes, of 4 tokens each", 1, 64, 73, 4),
    Shape("DeepSeek-V4: 2 latents of 584 bytes, of 128 tokens each", 1, 2, 73, 128),
    Shape("DeepSeek-V4.1: 64 latents of 528 bytes, of 2 tokens each", 1, 64, 66, 2),
    Shape("DeepSeek-V4.1: a ring of 8 slots of 4096 bytes", 1, 8, 512, 1, 1),
]

SIZES = [2**20, 2**24, 2**26, 2**28, 2**30]
"""Bytes read per measurement, after one block."""


def layer_of(shape: Shape, num_blocks: int, device: str) -> LayerView:
    """Return a layer of random KV. Factors are odd; their values do not matter here."""
    dims = (num_blocks, 1, shape.heads, shape.states, shape.pieces)
    blocks = torch.randint(-(2**62), 2**62, dims, device=device)
    factors = 2 * torch.arange(shape.heads, device=device) + 1
    factors *= -7046029254386353131  # the golden factor, as int64
    return LayerView(
        "",
        blocks,
        8,
        shape.pieces,
        factors,
        (1, 0),
        tokens_per_state=shape.tokens_per_state,
        unit_tokens=shape.unit_tokens,
    )


def seconds(run: Callable[[], Any], device: str, repeats: int) -> float:
    """Return the median of `repeats` runs after one to warm up."""
    run()
    times = []
    for _ in range(repeats):
        if device == "cpu":
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)


def paths(device: str) -> dict[str, Callable[..., None]]:
    """Return the paths that serve on `device`, the fast one first."""
    if device == "cpu":
        from vllm.distributed.kv_transfer.kv_checksum.worker.kernels import numba_kernel

        return {"numba": numba_kernel.prepare, "torch": torch_reference.prepare}
    from vllm.distributed.kv_transfer.kv_checksum.worker.kernels import triton_kernel

    return {"triton": triton_kernel.prepare, "torch": torch_reference.prepare}


def other_checksums(data: Any) -> dict[str, Callable[[], Any]]:
    """Return byte checksums that others use, over host memory."""
    found: dict[str, Callable[[], Any]] = {
        "Adler-32 (zlib)": lambda: zlib.adler32(data),
        "CRC-32 (zlib)": lambda: zlib.crc32(data),
    }
    try:
        import xxhash
    except ImportError:
        pass
    else:
        found["xxh3-64 (xxhash)"] = lambda: xxhash.xxh3_64_intdigest(data)
    return found


def measure(
    shape: Shape, size: int, device: str, repeats: int, shuffle: bool
) -> dict[str, Any]:
    """Return the achieved GB/s of every path for about `size` bytes in whole blocks."""
    number = size // shape.block_bytes
    layer = layer_of(shape, number, device)
    ids = torch.randperm(number) if shuffle else torch.arange(number)
    # A row is a unit, and a block's units are read one after the other.
    per_block = layer.units_per_block
    units = (ids[:, None] * per_block + torch.arange(per_block)).flatten()
    size_of_unit = shape.block_tokens // per_block
    first = torch.arange(len(units)) * size_of_unit
    valid = torch.full((len(units),), size_of_unit)
    rows = torch.stack([units, first, valid]).to(device)
    num_bytes = number * shape.block_bytes
    runs: dict[str, Callable[[], Any]] = {}
    sums = {}
    for name, prepare in paths(device).items():
        out = torch.zeros(len(units), dtype=torch.int64, device=device)
        sum_rows = prepare([layer])
        sum_rows(rows, out)
        sums[name] = out.clone()
        runs[name] = lambda f=sum_rows, o=out: f(rows, o)  # type: ignore[misc]
    fast, *others = sums
    for name in others:
        if not torch.equal(sums[fast], sums[name]):
            raise SystemExit(f"{fast} and {name} disagree for {shape.name}")
    plain = layer.blocks.view(-1)
    target = torch.empty_like(plain)
    runs["copy"] = lambda: target.copy_(plain)
    runs["read"] = lambda: plain.sum()
    if device == "cpu":
        runs |= other_checksums(plain.numpy().view("uint8"))
    rates = {
        name: num_bytes / seconds(run, device, repeats) / 1e9
        for name, run in runs.items()
    }
    return {
        "shape": shape.name,
        "blocks": number,
        "bytes": num_bytes,
        "GB/s": rates,
        "of read": rates[fast] / rates["read"],
    }


def machine(device: str) -> str:
    if device != "cpu":
        return torch.cuda.get_device_name()
    return f"{platform.machine()}, {torch.get_num_threads()} thread(s)"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--max-bytes", type=int, default=SIZES[-1], metavar="N")
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on the CPU")
    parser.add_argument("--shuffle", action="store_true", help="blocks in random order")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object at the end"
    )
    args = parser.parse_args()
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU; use --device cpu")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    results = []
    print(f"{machine(device)}, GB/s; the last column: the first one per plain read")
    for shape in SHAPES:
        print(f"\n{shape.name}")
        sizes = [s for s in SIZES if shape.block_bytes < s <= args.max_bytes]
        sizes.insert(0, shape.block_bytes)
        for row, size in enumerate(sizes):
            found = measure(shape, size, device, args.repeats, args.shuffle)
            results.append(found)
            if row == 0:
                print(f"{'bytes':>12}", *(f"{n:>17}" for n in found["GB/s"]))
            rates = (f"{rate:>17.2f}" for rate in found["GB/s"].values())
            print(f"{found['bytes']:>12}", *rates, f"{found['of read']:>8.0%}")
    if args.json:
        print(json.dumps({"machine": machine(device), "results": results}))


if __name__ == "__main__":
    main()
