# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Draw models, requests and damage from a seed, and print the table of outcomes.

Depth *blocks*: real checksum workers of P and D and the real code for verdicts, no
scheduler, many damaged blocks per load; the same bytes go through Adler-32 and
CRC-32. Depth *loads*: requests through real schedulers, too, in each failure mode.
Depth *tiers*: loads that bring no checksums, judged by the ledger.
Exits with 1 if any outcome is not the expected one.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from rig import progress

from campaign.tally import CLEAN, Tally

DEPTHS = ("blocks", "loads", "tiers")
PROGRESS_S = 30.0


@dataclass(frozen=True)
class Goal:
    """The end of a depth's run: so many damaged blocks or loads, and so many clean."""

    damaged: int
    clean: int

    def reached(self, tally: Tally, depth: str) -> bool:
        clean = tally.rows.get((depth, CLEAN))
        return tally.total(depth, "damaged") >= self.damaged and (
            (clean.intact.total() if clean else 0) >= self.clean
        )


def quiet() -> None:
    """Silence the log, in which every damaged load would be a line."""
    logging.getLogger("vllm").setLevel(logging.CRITICAL)


def start_worker() -> None:
    """Prepare a process of the pool; the main one decides when to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    quiet()


def run_batch(depth: str, seed: int, number: int, only: str = "all") -> Tally:
    """Run one batch; it is the same for the same arguments, whatever ran before."""
    if depth == "blocks":
        from campaign import blocks

        return blocks.run_batch(seed, number, only)
    if depth == "tiers":
        from campaign import tiers

        return tiers.run_batch(seed, number)
    from campaign import loads

    return loads.run_batch(seed, number, only)


def tallies(
    depth: str, seed: int, jobs: int, pool: Executor | None, only: str = "all"
) -> Iterator[Tally]:
    """Yield tallies of batches 0, 1, ... in order; without a pool, run them here."""
    ahead: deque[Future[Tally]] = deque()
    try:
        for number in range(10**9):
            if pool is None:
                yield run_batch(depth, seed, number, only)
                continue
            ahead.append(pool.submit(run_batch, depth, seed, number, only))
            if len(ahead) > 2 * jobs:
                yield ahead.popleft().result()
    finally:
        for future in ahead:
            future.cancel()


def run(
    depth: str,
    seed: int,
    goal: Goal,
    tally: Tally,
    jobs: int = 1,
    pool: Executor | None = None,
    only: str = "all",
) -> int:
    """Add batches to `tally` until the goal is reached; how many there were."""
    began = said = time.monotonic()
    number = 0
    with (
        closing(tallies(depth, seed, jobs, pool, only)) as batches,  # type: ignore[type-var]
        progress.bar(goal.damaged, depth, " damaged") as bar,
    ):
        while not goal.reached(tally, depth):
            tally.add(next(batches))
            number += 1
            done = tally.total(depth, "damaged")
            undetected = tally.total(depth, "undetected")
            false_alarms = tally.total(depth, "false_alarms")
            progress.advance(
                bar, done, undetected=undetected, false_alarms=false_alarms
            )
            now = time.monotonic()
            # The bar says the same where there is one.
            if bar.disable and now - said >= PROGRESS_S:
                said = now
                left = (now - began) * max(0, goal.damaged - done) / max(1, done)
                say(
                    f"{depth}: {done:,} of {goal.damaged:,} damaged, "
                    f"{undetected:,} undetected, {false_alarms:,} false alarms, "
                    f"{now - began:.0f} s, about {left:.0f} s to go"
                )
    return number


def report(tally: Tally, depth: str, seconds: float) -> list[str]:
    """Return the table of one depth and what it comes to."""
    from campaign.blocks import OTHERS

    others = OTHERS if depth == "blocks" else ()
    clean = tally.rows.get((depth, CLEAN))
    return [
        *tally.lines(depth, others),
        "",
        *tally.check_lines(depth),
        "",
        f"{depth}: {tally.total(depth, 'damaged'):,} damaged, "
        f"{tally.total(depth, 'undetected'):,} undetected outside the limits; "
        f"{clean.intact.total() if clean else 0:,} clean and "
        f"{tally.total(depth, 'intact'):,} unchanged in all, "
        f"{tally.total(depth, 'false_alarms'):,} false alarms; {seconds:.0f} s. "
        "Batches, P/D:",
        "",
        *tally.drawn_lines(depth),
        "",
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--n",
        type=int,
        default=1_000_000,
        metavar="BLOCKS",
        help="damaged blocks; a tenth as many clean ones",
    )
    parser.add_argument(
        "--loads",
        type=int,
        metavar="LOADS",
        help="damaged loads, and clean loads, of both kinds (default: a 50th of --n)",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--depth", choices=DEPTHS, help="only this one (default: both)")
    parser.add_argument(
        "--batch", type=int, help="only this batch, as examples of --depth name it"
    )
    parser.add_argument(
        "--families",
        choices=("all", "compressed"),
        default="all",
        help="models that compress alone; they have no depth tiers",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="written at the end")
    args = parser.parse_args()
    if args.batch is not None and args.depth is None:
        parser.error("--batch needs --depth, which says what it is a batch of")
    for name in ("n", "loads", "jobs"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return args


def say(line: str) -> None:
    progress.say(line, sys.stderr)


def main() -> int:
    args = arguments()
    quiet()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    loads = args.loads if args.loads is not None else max(1, args.n // 50)
    goals = {
        "blocks": Goal(args.n, args.n // 10),
        "loads": Goal(loads, loads),
        "tiers": Goal(loads, loads),
    }
    tally = Tally()
    seconds: dict[str, float] = {}
    batches: dict[str, int] = {}
    stopped = False
    with ExitStack() as stack:
        pool = None
        if args.jobs > 1 and args.batch is None:
            context = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(args.jobs, context, initializer=start_worker)
            stack.callback(pool.shutdown, cancel_futures=True)
        depths = DEPTHS if args.families == "all" else DEPTHS[:2]
        for depth in [args.depth] if args.depth else depths:
            began = time.monotonic()
            try:
                if args.batch is not None:
                    tally.add(run_batch(depth, args.seed, args.batch, args.families))
                else:
                    batches[depth] = run(
                        depth,
                        args.seed,
                        goals[depth],
                        tally,
                        args.jobs,
                        pool,
                        args.families,
                    )
            except KeyboardInterrupt:
                stopped = True
            seconds[depth] = time.monotonic() - began
            print("\n".join(report(tally, depth, seconds[depth])), flush=True)
            if stopped:
                say("stopped: what is above ran, the rest did not")
                break
    for example in tally.examples:
        print(f"unexpected: {example}")
    if args.json:
        result = {
            "seed": args.seed,
            "batches": batches,
            "seconds": seconds,
            "stopped": stopped,
            "rows": tally.json(),
            "drawn": tally.drawn,
        }
        args.json.write_text(json.dumps(result, indent=1))
    return 130 if stopped else int(tally.unexpected > 0)


if __name__ == "__main__":
    sys.exit(main())
