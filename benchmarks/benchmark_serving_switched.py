# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Measure what checksums cost a served request, in servers that switch them off and on.

Two pairs of servers differ by more than checksums cost, and so do two minutes of one pair.
So one pair (NIXL pull, P and D behind a router) is asked, and between two requests, while
it is idle, a thread of the test rig takes the feature's objects away or gives them back:
off, every `is None` check of vLLM's answers as in a server that was started without.
Requests take turns, one of each arm, in an order that is drawn:

- `off`: checksums away; all ratios are to this arm
- `control`: the same once more
- `on` or `closed`: checksums there, fail-open or fail-closed with recompute

So many turns are a round, which gives one ratio per figure, of the arms' medians. The
table shows the mean over the rounds of all restarts with its 95% interval (Student's t,
on logarithms). Restarts take `on` and `closed` in turns. Figures are the client's time
to the first token (TTFT; the answers have no other), and how long the threads of P and D
ran on the CPU for a request (/proc/PID/task/TID/schedstat).

`benchmark_serving.py` compares servers that were started with other settings instead, and
asks with `vllm bench serve`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client as Connection
from pathlib import Path
from typing import Any

import benchmark_serving as started
import httpx
from benchmark_serving import ARMS, WORKLOADS, Deadline, rounded
from serving_ratios import BASE, CONTROL, summary, table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from kv_checksum_rig import switch  # noqa: E402
from rig.forkserver import ForkServer  # noqa: E402
from rig.model import tiny_qwen3  # noqa: E402
from rig.router import vllm_router  # noqa: E402
from rig.servers import SERVED_NAME, Server, fork_server, serving  # noqa: E402

Turn = dict[str, Any]
CHECKED = ("on", "closed")
FIGURES = ("TTFT", "CPU of P", "CPU of D")
SETTLED_S = 0.02
"""P hears that its KV was read a little later than the client has its answer."""


class Switched:
    """Switches checksums of an idle server and tells how long its threads ran."""

    def __init__(self, server: Server) -> None:
        self.seconds = started.processor_seconds(server)
        self._server = server
        self._connections = []
        for process in server.family():
            with contextlib.suppress(ConnectionRefusedError):
                self._connections.append(Connection(switch.address(process.pid)))

    def to(self, on: bool) -> None:
        """Switch.

        Raises:
            SystemExit: the server was started without checksums.

        """
        held: dict[str, int] = {}
        for connection in self._connections:
            connection.send(on)
        for connection in self._connections:
            for name, number in connection.recv().items():
                held[name] = held.get(name, 0) + number
        # Only who loads has a ledger.
        if not (held.get("kv_checksum") and held.get("kv_checksum_worker")):
            raise SystemExit(f"{self._server.name} has no checksums to switch: {held}")


class Asked:
    """A pair of servers behind a router, asked by clients of its own."""

    def __init__(self, pair: Sequence[Server], router: httpx.Client) -> None:
        self.sides = [Switched(server) for server in pair]
        self._router = router
        self._clients = ThreadPoolExecutor(8)

    def measure(self, on: bool, prompts: Sequence[str]) -> dict[str, float]:
        """Ask for one token of each prompt, all at once, and return the figures."""
        time.sleep(SETTLED_S)
        for side in self.sides:
            side.to(on)
        began = [side.seconds() for side in self.sides]
        took = list(self._clients.map(self._ask, prompts))
        time.sleep(SETTLED_S)
        ran = [side.seconds() - b for side, b in zip(self.sides, began, strict=True)]
        values = [statistics.fmean(took), *(seconds / len(prompts) for seconds in ran)]
        return dict(zip(FIGURES, (1e3 * value for value in values), strict=True))

    def _ask(self, prompt: str) -> float:
        body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 1}
        began = time.perf_counter()
        answer = self._router.post("/v1/completions", json=body)
        took = time.perf_counter() - began
        answer.raise_for_status()
        return took


def turns(args: argparse.Namespace, number: int, checked: str) -> Iterator[Turn]:
    """Yield a restart's turns in their order; the round before the first warms up."""
    orders = [*itertools.permutations((BASE, CONTROL, checked))]
    draw = random.Random(number)
    for round_number in range(-1, args.rounds):
        for workload in args.workloads:
            for turn in range(args.requests):
                # Every six turns hold every order.
                if turn % len(orders) == 0:
                    draw.shuffle(orders)
                for arm in orders[turn % len(orders)]:
                    yield {
                        "restart": number,
                        "round": round_number,
                        "arm": arm,
                        "workload": workload,
                        "turn": turn,
                    }


def rows_of(measured: Sequence[Turn]) -> list[Turn]:
    """Return a row per round, arm and workload, with the medians of its turns."""
    found: dict[tuple[Any, ...], list[Turn]] = {}
    keys = ("restart", "round", "arm", "workload")
    for turn in measured:
        found.setdefault(tuple(turn[key] for key in keys), []).append(turn)
    return [
        {
            **dict(zip(keys, at, strict=True)),
            **{f: rounded(statistics.median(t[f] for t in group)) for f in FIGURES},
        }
        for at, group in found.items()
    ]


def restart(
    args: argparse.Namespace, number: int, folder: Path, forks: ForkServer
) -> list[Turn]:
    """Start a pair of servers and return its rows."""
    checked = args.arms[number % len(args.arms)]
    common: dict[str, Any] = {
        "model": tiny_qwen3(),
        "fork_server": forks,
        "env": {switch.VARIABLE: "1"},
        "log_dir": folder,
        "transfer": ARMS[checked],
    }
    pair = (
        Server(f"switched-{number}-p", "kv_producer", **common),
        Server(f"switched-{number}-d", "kv_consumer", **common),
    )
    log = folder / f"switched-{number}-router.log"
    measured, loads = [], 0
    with serving(*pair), vllm_router(*pair, log=log) as router:
        asked = Asked(pair, router)
        before = None
        for turn in turns(args, number, checked):
            workload = WORKLOADS[turn["workload"]]
            of_the_round = (number, turn["round"], turn["workload"])
            if of_the_round != before:
                before = of_the_round
                started.say(
                    f"restart {number + 1} of {args.restarts}: "
                    f"round {turn['round'] + 1} of {args.rounds}: {turn['workload']}"
                )
                if workload.prefix:  # which is to be in the prefix cache
                    asked.measure(False, workload.prompts(1, str(of_the_round)))
            prompts = workload.prompts(1, str(of_the_round), str(turn))
            on = turn["arm"] == checked
            loads += len(prompts) * on
            figures = asked.measure(on, prompts)
            if turn["round"] >= 0:
                measured.append({**turn, **figures})
        check_loads(pair[1], loads)
    return rows_of(measured)


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
        while results.restarts < args.restarts and deadline.begin():
            results.add(restart(args, results.restarts, folder, forks))
            deadline.done()
            started.say(f"{results.restarts} of {args.restarts} restarts: done")
            print(table(summary(results.rows)), flush=True)


def main() -> int:
    """Measure arms that are switched to."""
    counts = {
        "restarts": (4, "how often the servers are started anew"),
        "rounds": (20, "how many rounds there are per restart and workload"),
        "requests": (
            24,
            "turns of each arm in a round, of one request or more at once",
        ),
    }
    about = "with which checks servers are started, in turns"
    parser = started.options(__doc__, CHECKED, about, counts, FIGURES)
    args = parser.parse_args()
    return started.measure(parser, args, run, "benchmark_serving_switched")


if __name__ == "__main__":
    sys.exit(main())
