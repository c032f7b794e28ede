# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Measure the checksum kernel on a CUDA card, against a plain read of the same bytes.

Correctness comes first: sums that differ from the PyTorch reference's end it with
status 1. Then rates, as a share of a plain read in the same run; variants of the kernel,
which tell the best sizes of tiles and what bounds it; and what a step of the worker
costs. Writes JSON, a table and, with matplotlib, an SVG. Needs torch and Triton alone,
no network. Without a card it says so and ends with status 77.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from bare_worker import bare_worker
from benchmark_kv_checksum import Shape, layer_of, machine, seconds
from kernel_variants import (
    DEFINITION_1,
    PROBES,
    TILINGS,
    TODAY,
    copier,
    reader,
    tiling,
    variant,
)

from vllm.distributed.kv_transfer.kv_checksum.checksum import (
    KVChecksumBlocks,
    KVChecksumScheduled,
)
from vllm.distributed.kv_transfer.kv_checksum.worker.kernels import (
    torch_reference,
    triton_kernel,
)
from vllm.distributed.kv_transfer.kv_checksum.worker.views import LayerView

NO_CARD = 77
GOAL, LARGE = 0.85, 64 * 10**6
"""The share of a plain read that is wanted, and from how many bytes on."""


@dataclass(frozen=True)
class Case:
    """A kind of cache.

    Attributes:
        shape: one layer's block.
        token_major: whether a token's heads lie side by side.
        tokens: how many tokens of a block count; None for all.

    """

    shape: Shape
    token_major: bool = False
    tokens: int | None = None

    @property
    def name(self) -> str:
        return self.shape.name


_GQA = Shape("GQA, head-major", 8, 16, 64)
PUBLISHED = Case(replace(_GQA, name="2048 x 8 x 16 x 128, K and V, bf16"))
CASES = [
    Case(_GQA),
    Case(replace(_GQA, name="GQA, token-major"), token_major=True),
    Case(replace(_GQA, name="GQA, half of every block"), tokens=8),
    Case(Shape("MLA, 576, bf16", 1, 64, 72 * 2)),
    Case(Shape("Mamba-2, 128 rows of 64 x 128, fp32", 128, 1, 4096)),
    Case(Shape("rows of 1 MiB", 1, 1, 2**17)),
]
ROWS_OF_1_MB = CASES[-1]
SIZES = [2**20, 2**22, 2**24, 2**26, 2**28, 2**30, 2**33]


class Prepared:
    """A case of some number of blocks on a device, all in random order."""

    def __init__(self, case: Case, number: int, device: str) -> None:
        layer = layer_of(case.shape, number, device)
        if case.token_major:
            blocks = layer.blocks.transpose(2, 3).contiguous().transpose(2, 3)
            layer = replace(layer, blocks=blocks)
        self.layer: LayerView = layer
        per_block = layer.units_per_block
        units = torch.randperm(number)[:, None] * per_block + torch.arange(per_block)
        tokens = case.shape.block_tokens // per_block
        counted = torch.full((units.numel(),), min(case.tokens or tokens, tokens))
        first = torch.arange(units.numel()) * tokens
        self.rows = torch.stack([units.flatten(), first, counted]).to(device)
        self.out = torch.zeros(units.numel(), dtype=torch.int64, device=device)
        self.bytes = number * case.shape.block_bytes
        self.counted_bytes = self.bytes * int(counted[0]) // tokens

    def summing(self, kernel: Any) -> Callable[[], None]:
        """Return what sums all rows by a kernel's module."""
        sum_rows = kernel.prepare([self.layer])
        return lambda: sum_rows(self.rows, self.out)

    def sums(self, kernel: Any) -> torch.Tensor:
        """Return the rows' sums by a kernel's module."""
        self.out.zero_()
        self.summing(kernel)()
        return self.out.cpu().clone()


def wrong_sums(device: str, kernels: dict[str, Any]) -> list[str]:
    """Return for which cases and kernels sums are not the reference's."""
    wrong = []
    for case in CASES:
        number = 2 if case.shape.block_bytes > 2**19 else 5
        made = Prepared(case, number, device)
        right = made.sums(torch_reference)
        wrong += [
            f"{case.name}, {name}"
            for name, kernel in kernels.items()
            if not torch.equal(made.sums(kernel), right)
        ]
    return wrong


def measured(
    case: Case, number: int, device: str, kernels: dict[str, Any], repeats: int
) -> dict[str, Any]:
    """Return the rates of kernels, of a plain read and of a copy, in GB/s."""
    made = Prepared(case, number, device)
    # A view of what a token-major layer holds would not be flat.
    words = made.layer.blocks.permute(0, 1, 3, 2, 4) if case.token_major else None
    words = (made.layer.blocks if words is None else words).reshape(-1)
    words = words[: made.counted_bytes // 8]
    copy = copier(words, torch.empty_like(words))
    took = {
        name: seconds(made.summing(kernel), device, repeats)
        for name, kernel in kernels.items()
    }
    took["read"] = seconds(reader(words), device, repeats)
    took["copy"] = seconds(copy, device, repeats)
    rates = {name: made.counted_bytes / t / 1e9 for name, t in took.items()}
    return {
        "shape": case.name,
        "blocks": number,
        "bytes": made.counted_bytes,
        "GB/s": rates,
        "ms": {name: t * 1e3 for name, t in took.items()},
        "of read": rates["triton"] / rates["read"],
    }


def sizes(case: Case, memory: int) -> list[int]:
    """Return numbers of blocks. A copy, and what PyTorch makes to draw KV, must fit."""
    fitting = [size for size in SIZES if 4 * size <= memory]
    return [max(1, size // case.shape.block_bytes) for size in fitting]


def worker_costs(device: str, blocks: int, layers: int, repeats: int) -> dict[str, Any]:
    """Return what a load costs the worker: launches, host time, the side stream."""
    made = [layer_of(_GQA, blocks, device) for _ in range(layers)]
    worker = bare_worker({0: (16, made)})
    ids = torch.randperm(blocks).numpy()
    asked = KVChecksumBlocks(16 * blocks, {0: (0, ids)})
    launches = 0
    call = triton_kernel._Launch.__call__

    def counted(launch: Any, *args: Any) -> None:
        nonlocal launches
        launches += 1
        call(launch, *args)

    host, whole = [], []
    with patch.object(triton_kernel._Launch, "__call__", counted):
        for _ in range(repeats + 1):
            launches = 0
            began = time.perf_counter()
            worker.bind(KVChecksumScheduled(reqs_to_recv={"r": asked}))
            output = worker.post_forward({"r"}, set(), set())
            host.append(time.perf_counter() - began)
            assert output is not None
            output.finalize()
            whole.append(time.perf_counter() - began)
    return {
        "blocks": blocks,
        "layers": layers,
        "launches": launches,
        "host us": statistics.median(host[1:]) * 1e6,
        "until the sums are on the host us": statistics.median(whole[1:]) * 1e6,
    }


def recommendation(variants: Sequence[dict[str, Any]]) -> str:
    """Return which sizes of tiles to take, of what was measured."""
    best = max(variants, key=lambda one: one["of read"])
    today = next(one for one in variants if tuple(one["tiling"]) == TODAY)
    tile, tiles, warps = best["tiling"]
    if best["of read"] < 1.02 * today["of read"]:
        return f"keep tiles of {TODAY[0]} pieces: nothing is faster by 2% or more"
    return (
        f"take tiles of {tile} pieces, {tile * tiles} per program, {warps} warps: "
        f"{best['of read']:.0%} of a plain read instead of {today['of read']:.0%}"
    )


def bound(share: float, probes: dict[str, float]) -> str:
    """Return what bounds the kernel, by the shares of what lacks it."""
    if share >= GOAL:
        return f"none: {share:.0%} of a plain read, {GOAL:.0%} are wanted"
    name = max(probes, key=lambda probe: probes[probe])
    if probes[name] < 1.05 * share:
        return f"none of {', '.join(probes)}: {share:.0%} of a plain read"
    return f"{name}: {probes[name]:.0%} of a plain read without, {share:.0%} with"


def table(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    lines = [f"# {report['machine']}", "", "Correct: every case and variant.", ""]
    lines += ["| case | MB | ms | GB/s | definition 1 | copy | plain read | share |"]
    lines += ["|---|" + "---:|" * 7]
    for row in report["results"]:
        rate = row["GB/s"]
        lines.append(
            f"| {row['shape']} | {row['bytes'] / 1e6:.1f} | {row['ms']['triton']:.4f} | "
            f"{rate['triton']:.0f} | {rate['definition 1']:.0f} | {rate['copy']:.0f} | "
            f"{rate['read']:.0f} | {row['of read']:.0%} |"
        )
    lines += ["", "| pieces per tile, tiles, warps | case | share |", "|---|---|---:|"]
    for one in report["variants"]:
        sizes_ = ", ".join(map(str, one["tiling"]))
        lines.append(f"| {sizes_} | {one['shape']} | {one['of read']:.0%} |")
    for name, text in report["recommendations"].items():
        lines += ["", f"Sizes for {name}: {text}."]
    for name, text in report["bounds"].items():
        lines += ["", f"What bounds {name}: {text}."]
    for cost in report["worker"]:
        lines += ["", "A load: " + ", ".join(f"{k} {v:g}" for k, v in cost.items())]
    lines += ["", f"The request published {report['published']}."]
    if report["left out"]:
        lines += ["", f"Left out, for lack of time: {', '.join(report['left out'])}."]
    return "\n".join(lines) + "\n"


def run(
    device: str, memory: int, minutes: float, repeats: int, cases: Sequence[Case]
) -> dict[str, Any]:
    """Measure all; what does not fit into the time is left out, and named.

    Raises:
        SystemExit: sums are wrong.

    """
    end = time.monotonic() + 60 * minutes
    first = variant(DEFINITION_1)
    tiled = {sizes_: variant(tiling(*sizes_)) for sizes_ in TILINGS}
    named = {f"tiling {name}": kernel for name, kernel in tiled.items()}
    wrong = wrong_sums(device, {"triton": triton_kernel, **named})
    if wrong:
        raise SystemExit(f"WRONG SUMS: {'; '.join(wrong)}")
    print("sums are those of the reference", flush=True)
    report: dict[str, Any] = {
        "machine": machine(device),
        "results": [],
        "variants": [],
        "recommendations": {},
        "bounds": {},
        "worker": [],
        "published": "0.039 ms for 2048 x 8 x 16 x 128 and 0.38 ms for rows of 1 MB",
        "left out": [],
    }
    kernels = {"triton": triton_kernel, "definition 1": first}
    large = min(2**27, memory // 4)

    def compare(case: Case) -> None:
        number = max(1, large // case.shape.block_bytes)
        found = measured(case, number, device, kernels, repeats)
        report["results"].append(found)
        tried = []
        for sizes_, kernel in tiled.items():
            one = measured(case, number, device, {"triton": kernel}, repeats)
            tried.append({**one, "tiling": sizes_})
        report["variants"] += tried
        report["recommendations"][case.name] = recommendation(tried)
        probes = {
            name: measured(case, number, device, {"triton": variant(it)}, repeats)
            for name, it in PROBES.items()
        }
        shares = {name: one["of read"] for name, one in probes.items()}
        report["bounds"][case.name] = bound(found["of read"], shares)

    def ladder(case: Case) -> None:
        for number in sizes(case, memory):
            if time.monotonic() > end:
                report["left out"].append(f"{case.name}, {number} blocks")
                continue
            found = measured(case, number, device, kernels, repeats)
            report["results"].append(found)

    def steps(_: Case) -> None:
        for blocks, layers in ((64, 2), (2048, 2), (64, 32)):
            if 4 * blocks * layers * _GQA.block_bytes <= memory:
                cost = worker_costs(device, blocks, layers, repeats)
                report["worker"].append(cost)

    # What was asked for by name comes first, what takes longest last.
    work = [(compare, PUBLISHED), (compare, ROWS_OF_1_MB), (steps, PUBLISHED)]
    work += [(ladder, case) for case in cases]
    for measure, case in work:
        if time.monotonic() > end:
            report["left out"].append(case.name)
            continue
        measure(case)
        print(f"{case.name}: done", flush=True)
    return report


def write(report: dict[str, Any], folder: Path) -> None:
    """Write the report as JSON, as a table and, with matplotlib, as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "report.md").write_text(table(report))
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import plots

    large = {**report, "results": [r for r in report["results"] if r["bytes"] > 2**25]}
    try:
        plots.draw(large, folder / "report.svg")
    except ImportError:
        print(f"no SVG: {plots.NEEDS}; then draw report.json with plots.py")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the report; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=7, help="for measurements")
    parser.add_argument("--repeats", type=int, default=20, metavar="N")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), metavar="DIR")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu-report: NOT RUN: torch sees no CUDA card", file=sys.stderr)
        return NO_CARD
    torch.manual_seed(0)
    memory, _ = torch.cuda.mem_get_info()
    report = run("cuda", memory, args.minutes, args.repeats, CASES)
    write(report, args.out)
    print(table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
