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
starts; the order of turns is drawn, and every other turn has it the other way round. All
arms are asked the same prompts. A restart gives one ratio per arm, workload and figure,
of medians over the turns; the table shows the mean over restarts with its 95% interval
(Student's t, on logarithms). The last column sets an arm against the control, whose mean
is not exactly 1 either.

With `--json` every whole restart is kept, whatever happens later, and the same command
goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import random
import signal
import statistics
import string
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving_ratios import BASE, FIGURES, summary, table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from rig.forkserver import ForkServer  # noqa: E402
from rig.metrics import total  # noqa: E402
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
OF_THE_CLIENT = {
    "TTFT": "median_ttft_ms",
    "TPOT": "median_tpot_ms",
    "throughput": "request_throughput",
}
OF_THE_SERVERS = {
    "a request on P": (0, "vllm:e2e_request_latency_seconds"),
    "first token on D": (1, "vllm:time_to_first_token_seconds"),
}
"""By figure: P or D, and the histogram whose mean over a turn's requests it is."""
OF_THE_PROCESSOR = {"CPU of P": 0, "CPU of D": 1}
"""By figure: P or D, whose processes' time on the CPU it is, per request. What else the
machine does changes it less than what waits for the CPU."""
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

    def prompts(self, requests: int, seed: str, own: str | None = None) -> list[str]:
        """Draw the prompts of one turn; a capital letter is one token of the tiny model.

        Prompts of different seeds have nothing in common, so that the prefix cache finds
        only what is shared on purpose. With a seed of their `own`, that is the prefix.
        """
        draw = random.Random(seed)

        def text(tokens: int) -> str:
            return "".join(draw.choices(string.ascii_uppercase, k=tokens))

        shared = text(self.prefix)
        if own is not None:
            draw = random.Random(own)
        return [shared + text(self.tokens) for _ in range(requests * self.at_once)]


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

    def ask(
        self, url: str, prompts: Sequence[str], at_once: int, output: int
    ) -> dict[str, Any]:
        """Run one turn and return what the client reports.

        Raises:
            SystemExit: the client failed, or a request of it.

        """
        self._turns += 1
        result = self._folder / f"turn-{self._turns}.json"
        result.unlink(missing_ok=True)
        # The client takes prompts that are given only as conversations of two parts.
        dataset = result.with_suffix(".prompts.json")
        asked = [{"conversations": [{"value": p}, {"value": ""}]} for p in prompts]
        dataset.write_text(json.dumps(asked))
        line = [str(Path(sys.executable).parent / "vllm"), "bench", "serve"]
        line += ["--backend", "vllm", "--base-url", url, "--model", str(self._model)]
        line += ["--served-model-name", SERVED_NAME, "--ignore-eos", "--disable-tqdm"]
        line += ["--dataset-name", "sharegpt", "--dataset-path", str(dataset)]
        line += ["--sharegpt-output-len", str(output), "--disable-shuffle"]
        line += ["--num-prompts", str(len(prompts))]
        line += ["--max-concurrency", str(at_once)]
        line += ["--save-result", "--result-dir", str(result.parent)]
        line += ["--result-filename", result.name]
        log = self._folder / f"turn-{self._turns}.log"
        process = self._forks.launch(line, {}, log)
        while process.poll() is None:
            time.sleep(0.05)
        if process.returncode or not result.exists():
            raise SystemExit(f"the client failed: {log}")
        report: dict[str, Any] = json.loads(result.read_text())
        if report["completed"] != len(prompts):
            raise SystemExit(f"{report['completed']} of {len(prompts)} requests: {log}")
        return report


class Restart:
    """One start of all arms, and the turns that they take."""

    def __init__(self, args: argparse.Namespace, number: int, folder: Path) -> None:
        self.args, self.number, self.folder = args, number, folder
        names = list(args.arms)
        # Another arm is first each time; once all were, they come in reversed order.
        turn = number % len(names)
        self.order = names[turn:] + names[:turn]
        if number // len(names) % 2:
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

    def measure(
        self,
        client: Client,
        urls: dict[str, str],
        pairs: dict[str, tuple[Server, Server]],
    ) -> list[dict[str, Any]]:
        """Let the arms take turns; return one row per arm and workload."""
        rows = []
        used = {
            arm: [processor_seconds(server) for server in pair]
            for arm, pair in pairs.items()
        }
        for name in self.args.workloads:
            workload = WORKLOADS[name]
            found: dict[str, list[dict[str, float]]] = {arm: [] for arm in urls}
            for turn, order in enumerate(self.turns(name), start=-1):
                requests = self.args.requests if turn >= 0 else 3
                prompts = workload.prompts(requests, f"{self.number} {name} {turn}")
                for arm in order:
                    before = served(pairs[arm])
                    began = [seconds() for seconds in used[arm]]
                    report = client.ask(
                        urls[arm], prompts, workload.at_once, self.args.output
                    )
                    figures = {f: report[key] for f, key in OF_THE_CLIENT.items()}
                    for figure, side in OF_THE_PROCESSOR.items():
                        took = used[arm][side]() - began[side]
                        figures[figure] = 1e3 * took / len(prompts)
                    figures |= means(before, served(pairs[arm]), len(prompts))
                    if turn >= 0:  # the turn before the first warms up
                        found[arm].append(figures)
            for arm, turns in found.items():
                row = {"restart": self.number, "arm": arm, "workload": name}
                for figure in FIGURES:
                    row[figure] = rounded(statistics.median(t[figure] for t in turns))
                rows.append(row)
            say(f"restart {self.number + 1}: {name}: done")
        return rows

    def turns(self, workload: str) -> Iterator[list[str]]:
        """Yield the order of the arms in each turn, the one that warms up included.

        Of two turns the second has the first's drawn order the other way round, so that
        what changes steadily over both hits all arms alike.
        """
        draw = random.Random(f"{self.number} {workload}")
        order = list(self.order)
        yield order
        for turn in range(self.args.turns):
            if turn % 2 == 0:
                draw.shuffle(order)
            yield order if turn % 2 == 0 else order[::-1]


Served = dict[str, tuple[float, float]]


def served(pair: tuple[Server, Server]) -> Served:
    """Return the seconds and the number of requests behind each figure of the servers."""
    pages = [server.metrics() for server in pair]
    return {
        figure: (total(pages[side], f"{name}_sum"), total(pages[side], f"{name}_count"))
        for figure, (side, name) in OF_THE_SERVERS.items()
    }


def processor_seconds(server: Server) -> Callable[[], float]:
    """Return what tells how long a server's threads have run on a CPU, in seconds.

    The kernel counts it in nanoseconds (/proc/PID/task/TID/schedstat).
    """
    folders = [Path(f"/proc/{process.pid}/task") for process in server.family()]

    def seconds() -> float:
        tasks = [task for folder in folders for task in folder.glob("*/schedstat")]
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    return seconds


def rounded(value: float) -> float:
    """Return a figure to six digits."""
    return float(f"{value:.6g}")


def means(before: Served, after: Served, requests: int) -> dict[str, float]:
    """Return the mean milliseconds of the requests between two times.

    Raises:
        SystemExit: a server counted another number of requests.

    """
    found = {}
    for figure, (seconds, number) in after.items():
        took, counted = seconds - before[figure][0], number - before[figure][1]
        if counted != requests:
            raise SystemExit(f"{figure}: {counted:.0f} of {requests} requests")
        found[figure] = 1e3 * took / counted
    return found


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


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return what results must have in common to be put together."""
    passing = ("restarts", "minutes", "json")
    return {
        **{name: value for name, value in vars(args).items() if name not in passing},
        "workloads": {name: vars(WORKLOADS[name]) for name in args.workloads},
    }


class Results:
    """The rows measured so far, in a file if one is named."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._file: Path | None = args.json
        self._settings = settings(args)
        self.rows: list[dict[str, Any]] = []

    def resume(self) -> None:
        """Take over the rows of the file, if it is there.

        Raises:
            ValueError: they were measured with other settings.

        """
        if self._file is None or not self._file.exists():
            return
        found = json.loads(self._file.read_text())
        if found["settings"] != self._settings:
            raise ValueError(f"{self._file} was measured with other settings")
        self.rows = found["rows"]

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Add a restart's rows; the file is whole at any time."""
        self.rows += rows
        if self._file is None:
            return
        content = {
            "settings": self._settings,
            "summary": summary(self.rows),
            "rows": self.rows,
        }
        whole = self._file.with_suffix(".part")
        whole.write_text(compact(content) + "\n")
        whole.replace(self._file)

    @property
    def restarts(self) -> int:
        return len({row["restart"] for row in self.rows})


def compact(content: dict[str, Any]) -> str:
    """Return JSON that has each entry of a list in a line of its own."""
    parts = []
    for name, value in content.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[\n" + ",\n".join(json.dumps(one) for one in value) + "\n]"
        parts.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}"


class Deadline:
    """Tells whether one more restart fits into the time, by the longest so far."""

    def __init__(self, minutes: float | None) -> None:
        self._end = None if minutes is None else BEGAN + 60 * minutes
        self._longest = 0.0
        self._began = time.monotonic()

    def begin(self) -> bool:
        """Begin a restart, if it fits."""
        self._began = time.monotonic()
        return self._end is None or self._began + self._longest < self._end

    def done(self) -> None:
        """Take note of how long the restart took."""
        self._longest = max(self._longest, time.monotonic() - self._began)


def run(args: argparse.Namespace, folder: Path, results: Results) -> None:
    """Run restarts until there are as many as wanted, or the time is over."""
    model = tiny_qwen3()
    deadline = Deadline(args.minutes)
    with contextlib.ExitStack() as stack:
        patched = stack.enter_context(contextlib.closing(fork_server(folder)))
        forks: dict[bool, tuple[ForkServer, dict[str, str]]] = {False: (patched, {})}
        if "stock" in args.arms:
            env = stock_environment()
            stock = fork_server(folder / "stock", env)
            forks[True] = (stack.enter_context(contextlib.closing(stock)), env)
        client = Client(patched, model, folder)
        while results.restarts < args.restarts and deadline.begin():
            number = results.restarts
            restart = Restart(args, number, folder)
            pairs = restart.servers(model, forks)
            with serving(*(server for pair in pairs.values() for server in pair)):
                say(f"restart {number + 1} of {args.restarts}: all servers are up")
                with restart.routers(pairs) as urls:
                    rows = restart.measure(client, urls, pairs)
                check_loads(pairs)
            deadline.done()
            results.add(rows)
            say(
                f"restart {number + 1} of {args.restarts}: done\n"
                + table(summary(results.rows))
            )


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


Run = Callable[[argparse.Namespace, Path, Results], None]


def measure(
    parser: argparse.ArgumentParser, args: argparse.Namespace, run: Run, folder: str
) -> int:
    """Measure, and print the table of whatever was measured."""
    results = Results(args)
    try:
        results.resume()
    except ValueError as error:
        parser.error(str(error))
    logging.getLogger("httpx").setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, interrupt)
    logs = CACHE / "logs" / folder
    logs.mkdir(parents=True, exist_ok=True)
    status = 0
    try:
        run(args, logs, results)
    except KeyboardInterrupt:
        print("stopped; what whole restarts measured is kept", file=sys.stderr)
        status = 130
    finally:
        if results.rows:
            print(table(summary(results.rows)))
    return status


def options(
    description: str | None,
    arms: Sequence[str],
    about_arms: str,
    counts: dict[str, tuple[int, str]],
    figures: Sequence[str],
) -> argparse.ArgumentParser:
    """Return a parser of a serving benchmark's options.

    Args:
        description: the program's.
        arms: those that can be chosen; all are by default.
        about_arms: what choosing them means.
        counts: options that are numbers: by name, what they are by default, and help.
        figures: what is measured; no option.

    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    choices: dict[str, tuple[Sequence[str], str]] = {
        "arms": (arms, about_arms),
        "workloads": (list(WORKLOADS), "what clients ask"),
    }
    for name, (every, text) in choices.items():
        parser.add_argument(
            f"--{name}",
            nargs="+",
            choices=every,
            default=list(every),
            metavar="NAME",
            help=f"{text}, of {', '.join(map(repr, every))} (default: all)",
        )
    for name, (default, text) in counts.items():
        parser.add_argument(
            f"--{name}",
            type=int,
            default=default,
            metavar="N",
            help=f"{text} (default: {default})",
        )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help="begin no restart that would not end within so many minutes",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the results there after each restart; restarts that are there count",
    )
    parser.set_defaults(figures=list(figures))
    return parser


def main() -> int:
    """Measure arms that were started with different settings."""
    counts = {
        "restarts": (10, "how often all servers are started anew"),
        "turns": (4, "how many turns each arm takes per restart and workload"),
        "requests": (20, "requests of one turn, one after the other"),
        "output": (8, "tokens of each answer"),
    }
    about = f"which arms take part, where {BASE!r} always does"
    parser = options(__doc__, list(ARMS), about, counts, list(FIGURES))
    args = parser.parse_args()
    args.arms = list(dict.fromkeys([BASE, *args.arms]))
    return measure(parser, args, run, "benchmark_serving")


if __name__ == "__main__":
    sys.exit(main())
