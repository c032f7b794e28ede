# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Count how often evenly spaced damage escapes, for four checks side by side.

Weights of evenly spaced places are evenly spaced, too, so changes of equal size and
fitting signs cancel in a weighted sum, and only the checksum's last fold tells them
apart. KV of few values has many such changes. Pieces of one slice, layers, heads and
grids of layers and heads are damaged by flips, rotation and reversal. Two definitions
of the checksum, Adler-32 and CRC-32 of the block see the same sets. Exits with 1 if
definition 2 misses any.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from spacing.checks import NAMES, crc_tables
from spacing.sets import (
    DAMAGE,
    FLIP,
    KV,
    PLACES,
    ZEROS,
    Places,
    count_missed,
    empty_set,
    kinds_of_kv,
)

DEFINITIONS = (1, 2)
"""Definitions of the checksum under the first two of `NAMES`."""

BATCH = 50_000
PROGRESS_S = 10.0


@dataclass(frozen=True, eq=False)
class Cell:
    """One kind of place, damage and KV; `number` says what it draws."""

    number: int
    place: Places
    damage: int
    kv: KV

    @property
    def names(self) -> dict[str, str]:
        """Return the cell's names in tables and in JSON."""
        damage = DAMAGE[self.damage]
        kv, dtype = self.kv.name, self.kv.dtype
        return {"place": self.place.name, "damage": damage, "kv": kv, "dtype": dtype}

    @property
    def name(self) -> str:
        """Return all of its names in one line."""
        return ", ".join(self.names.values())


@dataclass
class Counts:
    """Sets of a cell or of several, and those that each of `NAMES` missed."""

    sets: int
    missed: np.ndarray

    @classmethod
    def of(cls, parts: Iterable[Counts]) -> Counts:
        """Add up counts."""
        total = cls(0, np.zeros(len(NAMES), np.int64))
        for part in parts:
            total.sets += part.sets
            total.missed += part.missed
        return total


Tally = dict[Cell, Counts]


def cells(seed: int, only: str = "") -> list[Cell]:
    """Return every cell whose name contains a text.

    Zeros can only be damaged by flips.
    """
    kinds = product(PLACES, range(len(DAMAGE)), kinds_of_kv(seed))
    every = [Cell(number, *kind) for number, kind in enumerate(kinds)]
    return [
        cell
        for cell in every
        if (cell.damage == FLIP or cell.kv.name != ZEROS) and only in cell.name
    ]


def batches(listing: list[Cell], each: int) -> Iterator[tuple[Cell, int, int]]:
    """Yield cell, number and size of batches, so that every cell gets `each` sets.

    The cells take turns: what ran before a stop is spread over all of them.
    """
    for batch in range(math.ceil(each / BATCH)):
        for cell in listing:
            yield cell, batch, min(BATCH, each - batch * BATCH)


def run(
    listing: list[Cell],
    sets: int,
    seed: int,
    jobs: int,
    tally: Tally,
    progress: Callable[[str], None],
) -> None:
    """Add at least so many sets to `tally`, equally many of every cell.

    The result depends on the seed alone, not on the number of threads.
    """
    each = math.ceil(sets / len(listing))
    tables = crc_tables()

    def work(cell: Cell, batch: int, size: int) -> tuple[Cell, Counts]:
        entropy = np.random.SeedSequence([seed, cell.number, batch])
        (start,) = entropy.generate_state(1, np.uint64)
        source = cell.place.ranges, cell.damage, cell.kv.bits, cell.kv.pool
        checks = DEFINITIONS, tables, empty_set()
        return cell, Counts(size, count_missed(start, size, *source, *checks))

    began = said = time.monotonic()
    waiting: deque[Future[tuple[Cell, Counts]]] = deque()
    todo = batches(listing, each)
    with ThreadPoolExecutor(jobs) as pool:
        while True:
            for arguments in todo:
                waiting.append(pool.submit(work, *arguments))
                if len(waiting) > 2 * jobs:
                    break
            if not waiting:
                return
            cell, counts = waiting.popleft().result()
            have = tally.get(cell)
            tally[cell] = Counts.of([have, counts] if have else [counts])
            now = time.monotonic()
            if now - said >= PROGRESS_S:
                said = now
                progress(_progress(tally, each * len(listing), now - began))


def _progress(tally: Tally, goal: int, seconds: float) -> str:
    total = Counts.of(tally.values())
    missed = ", ".join(
        f"{n:,} by {x}" for x, n in zip(NAMES, total.missed, strict=True)
    )
    left = seconds * (goal - total.sets) / total.sets
    return (
        f"{total.sets:,} of {goal:,} sets, missed: {missed}, "
        f"{seconds:.0f} s, about {left:.0f} s to go"
    )


def _line(values: Iterable[object]) -> str:
    shown = (f"{v:,}" if isinstance(v, (int, np.integer)) else str(v) for v in values)
    return f"| {' | '.join(shown)} |"


def table(tally: Tally, *by: str) -> list[str]:
    """Return a Markdown table of all cells, one row per value of these names."""
    rows: dict[tuple[str, ...], list[Counts]] = {}
    for cell, counts in tally.items():
        rows.setdefault(tuple(cell.names[b] for b in by), []).append(counts)
    head = [*by, "sets", *(f"missed by {name}" for name in NAMES)]
    lines = [_line(head), _line(["---"] * len(head))]
    for names, parts in rows.items():
        total = Counts.of(parts)
        lines.append(_line([*names, total.sets, *total.missed]))
    total = Counts.of(tally.values())
    return [*lines, _line(["all", *[""] * (len(by) - 1), total.sets, *total.missed])]


def totals(tally: Tally) -> list[str]:
    """Return a line per check: what it missed in all, and its worst cell."""
    total = Counts.of(tally.values())
    few = Counts.of(counts for cell, counts in tally.items() if cell.kv.few)
    lines = [f"{total.sets:,} sets, {few.sets:,} of them in KV of few values. Missed:"]
    for k, name in enumerate(NAMES):
        worst = max(tally, key=lambda cell: tally[cell].missed[k] / tally[cell].sets)
        line = f"- {name}: {total.missed[k]:,} ({few.missed[k]:,} in KV of few values)"
        if tally[worst].missed[k]:
            share = tally[worst].missed[k] / tally[worst].sets
            line += f"; most, {share:.2g} of all, in: {worst.name}"
        lines.append(line)
    return lines


def arguments() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--sets", type=int, default=150_000_000, help="damaged sets, at least so many"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="only where 'place, damage, kv, dtype' contains this (default: all)",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="threads")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="every cell; plots.py draws it"
    )
    args = parser.parse_args()
    for name in ("sets", "jobs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if args.seed < 0:
        parser.error("--seed must be at least 0")
    if not cells(args.seed, args.only):
        parser.error(f"--only {args.only!r} is in no name, such as {cells(0)[1].name}")
    return args


def say(line: str) -> None:
    """Print a line beside the tables."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Run it all, print the tables, and say in the exit status how it went."""
    args = arguments()
    listing = cells(args.seed, args.only)
    tally: Tally = {}
    stopped = False
    began = time.monotonic()
    try:
        run(listing, args.sets, args.seed, args.jobs, tally, say)
    except KeyboardInterrupt:
        stopped = True
    seconds = time.monotonic() - began
    if stopped:
        say("stopped: what follows ran, the rest did not")
    if tally:
        lines = [*table(tally, "place", "damage"), "", *table(tally, "kv", "dtype"), ""]
        print("\n".join([*lines, *totals(tally), f"{seconds:.0f} s"]), flush=True)
    if args.json:
        rows = [
            {**cell.names, "few_values": cell.kv.few, "sets": n.sets}
            | {"missed": dict(zip(NAMES, n.missed.tolist(), strict=True))}
            for cell, n in tally.items()
        ]
        result = {"seed": args.seed, "only": args.only}
        result |= {"seconds": seconds, "stopped": stopped}
        args.json.write_text(json.dumps({**result, "cells": rows}, indent=1))
    if stopped:
        return 130
    return int(Counts.of(tally.values()).missed[NAMES.index("definition 2")] > 0)


if __name__ == "__main__":
    sys.exit(main())
