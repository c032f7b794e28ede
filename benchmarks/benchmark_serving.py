# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Measure what checksums cost a served request, with real servers and `vllm bench serve`.

An *arm* is a pair of servers (NIXL pull, P and D) behind a router, with one setting:

- `stock`: vLLM without the series
- `off`: the patched vLLM, checksums off; all ratios are to this arm
- `control`: the same once more, which shows how far two equal pairs differ
- `on`: checksums on, fail-open
- `closed`: checksums on, fail-closed with recompute

All arms are up at once and take turns, workload by workload, so that whatever else the
machine does hits all alike. Every restart gives each arm another place in the order of
starts and turns. A restart gives one ratio per arm, workload and figure; the table
shows the mean over restarts with its 95% interval (Student's t, on logarithms). The
last column sets an arm against the control, whose mean is not exactly 1 either.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mpmath

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from rig.forkserver import ForkServer  # noqa: E402
from rig.model import CACHE, tiny_qwen3  # noqa: E402
from rig.router import vllm_router  # noqa: E402
from rig.servers import SERVED_NAME, Server, fork_server, serving  # noqa: E402
from rig.stock import stock_environment  # noqa: E402

ON = {"enable_kv_checksum": True}
CLOSED = {**ON, "kv_checksum_fail_closed": True, "kv_load_failure_policy": "recompute"}
ARMS: dict[str, dict[str, Any]] = {
    "off": {},
    "control": {},
    "stock": {},
    "on": ON,
    "closed": CLOSED,
}
BASE, CONTROL = "off", "control"
FIGURES = {
    "TTFT": "median_ttft_ms",
    "TPOT": "median_tpot_ms",
    "throughput": "request_throughput",
}
BEGAN = time.monotonic()


@dataclass(frozen=True)
class Workload:
    """What clients ask.

    Attributes:
        tokens: prompt tokens of one request's own.
        prefix: prompt tokens that all requests of a turn share.
        at_once: how many requests run at once.

    """

    tokens: int
    prefix: int = 0
    at_once: int = 1

    def options(self, requests: int, seed: int) -> list[str]:
        """Return the client's options for one turn."""
        asked = {
            "random-input-len": self.tokens,
            "random-prefix-len": self.prefix,
            "max-concurrency": self.at_once,
            "num-prompts": requests * self.at_once,
            "seed": seed,
        }
        return [part for k, v in asked.items() for part in (f"--{k}", str(v))]


WORKLOADS = {
    "100 tokens": Workload(100),
    "900 tokens": Workload(900),
    "900 tokens, 800 shared": Workload(100, prefix=800),
    "500 tokens, 4 at once": Workload(500, at_once=4),
}


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:5.0f} s] {text}", flush=True)


class Client:
    """Runs `vllm bench serve`, forked from a process that has imported vLLM."""

    def __init__(self, forks: ForkServer, model: Path, folder: Path) -> None:
        self._forks, self._model, self._folder = forks, model, folder
        self._turns = 0

    def ask(self, url: str, options: Sequence[str], output: int) -> dict[str, Any]:
        """Run one turn and return what the client reports.

        Raises:
            SystemExit: the client failed, or a request of it.

        """
        self._turns += 1
        result = self._folder / f"turn-{self._turns}.json"
        line = [str(Path(sys.executable).parent / "vllm"), "bench", "serve"]
        line += ["--backend", "vllm", "--base-url", url, "--model", str(self._model)]
        line += ["--served-model-name", SERVED_NAME, "--dataset-name", "random"]
        line += ["--random-output-len", str(output), "--ignore-eos", "--disable-tqdm"]
        line += ["--save-result", "--result-dir", str(result.parent)]
        line += ["--result-filename", result.name, *options]
        log = self._folder / f"turn-{self._turns}.log"
        process = self._forks.launch(line, {}, log)
        while process.poll() is None:
            time.sleep(0.05)
        if process.returncode or not result.exists():
            raise SystemExit(f"the client failed: {log}")
        report: dict[str, Any] = json.loads(result.read_text())
        if report.get("failed"):
            raise SystemExit(f"{report['failed']} requests failed: {log}")
        return report


class Restart:
    """One start of all arms, and the turns that they take."""

    def __init__(self, args: argparse.Namespace, number: int, folder: Path) -> None:
        self.args, self.number, self.folder = args, number, folder
        names = list(args.arms)
        # Another arm is first each time, and every other time the order is reversed.
        turn = number % len(names)
        self.order = names[turn:] + names[:turn]
        if number % 2:
            self.order.reverse()

    def servers(
        self, model: Path, forks: dict[bool, tuple[ForkServer, dict[str, str]]]
    ) -> dict[str, tuple[Server, Server]]:
        """Return the servers of each arm, not started."""
        pairs = {}
        for arm in self.order:
            fork, env = forks[arm == "stock"]
            common: dict[str, Any] = {
                "model": model,
                "fork_server": fork,
                "env": env,
                "log_dir": self.folder,
                "transfer": ARMS[arm],
            }
            name = f"serve-{self.number}-{arm}"
            pairs[arm] = (
                Server(f"{name}-p", "kv_producer", **common),
                Server(f"{name}-d", "kv_consumer", **common),
            )
        return pairs

    @contextlib.contextmanager
    def routers(
        self, pairs: dict[str, tuple[Server, Server]]
    ) -> Iterator[dict[str, str]]:
        """Run a router in front of each pair; yield their URLs."""
        with contextlib.ExitStack() as stack:
            yield {
                arm: str(
                    stack.enter_context(
                        vllm_router(*pair, log=self.folder / f"{arm}-router.log")
                    ).base_url
                ).rstrip("/")
                for arm, pair in pairs.items()
            }

    def measure(self, client: Client, urls: dict[str, str]) -> list[dict[str, Any]]:
        """Let the arms take turns; return one row per arm and workload."""
        rows = []
        for name, workload in WORKLOADS.items():
            found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in urls}
            for turn in range(-1, self.args.turns):
                order = self.order if turn % 2 else self.order[::-1]
                seed = 1000 * self.number + turn + 1
                requests = self.args.requests if turn >= 0 else 3
                for arm in order:
                    report = client.ask(
                        urls[arm], workload.options(requests, seed), self.args.output
                    )
                    if turn >= 0:  # the turn before the first warms up
                        found[arm].append(report)
            for arm, reports in found.items():
                figures = {
                    figure: statistics.median(r[key] for r in reports)
                    for figure, key in FIGURES.items()
                }
                rows.append(
                    {"restart": self.number, "arm": arm, "workload": name, **figures}
                )
        return rows


def check_loads(pairs: dict[str, tuple[Server, Server]]) -> None:
    """Check that the arms did what their names say.

    Raises:
        SystemExit: an arm with checksums did not verify every load, or another has counts.

    """
    name = "vllm:kv_checksum_loads_total"
    for arm, (_, d) in pairs.items():
        every, good = d.metric(name), d.metric(name, verdict="verified")
        if every != good or bool(every) != bool(ARMS[arm]):
            raise SystemExit(f"{arm}: {good:.0f} of {every:.0f} loads were verified")


def ratios(
    rows: list[dict[str, Any]], workload: str, figure: str
) -> dict[str, list[float]]:
    """Return each arm's logarithms of the ratio to the base, one per restart."""
    at = {
        (r["restart"], r["arm"]): r[figure] for r in rows if r["workload"] == workload
    }
    base = {restart: value for (restart, arm), value in at.items() if arm == BASE}
    arms = dict.fromkeys(arm for _, arm in at if arm != BASE)
    return {arm: [math.log(at[n, arm] / base[n]) for n in base] for arm in arms}


def student_quantile(freedom: int) -> float:
    """Return what Student's t exceeds in size with probability 5%."""

    def beyond(t: Any) -> Any:
        inside = freedom / (freedom + t * t)
        return mpmath.betainc(freedom / 2, 0.5, 0, inside, regularized=True) - 0.05

    return float(mpmath.findroot(beyond, (1.9, 13), solver="anderson"))


def interval(values: Sequence[float]) -> str:
    """Format the mean of logarithms of ratios as a ratio, with its 95% interval."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{math.exp(mean):.3f}"
    error = statistics.stdev(values) / math.sqrt(len(values))
    wide = student_quantile(len(values) - 1) * error
    low, high = (math.exp(mean + sign * wide) for sign in (-1, 1))
    return f"{math.exp(mean):.3f} ({low:.3f} to {high:.3f})"


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as a table of Markdown."""
    lines = [
        f"| workload | figure | {BASE} | arm | times {BASE} | times {CONTROL} |",
        "|---|---|---|---|---|---|",
    ]
    for workload in dict.fromkeys(row["workload"] for row in rows):
        for figure in FIGURES:
            base = statistics.median(
                r[figure] for r in rows if (r["workload"], r["arm"]) == (workload, BASE)
            )
            found = ratios(rows, workload, figure)
            control = found.get(CONTROL)
            for arm, values in found.items():
                beyond = "-"
                if control and arm != CONTROL:
                    paired = zip(values, control, strict=True)
                    beyond = interval([x - y for x, y in paired])
                lines.append(
                    f"| {workload} | {figure} | {base:.4g} | {arm} | {interval(values)} "
                    f"| {beyond} |"
                )
    return "\n".join(lines)


def run(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run all restarts; return one row per restart, arm and workload."""
    model = tiny_qwen3()
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        patched = stack.enter_context(contextlib.closing(fork_server(folder)))
        forks: dict[bool, tuple[ForkServer, dict[str, str]]] = {False: (patched, {})}
        if "stock" in args.arms:
            env = stock_environment()
            stock = fork_server(folder / "stock", env)
            forks[True] = (stack.enter_context(contextlib.closing(stock)), env)
        client = Client(patched, model, folder)
        for number in range(args.restarts):
            restart = Restart(args, number, folder)
            pairs = restart.servers(model, forks)
            with serving(*(server for pair in pairs.values() for server in pair)):
                say(f"restart {number + 1} of {args.restarts}: all servers are up")
                with restart.routers(pairs) as urls:
                    rows += restart.measure(client, urls)
                check_loads(pairs)
            say(f"restart {number + 1} of {args.restarts}: done\n{table(rows)}")
            if args.json:  # what is measured is not lost if a later restart fails
                args.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=ARMS,
        default=list(ARMS),
        help=f"which arms take part; {BASE} always does (default: all)",
    )
    counts = {
        "restarts": (10, "how often all servers are started anew"),
        "turns": (3, "how many turns each arm takes per restart and workload"),
        "requests": (20, "requests of one turn, one after the other"),
        "output": (8, "tokens of each answer"),
    }
    for name, (default, text) in counts.items():
        parser.add_argument(
            f"--{name}",
            type=int,
            default=default,
            metavar="N",
            help=f"{text} (default: {default})",
        )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the results there, too"
    )
    args = parser.parse_args()
    args.arms = list(dict.fromkeys([BASE, *args.arms]))
    logging.getLogger("httpx").setLevel(logging.WARNING)
    folder = CACHE / "logs" / "benchmark_serving"
    folder.mkdir(parents=True, exist_ok=True)
    rows = run(args, folder)
    print(table(rows))


if __name__ == "__main__":
    main()
