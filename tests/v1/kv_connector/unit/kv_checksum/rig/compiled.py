# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compile the kernel for GPUs that are not here, and report on the machine code.

Run as a program, without Triton's interpreter: prints JSON. Triton compiles for
any target without a device, and its wheel brings NVIDIA's disassembler.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from vllm.distributed.kv_transfer.kv_checksum.worker.kernels import triton_kernel
from vllm.distributed.kv_transfer.kv_checksum.worker.views import LayerView

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

# [kernel blocks, heads, tokens, 8-byte pieces per token]: bf16 head size 128, MLA.
SHAPES = {
    "GQA, 8 heads, 16 tokens": (1, 8, 16, 64),
    "GQA, 8 heads, 16 tokens, token-major": (1, 8, 16, 64),
    "GQA, 1 head, 16 tokens": (1, 1, 16, 64),
    "GQA, 8 heads, 64 tokens": (1, 8, 64, 64),
    "MLA, 64 tokens": (1, 1, 64, 144),
    "latents of 2 tokens, 64 states": (1, 1, 64, 66),
    "keys of 4 tokens, 64 states": (1, 1, 64, 32),
    "ring, slots of 512 pieces": (1, 1, 8, 512),
}
ON_ONE_TARGET = {
    "window's latents without scales, 64 tokens": (1, 1, 64, 72),
    "latents of 4 tokens without scales, 64 states": (1, 1, 64, 72),
    "latents of 128 tokens without scales, 2 states": (1, 1, 2, 72),
}
"""Shapes that take no other path than those above, compiled for sm_90 alone."""

STATES = {
    "latents of 2 tokens, 64 states": 2,
    "latents of 4 tokens without scales, 64 states": 4,
    "latents of 128 tokens without scales, 2 states": 128,
    "keys of 4 tokens, 64 states": 4,
}
"""Tokens per state, where it is not one."""

RINGS = {"ring, slots of 512 pieces"}

WIDTHS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def layer_of(
    shape, *, token_major=False, piece_bytes=8, num_blocks=4, scales=0, **more
):
    """Return a layer of zeros; each token has `scales` more pieces elsewhere."""
    ratio, heads, tokens, pieces = shape
    all_pieces = pieces + scales
    dims = (num_blocks, ratio, heads, tokens, pieces)
    blocks = torch.zeros(dims, dtype=WIDTHS[piece_bytes])
    if token_major:
        blocks = blocks.transpose(2, 3).contiguous().transpose(2, 3)
    factors = torch.zeros(heads).long()
    return LayerView("", blocks, piece_bytes, all_pieces, factors, (1, 0), **more)


def compiled(layer: LayerView, target: GPUTarget):
    fn, constants = triton_kernel.kernel_and_constants(layer)
    types = {
        "addresses": "*i64",
        "rows": "*i64",
        "rows_stride": "i32",
        "row_stride": "i32",
        "num_rows": "i32",
        "factors": "*i64",
        "out": "*i64",
        "out_stride": "i32",
    }
    signature = {name: types.get(name, "constexpr") for name in fn.arg_names}
    options = {
        "num_warps": triton_kernel._NUM_WARPS,
        "num_stages": triton_kernel._NUM_STAGES,
    }
    source = ASTSource(fn, signature, constants)
    return triton.compile(source, target=target, options=options)


def instructions(cubin: bytes) -> tuple[list[str], list[list[str]]]:
    """Return all instructions, and those of every loop."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            lines.append(found[1])
    loops = []
    for at, line in enumerate(lines):
        jump = re.search(r"BRA.*\((\.L_x_\d+)\)", line)
        if jump and labels.get(jump[1], len(lines)) < at:
            loops.append(lines[labels[jump[1]] : at + 1])
    return lines, loops


def executed(lines, bodies, constants) -> float:
    """Return how many instructions a program runs that takes several units.

    Every load of a tile is in the innermost loop, or was moved before it.
    """
    runs = constants["TOKENS"] / constants["RUN_TOKENS"]
    tile = constants["LOADS"] * constants["SPAN"]
    steps = -(-constants["RUN_TOKENS"] * constants["PIECES"] // tile)
    bits = tile * constants["ROWS"] * constants["PIECE_BITS"]
    loads = runs * steps * bits / (32 * 128)
    if len(bodies) > 1:
        raise ValueError("loops in loops, whose instructions nobody counts")
    wide = [sum("LDG.E.128" in line for line in part) for part in (lines, *bodies)]
    if not bodies:
        return len(lines)
    once = len(lines) - len(bodies[0])
    return once + (loads - wide[0] + wide[1]) / wide[1] * len(bodies[0])


def nvidia_report(layer: LayerView, target: GPUTarget) -> dict[str, float]:
    """Count per 8-byte piece of the loop over tiles; where the compiler unrolled
    it whole, of the whole program, which is more. Of a program that takes several
    units, count all that it does, per piece that these hold."""
    lines, loops = instructions(compiled(layer, target).asm["cubin"])
    loads = "LDG.E.128"
    bodies = [body for body in loops if any(loads in line for line in body)]
    body = min(bodies, key=len) if bodies else lines
    wide = sum(loads in line for line in body)
    per_piece = len(body) / max(1, 2 * wide)
    _, constants = triton_kernel.kernel_and_constants(layer)
    if "ROWS" in constants:
        held = constants["ROWS"] * constants["TOKENS"] * constants["PIECES"]
        per_piece = executed(lines, bodies, constants) / (held / 32)
    return {
        "spills": sum(bool(re.search(r"\b(STL|LDL)\b", line)) for line in lines),
        "wide_loads": wide,
        "narrow_loads": sum("LDG" in line and loads not in line for line in body),
        "unrolled": not bodies,
        "per_piece": per_piece,
    }


def amd_report(layer: LayerView, target: GPUTarget) -> dict[str, float]:
    """Count loads of 16 bytes, and of 8, of which 64 lanes load as much as 32 do."""
    text = compiled(layer, target).asm["amdgcn"]
    return {
        "spills": sum(map(int, re.findall(r"[vs]gpr_spill_count: +(\d+)", text))),
        "wide_loads": len(re.findall(r"load_dwordx[24]", text)),
    }


def variants() -> dict[str, int]:
    """Return the compiled variants that launches over many layers and rows need."""
    backend = make_backend(TARGETS["sm_90"])
    keys: set[str] = set()

    def recorder(fn):
        binder = create_function_from_signature(fn.signature, fn.params, backend)

        def launch(*args, **kwargs):
            _, specialization, options = binder(*args, **kwargs)
            keys.add(f"{fn.__name__} {specialization} {options}")

        return type("Recorder", (), {"__getitem__": lambda self, grid: launch})()

    def many(layers: list[LayerView]) -> int:
        keys.clear()
        for number in range(1, len(layers) + 1):
            sum_rows = triton_kernel.prepare(layers[:number])
            for rows in (1, 2, 7, 16, 33):
                table = torch.zeros((3, rows + number), dtype=torch.int64)
                out = torch.zeros((rows, 1 + number % 3), dtype=torch.int64)
                sum_rows(table[:, number:], out[:, number % 3])
        return len(keys)

    names = ("_layer_checksum_kernel", "_small_units_kernel")
    kernels = {name: getattr(triton_kernel, name) for name in names}
    for name, fn in kernels.items():
        setattr(triton_kernel, name, recorder(fn))
    one = (1, 8, 16, 64)
    result = {
        "one shape": many([layer_of(one) for _ in range(6)]),
        "small units": many([layer_of((1, 1, 16, 32)) for _ in range(6)]),
        "two shapes": many([layer_of(one), layer_of((1, 1, 64, 144))]),
    }
    for name, fn in kernels.items():
        setattr(triton_kernel, name, fn)
    return result


def reports() -> Iterator[SimpleNamespace]:
    for name, shape in (SHAPES | ON_ONE_TARGET).items():
        layer = layer_of(
            shape,
            token_major="token-major" in name,
            scales="without scales" in name,
            tokens_per_state=STATES.get(name, 1),
            unit_tokens=1 if name in RINGS else None,
        )
        for target_name, target in TARGETS.items():
            if name in ON_ONE_TARGET and target_name != "sm_90":
                continue
            make = nvidia_report if target.backend == "cuda" else amd_report
            found = make(layer, target)
            yield SimpleNamespace(shape=name, target=target_name, **found)


if __name__ == "__main__":
    narrow = [
        amd_report(layer_of((1, 2, 16, 33), piece_bytes=width), TARGETS["gfx942"])
        | nvidia_report(layer_of((1, 2, 16, 33), piece_bytes=width), TARGETS["sm_90"])
        for width in (4, 2)
    ]
    print(
        json.dumps(
            {
                "kernels": [vars(r) for r in reports()],
                "narrow": narrow,
                "variants": variants(),
            }
        )
    )
