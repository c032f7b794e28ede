# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Measure what checksums cost a served request, in servers that switch them off and on.

Two pairs of servers differ, wherever their memory lies and their threads run, by more
than checksums cost. So one pair (NIXL pull, P and D behind a router) is asked by `vllm
bench serve` in turns, and between turns, while it is idle, a thread of the test rig takes
the feature's objects away or gives them back: then every `is None` check of vLLM's answers
as in a server that was started without. A round is three turns, of

- `off`: checksums away; all ratios are to this arm
- `control`: the same once more
- `on` or `closed`: checksums there, fail-open or fail-closed with recompute

in an order that is drawn; of two rounds the second has it the other way round. The
arms of a round are asked the same number of prompts, of the same lengths. Every round
gives one ratio per figure; the table shows the mean over the rounds of all restarts with its
95% interval (Student's t, on logarithms). Restarts take `on` and `closed` in turns.

`benchmark_serving.py` compares servers that were started with other settings instead.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import benchmark_serving as started
from benchmark_serving import ARMS, WORKLOADS, Client, Deadline, rounded
from serving_ratios import BASE, CONTROL, FIGURES, summary, table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from rig.model import tiny_qwen3  # noqa: E402
from rig.router import vllm_router  # noqa: E402
from rig.servers import Server, fork_server, serving  # noqa: E402

Turn = dict[str, Any]
CHECKED = ("on", "closed")
SETTLED_S = 0.3
"""P hears that its KV was read a step after D's client has its answer."""


def turns(args: argparse.Namespace, number: int, checked: str) -> Iterator[Turn]:
    """Yield a restart's turns in their order; the round before the first warms up."""
    draw = random.Random(number)
    order = [BASE, CONTROL, checked]
    for turn in range(-1, args.rounds):
        if turn % 2 == 0:
            draw.shuffle(order)
        for workload in args.workloads:
            for arm in order if turn % 2 == 0 else order[::-1]:
                yield {
                    "restart": number,
                    "round": turn,
                    "arm": arm,
                    "workload": workload,
                }


def restart(args: argparse.Namespace, number: int, client: Client) -> list[Turn]:
    """Start a pair of servers and return a row per turn."""
    checked = args.arms[number % len(args.arms)]
    common: dict[str, Any] = {
        "model": tiny_qwen3(),
        "fork_server": client.forks,
        "log_dir": client.folder,
        "transfer": ARMS[checked],
    }
    pair = (
        Server(f"switched-{number}-p", "kv_producer", **common),
        Server(f"switched-{number}-d", "kv_consumer", **common),
    )
    log = client.folder / f"switched-{number}-router.log"
    rows, loads = [], 0
    with serving(*pair), vllm_router(*pair, log=log) as router:
        url = str(router.base_url).rstrip("/")
        for turn in turns(args, number, checked):
            workload = WORKLOADS[turn["workload"]]
            prompts = workload.prompts(args.requests, f"switched {turn}")
            time.sleep(SETTLED_S)
            for server in pair:
                server.switch_checksums(on=turn["arm"] == checked)
            loads += len(prompts) * (turn["arm"] == checked)
            figures = client.measure(pair, url, prompts, workload.at_once, args.output)
            if turn["round"] >= 0:
                rows.append({**turn, **{f: rounded(figures[f]) for f in FIGURES}})
        check_loads(pair[1], loads)
    return rows


def check_loads(d: Server, wanted: int) -> None:
    """Check that every load with checksums was verified, and no other judged.

    Raises:
        SystemExit: it was not so.

    """
    name = "vllm:kv_checksum_loads_total"
    every, good = d.metric(name), d.metric(name, verdict="verified")
    if not every == good == wanted:
        raise SystemExit(
            f"of {wanted} loads with checksums {every:.0f} were judged, {good:.0f} verified"
        )


def run(args: argparse.Namespace, folder: Path, results: started.Results) -> None:
    """Run restarts until there are as many as wanted, or the time is over."""
    deadline = Deadline(args.minutes)
    with contextlib.closing(fork_server(folder)) as forks:
        client = Client(forks, tiny_qwen3(), folder)
        while results.restarts < args.restarts and deadline.begin():
            results.add(restart(args, results.restarts, client))
            deadline.done()
            started.say(f"{results.restarts} of {args.restarts} restarts: done")
            print(table(summary(results.rows)), flush=True)


def main() -> int:
    """Measure arms that are switched to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=CHECKED,
        default=list(CHECKED),
        help="with which checks servers are started, in turns (default: both)",
    )
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=WORKLOADS,
        default=list(WORKLOADS),
        metavar="NAME",
        help=f"what clients ask, of {', '.join(map(repr, WORKLOADS))} (default: all)",
    )
    counts = {
        "restarts": (4, "how often the servers are started anew"),
        "rounds": (20, "how many turns each arm takes per restart and workload"),
        "requests": (20, "requests of one turn, one after the other"),
        "output": (4, "tokens of each answer"),
    }
    started.add_common(parser, counts)
    args = parser.parse_args()
    return started.measure(parser, args, run, "benchmark_serving_switched")


if __name__ == "__main__":
    sys.exit(main())
