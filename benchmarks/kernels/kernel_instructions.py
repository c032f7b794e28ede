# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Count the kernel's instructions per 8 bytes, beside what GPUs can issue meanwhile.

The GPUs need not be here. Every kind of view that the families' caches have (`rig/model_families`) is compiled for
each target; Triton needs no device for that. Counted is what a program runs from its
beginning to its end, per 8 bytes that it sums, as instructions of one lane:

- on NVIDIA's: all instructions, and those of the pipe that is used more, of ALU and FMA.
  An integer multiplication with a 64-bit result, or a 64-bit addition, counts twice.
- on AMD's: the cycles of the vector ALU. An integer multiplication counts four times.

A device's budget is how many it can issue while its memory delivers 8 bytes.

Without options, makes everything anew (some minutes) and writes it to
`benchmarks/results/kernel_instructions.json`; `benchmarks/evidence.py` puts the table
into the document. Run it without TRITON_INTERPRET and with PYTHONPATH=`PATHS`.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "kernel_instructions.json"
PATHS = ("tests", "tests/v1/kv_connector/unit")
sys.path[:0] = [str(ROOT / path) for path in PATHS]


@dataclass(frozen=True)
class Device:
    """What a device can issue, from its maker's data sheet.

    Attributes:
        target: what Triton compiles for.
        units: streaming multiprocessors, or compute units.
        issued: lanes' instructions that a unit issues in a cycle.
        piped: of them, those that one pipe takes.
        ghz: the highest clock.
        terabytes: of memory bandwidth, per second.

    """

    target: str
    units: int
    issued: int
    piped: int
    ghz: float
    terabytes: float

    def budget(self, per_cycle: int) -> float:
        """Return lanes' instructions per 8 bytes at full memory speed."""
        return self.units * per_cycle * self.ghz / (1e3 * self.terabytes / 8)


DEVICES = {
    "A100 SXM 80 GB": Device("sm_80", 108, 128, 64, 1.41, 2.039),
    "H100 SXM": Device("sm_90", 132, 128, 64, 1.98, 3.35),
    "H200 SXM": Device("sm_90", 132, 128, 64, 1.98, 4.8),
    "B200": Device("sm_100", 148, 128, 64, 1.965, 8.0),
    "MI300X": Device("gfx942", 304, 64, 64, 2.1, 5.3),
}


TARGETS = tuple(dict.fromkeys(device.target for device in DEVICES.values()))


@dataclass(frozen=True)
class Geometry:
    """All of a view that decides how it is compiled, without its memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    piece_bytes: int
    pieces: int
    first_piece: int
    tokens_per_state: str
    unit_tokens: int | None

    @classmethod
    def of(cls, layer: Any, ring: bool) -> Geometry:
        """Return a view's, of two blocks one after the other."""
        _, ratio, heads, states, pieces = layer.blocks.shape
        shape = (2, ratio, heads, states, pieces)
        return cls(
            shape,
            # An axis of one place has no stride that matters.
            tuple(
                0 if size == 1 else stride
                for size, stride in zip(shape, layer.blocks.stride(), strict=True)
            ),
            layer.piece_bytes,
            layer.pieces,
            layer.first_piece,
            str(layer.tokens_per_state),
            1 if ring else layer.unit_tokens,
        )

    def layer(self) -> Any:
        """Return a view like that."""
        import torch

        from vllm.distributed.kv_transfer.kv_checksum.worker.views import LayerView

        dtype = {8: torch.int64, 4: torch.int32, 2: torch.int16}[self.piece_bytes]
        return LayerView(
            "",
            torch.empty_strided(self.shape, self.strides, dtype=dtype),
            self.piece_bytes,
            self.pieces,
            torch.zeros(self.shape[2], dtype=torch.int64),
            (1, 0),
            self.first_piece,
            Fraction(self.tokens_per_state),
            self.unit_tokens,
        )

    @property
    def bytes(self) -> int:
        """Return the bytes of a block that it reads."""
        return math.prod(self.shape[1:]) * self.piece_bytes

    @property
    def name(self) -> str:
        """Describe the view in words."""
        _, _, heads, states, pieces = self.shape
        of = "" if pieces == self.pieces else f" of {self.pieces}"
        tokens = f"{states} tokens"
        if self.tokens_per_state != "1":
            tokens = f"{states} states of {self.tokens_per_state} tokens"
        if states == 1:
            tokens = "state rows"
        elif self.unit_tokens == 1:
            tokens = f"ring of {states} slots"
        plural = "head" if states > 1 else "row"
        heads_ = f"{heads} {plural}{'s' * (heads > 1)}, " if heads > 1 else ""
        return f"{heads_}{tokens}, {pieces}{of} pieces of {self.piece_bytes} bytes"


@dataclass
class Kind:
    """One kind of view: all views that one variant of the kernel sums.

    Attributes:
        counts: by target, what `count` returns.

    """

    geometry: Geometry
    counts: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass
class Cache:
    """The cache of one kind of layer.

    Attributes:
        kinds: the numbers of the kinds of views that read it.
        families: whose layers have it.
        backends: the classes of these layers' backends.

    """

    kinds: list[int]
    families: list[str] = field(default_factory=list)
    backends: list[str] = field(default_factory=list)


def variant(geometry: Geometry) -> tuple[tuple[str, Any], ...]:
    """Return what a variant of the kernel is compiled for, beside the blocks' places.

    Where blocks and kernel blocks lie changes an address, and no more.
    """
    from vllm.distributed.kv_transfer.kv_checksum.worker.kernels import triton_kernel

    _, constants = triton_kernel.kernel_and_constants(geometry.layer())
    where = {"STRIDE_B", "STRIDE_K", "STRIDE_U", "ALIGNMENT", "UNITS", "INNER"}
    if constants["HEADS"] == 1:
        where.add("STRIDE_H")
    return tuple((k, v) for k, v in constants.items() if k not in where)


def caches() -> tuple[list[Kind], list[Cache]]:
    """Return every kind of view of the families' caches, and every kind of cache."""
    from kv_checksum.rig.model_families.plans import plans

    kinds: dict[Any, Kind] = {}
    found: dict[tuple[int, ...], Cache] = {}
    for family, plan in plans().items():
        for group in plan.worker(plan.allocate()).groups.values():
            views: dict[str, list[int]] = {}
            for layer in group.layers:
                geometry = Geometry.of(layer, group.ring is not None)
                key = variant(geometry)
                kinds.setdefault(key, Kind(geometry))
                views.setdefault(layer.name, []).append(list(kinds).index(key))
            for name, numbers in views.items():
                cache = found.setdefault(tuple(numbers), Cache(numbers))
                for names, one in (
                    (cache.families, family),
                    (cache.backends, plan.backends[name]),
                ):
                    if one not in names:
                        names.append(one)
    return list(kinds.values()), list(found.values())


# ---- counting


def _loaded(lines: Iterable[str]) -> int:
    """Return the bytes that a lane loads from memory in these instructions."""
    total = 0
    for line in lines:
        if nvidia := re.search(r"\bLDG\.E(\.\S*)?", line):
            width = re.search(r"\.(128|64|U16|S16|U8|S8)\b", nvidia[0])
            sizes = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
            total += sizes[width[1]] if width else 4
        elif amd := re.search(r"\b(?:global|buffer|flat)_load_(\w+)", line):
            sizes = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}
            total += sizes.get(amd[1], 2)
    return total


def amd_instructions(text: str) -> tuple[list[str], list[list[str]]]:
    """Return all instructions of AMD's assembly, and those of every loop.

    Blocks of one loop may stand in any order, so jumps back that overlap are one loop.
    """
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label[1]] = len(lines)
        elif found := re.match(r"\s+((?:s|v|global|buffer|flat|ds)_\S.*)", line):
            lines.append(found[1])
        if "s_endpgm" in line:
            break
    loops: list[tuple[int, int]] = []
    for at, line in enumerate(lines):
        jump = re.match(r"s_c?branch\w*\s+(\.LBB\w+)", line)
        if jump and labels.get(jump[1], len(lines)) <= at:
            begin = labels[jump[1]]
            while loops and begin < loops[-1][1]:
                begin = min(begin, loops.pop()[0])
            loops.append((begin, at + 1))
    return lines, [lines[begin:end] for begin, end in loops]


def held(constants: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes that a program sums, and those that its tiles have."""
    c = constants
    if "ROWS" in c:
        tile = c["LOADS"] * c["SPAN"]
        steps = -(-c["RUN_TOKENS"] * c["PIECES"] // tile)
        loads = c["TOKENS"] // c["RUN_TOKENS"] * steps * tile * c["ROWS"]
        pieces = c["ROWS"] * c["TOKENS"] * c["PIECES"]
    else:
        heads = min(c["HEADS_PER_PROGRAM"], c["HEADS"])
        pieces = heads * min(
            c["SPANS_PER_PROGRAM"] * c["SPAN"], c["TOKENS"] * c["PIECES"]
        )
        tiles = -(-heads // c["TILE_HEADS"]) * c["SPANS_PER_PROGRAM"]
        loads = tiles * c["SPAN"] * c["TILE_HEADS"]
    size = c["PIECE_BITS"] // 8
    return pieces * size, loads * size


_SETUP = {0, *(20 * rows + shared for rows in (1, 2, 4, 8) for shared in (0, 16))}
"""Bytes that a lane loads beside pieces: three numbers of each of its rows, an address, a
factor; without the last two or any of them where they are loaded once for all lanes."""


def executed(
    lines: list[str], loops: list[list[str]], tiles: float
) -> list[tuple[list[str], float]]:
    """Return parts of a program, and how often a lane runs each.

    The loop over tiles runs until all of `tiles`, in bytes per lane, are loaded.

    Raises:
        ValueError: what is loaded does not add up.

    """
    bodies = [body for body in loops if _loaded(body)]
    if not bodies:
        # A lane that loads less than a piece shares it with others.
        if tiles >= 8 and _loaded(lines) - tiles not in _SETUP:
            raise ValueError(f"{_loaded(lines)} bytes for tiles of {tiles}")
        return [(lines, 1.0)]
    (body,) = bodies
    times, rest = divmod(tiles, _loaded(body))
    if rest or _loaded(lines) - _loaded(body) not in _SETUP:
        raise ValueError(f"{_loaded(lines)} bytes, {_loaded(body)} of them in a loop")
    at = next(k for k in range(len(lines)) if lines[k : k + len(body)] == body)
    return [(lines[:at] + lines[at + len(body) :], 1.0), (body, times)]


def nvidia_cost(line: str) -> tuple[str, int]:
    """Return the pipe of an instruction, and how often it counts there."""
    name = re.sub(r"^@!?U?P\w+\s+", "", line).split()[0]
    if name.startswith(("IMAD", "IMUL", "FFMA", "FMUL", "FADD", "HFMA2", "HADD2")):
        return "FMA", 2 if re.search(r"\.(WIDE|HI)\b", name) else 1
    alu = (
        "IADD LOP LEA SHF SHL SHR ISETP SEL PRMT MOV PLOP IMNMX VIADD VIMNMX IABS "
        "FMNMX FSETP FSEL SGXT BMSK"
    )
    if name.startswith(tuple(alu.split())):
        return "ALU", 2 if ".64" in name else 1
    return "other", 1


def amd_cost(line: str) -> int:
    """Return the cycles of the vector ALU that an instruction takes, in fourths."""
    name = line.split()[0]
    if not name.startswith("v_"):
        return 0
    return 4 if re.match(r"v_(mul_lo|mul_hi|mad_[ui]64)", name) else 1


def count(geometry: Geometry, target: str) -> dict[str, float]:
    """Compile a kind of view for a target, and count per 8 bytes."""
    from kv_checksum.rig import compiled

    from vllm.distributed.kv_transfer.kv_checksum.worker.kernels import triton_kernel

    layer = geometry.layer()
    made = compiled.compiled(layer, compiled.TARGETS[target])
    _, constants = triton_kernel.kernel_and_constants(layer)
    counted, tiles = held(constants)
    found: dict[str, float] = {}
    if target.startswith("sm_"):
        lanes = 32
        lines, loops = compiled.instructions(made.asm["cubin"])
        lines = _until_the_end(lines)
        for part, times in executed(lines, loops, tiles / lanes):
            for line in part:
                pipe, n = nvidia_cost(line)
                found[pipe] = found.get(pipe, 0) + n * times
                found["all"] = found.get("all", 0) + times
    else:
        lanes = 64
        lines, loops = amd_instructions(made.asm["amdgcn"])
        for part, times in executed(lines, loops, tiles / lanes):
            found["ALU"] = found.get("ALU", 0) + times * sum(map(amd_cost, part))
            found["all"] = found.get("all", 0) + times * len(part)
    per = lanes / (counted / 8)
    return {name: round(per * value, 1) for name, value in sorted(found.items())}


def _until_the_end(lines: list[str]) -> list[str]:
    """Leave out what stands behind the last exit, and what does nothing."""
    last = max(k for k, line in enumerate(lines) if re.search(r"\bEXIT\b", line))
    return [line for line in lines[: last + 1] if not line.startswith("NOP")]


# ---- the table


@dataclass
class Result:
    """What `main` measured."""

    triton: str
    kinds: list[Kind]
    caches: list[Cache]

    @classmethod
    def read(cls, file: Path = RESULT) -> Result:
        """Read what was written."""
        return cls.of(json.loads(file.read_text()))

    @classmethod
    def of(cls, content: dict[str, Any]) -> Result:
        """Return what JSON holds."""
        kinds = []
        for row in content["kinds"]:
            axes = {name: tuple(row["geometry"][name]) for name in ("shape", "strides")}
            geometry = Geometry(**{**row["geometry"], **axes})
            kinds.append(Kind(geometry, row["counts"]))
        found = [Cache(**row) for row in content["caches"]]
        return cls(content["triton"], kinds, found)

    def write(self, file: Path = RESULT) -> None:
        """Write JSON of one line per entry."""
        parts = [f'"triton": {json.dumps(self.triton)}']
        for name, rows in (("kinds", self.kinds), ("caches", self.caches)):
            text = ",\n".join(json.dumps(asdict(row)) for row in rows)
            parts.append(f'"{name}": [\n{text}\n]')
        file.write_text("{\n" + ",\n".join(parts) + "\n}\n")

    def needed(self, cache: Cache, target: str) -> tuple[float, float]:
        """Return all instructions, and those of the pipe that is used more.

        Of a cache that several views read, these are means over its bytes.
        """
        kinds = [self.kinds[number] for number in cache.kinds]
        sizes = [kind.geometry.bytes for kind in kinds]
        every, alu, fma = (
            sum(
                size * kind.counts[target].get(name, 0)
                for kind, size in zip(kinds, sizes, strict=True)
            )
            / sum(sizes)
            for name in ("all", "ALU", "FMA")
        )
        return every, max(alu, fma)

    def share(self, cache: Cache, device: Device) -> float:
        """Return the share of a device's budget that is needed, of the tighter bound."""
        every, piped = self.needed(cache, device.target)
        share = piped / device.budget(device.piped)
        if device.target == "gfx942":  # scalar instructions are issued beside
            return share
        return max(share, every / device.budget(device.issued))

    def name(self, cache: Cache) -> str:
        """Describe a cache in words."""
        kinds = [self.kinds[number] for number in cache.kinds]
        return "; ".join(kind.geometry.name for kind in kinds)


def tables(result: Result) -> str:
    """Return the table of devices, and that of caches, as Markdown."""
    lines = [
        "| device | compiled for | units | lanes issued per cycle, of one pipe | GHz "
        "| TB/s | budget per 8 bytes: issued | of one pipe |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, d in DEVICES.items():
        lines.append(
            f"| {name} | {d.target} | {d.units} | {d.issued}, {d.piped} | {d.ghz:g} "
            f"| {d.terabytes:g} | {d.budget(d.issued):.1f} | {d.budget(d.piped):.1f} |"
        )
    head = ["cache: views", "of", *TARGETS, *DEVICES]
    lines += ["", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for cache in result.caches:
        more = ", ..." if len(cache.families) > 2 else ""
        of = f"`{cache.backends[0]}` ({', '.join(cache.families[:2])}{more})"
        cells = [result.name(cache), of]
        for target in TARGETS:
            every, piped = result.needed(cache, target)
            told = f"{every:.1f}, {piped:.1f}"
            cells.append(f"{piped:.1f}" if target == "gfx942" else told)
        cells += [f"{result.share(cache, device):.0%}" for device in DEVICES.values()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Compile everything, and write the result."""
    import triton

    kinds, found = caches()
    for number, kind in enumerate(kinds, 1):
        kind.counts = {target: count(kind.geometry, target) for target in TARGETS}
        told = f"{number} of {len(kinds)}: {kind.geometry.name}: {kind.counts}"
        print(told, flush=True)
    Result(triton.__version__, kinds, found).write()


if __name__ == "__main__":
    main()
