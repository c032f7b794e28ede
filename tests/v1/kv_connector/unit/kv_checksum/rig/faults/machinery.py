# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run P and D, and instances that share a store, while the machinery misbehaves.

A run is drawn from its seed: parallelism, async scheduling, what a failed load leads
to, requests, faults. It raises AssertionError unless

- every verdict is one that what really happened allows: damaged KV, or another
  request's checksums, are never verified; intact KV never mismatches; and where
  nothing was lost on the way, a load is verified or a mismatch, not unverified;
- every load that arrived is judged once, and its request ends as its verdict says;
- what is summed is what is loaded; the counters of loads say how each ended;
- every request ends within `MAX_STEPS` steps;
- in the end nothing is left: tables, blocks, tensors that a worker refers to.

Run as a program, it prints what happened:
``python -m kv_checksum.rig.faults.machinery --n 200``.
"""

import argparse
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from itertools import product
from pathlib import Path

from tqdm import tqdm

from .. import instances as rig
from .records import KINDS, Faults
from .runs import PairRun, StoreRun
from .stores import FaultyStore, InStepStore, UncheckedStore

STORES = {"store": FaultyStore, "no checksums": UncheckedStore, "in step": InStepStore}
CARRIERS = ("pull", "push", "mooncake", *STORES)


def run(model: str, carrier: str, kind: str, seed: int, counts: Counter) -> Counter:
    """Run with the faults of a kind, or of "all"; return what loads were and became."""
    faults = Faults(
        random.Random(f"{carrier} {kind} {seed}"),
        frozenset(KINDS if kind == "all" else {kind}),
        counts,
    )
    outcomes: Counter = Counter()
    try:
        if carrier in STORES:
            StoreRun(model, faults, outcomes, STORES[carrier]).go()
        else:
            PairRun(model, carrier, faults, outcomes).go()
    except Exception as error:
        error.add_note(f"carrier {carrier}, faults {kind}, seed {seed}")
        raise
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=10, help="seeds per carrier and kind")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--json", type=Path, help="where the counts are written")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    model = rig.write_model(Path(tempfile.mkdtemp()))
    counts: Counter = Counter()
    table: dict[str, Counter] = {kind: Counter() for kind in (*KINDS, "all")}
    failures, began = [], time.monotonic()
    seeds = range(arguments.seed, arguments.seed + arguments.n)
    for seed, kind, carrier in tqdm(
        list(product(seeds, table, CARRIERS)), desc="machinery", disable=None
    ):
        try:
            table[kind].update(run(model, carrier, kind, seed, counts))
        except Exception as error:
            failures.append(f"{carrier} {kind} {seed}: {error!r}"[:400])
            tqdm.write(f"FAILED {failures[-1]}")
    print_table(table)
    for name, number in sorted(counts.items()):
        print(f"{number:8d}  {name}")
    seconds = time.monotonic() - began
    runs = arguments.n * len(table) * len(CARRIERS)
    print(f"{runs} runs, {len(failures)} failed, {seconds:.0f} s")
    if arguments.json:
        rows = {k: {", ".join(w): n for w, n in r.items()} for k, r in table.items()}
        report = dict(table=rows, counts=counts, failures=failures, seconds=seconds)
        arguments.json.write_text(json.dumps(report, indent=1, sort_keys=True))
    return bool(failures)


def print_table(table: dict[str, Counter]) -> None:
    columns = sorted({outcome for row in table.values() for outcome in row})
    for column in columns:
        print(f"({columns.index(column) + 1}) {column[0]}: {column[1]}")
    print(f"{'':10}", *(f"{f'({i + 1})':>7}" for i in range(len(columns))))
    for kind, row in table.items():
        print(f"{kind:10}", *(f"{row[column]:7d}" for column in columns))


if __name__ == "__main__":
    sys.exit(main())
