# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Measure the time to first token, with checksums and without, of KV from a Mooncake store.

Real servers and a real `mooncake_master` over TCP, forked from one process that
imported vLLM. A stores prompts and ends; a fresh B loads them; C, which has no
connector, computes them. B without checksums, B with them and C take turns, prompt by
prompt, so that whatever else the machine does hits all alike. Ratios are medians over
the prompts, of each one's best round. The values lie in this process's memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from rig.forkserver import ForkServer  # noqa: E402
from rig.model import CACHE, VOCABULARY, tiny_qwen3  # noqa: E402
from rig.mooncake_store import MooncakeStore  # noqa: E402
from rig.servers import Server, fork_server, serving  # noqa: E402

BLOCK = 32
BYTES_PER_TOKEN = 4 * 2 * 2 * 64 * 4
"""Layers, keys and values, heads, their size, float32."""

NONE, OFF, ON = "none", "off", "on"
SETTINGS: dict[str, dict[str, Any]] = {
    OFF: {},
    ON: {
        "enable_kv_checksum": True,
        "kv_checksum_fail_closed": True,
        "kv_load_failure_policy": "recompute",
    },
}
NAMES = {
    NONE: "C, no connector",
    OFF: "B, checksums off",
    ON: "B, checksums on",
}
SPIN_S = 1.2
"""For a second after a request, vLLM's processes of an instance with several spin."""

VERDICTS = ("verified", "mismatch", "unverified")
BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:5.0f} s] {text}", flush=True)


@dataclass
class Result:
    """The results of one instance.

    Attributes:
        stored_ms: A's median time to first token with the same setting.
        times_ms: the time to first token of each prompt, per round.
        asked: how many prompts.
        same_token: of how many of them the first token is C's.
        hit_rate: the share of prompt tokens that came from the store.
        loads: by verdict, of an instance with checksums.

    """

    tp: int
    instance: str
    stored_ms: float | None = None
    times_ms: list[list[float]] = field(default_factory=list)
    asked: int = 0
    same_token: int = 0
    hit_rate: float = 0.0
    loads: dict[str, int] = field(default_factory=dict)

    @property
    def rounds_ms(self) -> list[float]:
        """Return the median of each round."""
        return [statistics.median(times) for times in self.times_ms]

    @property
    def median_ms(self) -> float:
        """Return the median of the rounds' medians."""
        return statistics.median(self.rounds_ms)

    def times(self, other: Result) -> float:
        """Return the ratio to another's time: the median over the prompts."""
        mine, theirs = (
            [min(rounds) for rounds in zip(*r.times_ms, strict=True)]
            for r in (self, other)
        )
        return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


def prompts_of(number: int, tokens: int) -> list[list[int]]:
    """Return this many prompts, and one more to begin with."""
    draw = random.Random(tokens)
    return [
        [draw.randrange(2, VOCABULARY) for _ in range(tokens)]
        for _ in range(number + 1)
    ]


def first_token(server: Server, prompt: list[int]) -> tuple[float, str]:
    """Return the time to the first token in milliseconds, and its text."""
    answers: list[tuple[float, str]] = []
    began = time.perf_counter()
    request_id = f"{server.name}-{time.monotonic_ns()}"
    with server.streamed(prompt, 1, request_id=request_id, stream=True) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            event = line.removeprefix("data: ")
            if event and event != "[DONE]":
                took = 1000 * (time.perf_counter() - began)
                found = json.loads(event)
                if "error" in found:
                    raise SystemExit(f"{server.name}: {found['error']}")
                answers.append((took, found["choices"][0]["text"]))
    return answers[0]


def hits(server: Server) -> float:
    name = "vllm:prompt_tokens_by_source_total"
    return server.metric(name, source="external_kv_transfer")


def keys_stored(server: Server) -> float:
    """Return the number of values that an instance has put into the store, once all are there."""
    # Statistics travel with steps, and an idle engine makes none.
    server.completions([5, 6, 7], 1).raise_for_status()
    name = "vllm:mooncake_store_operation_keys_total"
    return server.metric(name, operation="save_put")


class Benchmark:
    """The instances of one TP size."""

    def __init__(
        self, args: argparse.Namespace, tp: int, forks: ForkServer, folder: Path
    ) -> None:
        self.args, self.tp = args, tp
        self.prompts = prompts_of(args.prompts, args.tokens)
        longest = args.tokens + BLOCK
        room = ("--max-model-len", str(longest))
        positions = json.dumps({"max_position_embeddings": longest})
        self.common: dict[str, Any] = {
            "model": tiny_qwen3("float32"),
            "dtype": "float32",
            "tp": tp,
            "fork_server": forks,
            "log_dir": folder,
            "args": (*room, "--hf-overrides", positions),
        }
        self.env = {"VLLM_SERVER_DEV_MODE": "1"}
        each = len(self.prompts) * args.tokens * BYTES_PER_TOKEN
        # All of it in this process: the instances lend nothing, and A can leave.
        # On a busy machine a sign of life, or a load, may take longer than 10 s.
        flags = ("-client_ttl=300", "-default_kv_lease_ttl=300000")
        self.store = MooncakeStore(folder, flags, lent=3 * each, segment=0)

    def fill(self, setting: str) -> float:
        """Let A store every prompt, and return its median time to first token."""
        transfer = SETTINGS[setting]
        a = self.store.instance(
            f"bench-a-{setting}", "kv_producer", transfer=transfer, **self.common
        )
        with serving(a):
            took = [first_token(a, prompt)[0] for prompt in self.prompts]
            wanted = len(self.prompts) * (self.args.tokens // BLOCK) * self.tp
            until = time.monotonic() + 120
            while (have := keys_stored(a)) < wanted:
                if time.monotonic() > until:
                    raise SystemExit(f"A stored {have:.0f} of {wanted} values")
                time.sleep(0.2)
        say(f"TP {self.tp}: A stored {len(took)} prompts, checksums {setting}")
        return statistics.median(took[1:])

    def servers(self) -> dict[str, Server]:
        common = {**self.common, "env": self.env}
        found = {
            setting: self.store.instance(
                f"bench-b-{setting}", "kv_consumer", transfer=transfer, **common
            )
            for setting, transfer in SETTINGS.items()
        }
        return {NONE: Server("bench-c", None, **common), **found}

    def round(self, servers: dict[str, Server], results: dict[str, Result]) -> None:
        """Ask every instance for every prompt, each time another one first."""
        took: dict[str, list[float]] = {name: [] for name in servers}
        for server in servers.values():
            server.post("/reset_prefix_cache").raise_for_status()
        order = list(servers)
        for prompt in self.prompts[1:]:
            order.append(order.pop(0))
            texts = {}
            for name in order:
                ms, texts[name] = first_token(servers[name], prompt)
                took[name].append(ms)
                if self.tp > 1:
                    time.sleep(SPIN_S)
            for name, result in results.items():
                result.asked += 1
                result.same_token += texts[name] == texts[NONE]
        for name, result in results.items():
            result.times_ms.append(took[name])

    def run(self) -> list[Result]:
        with self.store:
            stored = {setting: self.fill(setting) for setting in SETTINGS}
            servers = self.servers()
            results = {
                name: Result(self.tp, NAMES[name], stored.get(name)) for name in servers
            }
            with serving(*servers.values()):
                say(f"TP {self.tp}: C and both B are up")
                # Connections, and what is compiled with the first request.
                for server in servers.values():
                    first_token(server, self.prompts[0])
                before = {name: hits(server) for name, server in servers.items()}
                for number in range(self.args.rounds):
                    self.round(servers, results)
                    last = ", ".join(
                        f"{r.instance} {r.rounds_ms[-1]:.0f} ms"
                        for r in results.values()
                    )
                    say(
                        f"TP {self.tp}: round {number + 1} of {self.args.rounds}: {last}"
                    )
                self.read(servers, results, before)
        return list(results.values())

    def read(
        self,
        servers: dict[str, Server],
        results: dict[str, Result],
        before: dict[str, float],
    ) -> None:
        """Read the instances' metrics, once all requests are counted."""
        for name, server in servers.items():
            server.completions([5, 6, 7], 1).raise_for_status()
            result = results[name]
            tokens = result.asked * self.args.tokens
            result.hit_rate = (hits(server) - before[name]) / tokens
            if name == ON:
                loads = "vllm:kv_checksum_loads_total"
                result.loads = {
                    v: int(server.metric(loads, verdict=v)) for v in VERDICTS
                }


def table(results: list[Result]) -> str:
    """Return the results as a table of Markdown."""
    lines = [
        "| TP | instance | first token, ms (each round) | times C | times B off | A while it stores, ms | hit rate | verified, mismatch, unverified | first token is C's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    found = {(r.tp, r.instance): r for r in results}
    for r in results:
        of_c, of_off = (
            f"{r.times(found[r.tp, NAMES[name]]):.2f}" for name in (NONE, OFF)
        )
        stored = f"{r.stored_ms:.0f}" if r.stored_ms is not None else "-"
        rounds = ", ".join(f"{ms:.0f}" for ms in r.rounds_ms)
        loads = ", ".join(str(n) for n in r.loads.values()) or "-"
        lines.append(
            f"| {r.tp} | {r.instance} | {r.median_ms:.0f} ({rounds}) | {of_c} | {of_off} "
            f"| {stored} | {r.hit_rate:.1%} | {loads} | {r.same_token} of {r.asked} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--tp",
        type=int,
        nargs="+",
        default=[1, 2],
        metavar="SIZE",
        help="TP sizes of all instances, one after the other (1 or 2)",
    )
    parser.add_argument(
        "--prompts", type=int, default=16, metavar="N", help="prompts per round"
    )
    parser.add_argument(
        "--tokens", type=int, default=4096, metavar="N", help="tokens of each prompt"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        metavar="N",
        help="how often each instance is asked for all prompts; the median counts",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the results there, too"
    )
    args = parser.parse_args()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    results: list[Result] = []
    folder = CACHE / "logs" / "benchmark_store"
    with contextlib.closing(fork_server(folder)) as forks:
        say(f"vLLM is imported; the servers' logs are in {folder}")
        for tp in args.tp:
            results += Benchmark(args, tp, forks, folder / f"tp{tp}").run()
    print(table(results))
    if args.json:
        rows = [
            {**vars(r), "rounds_ms": r.rounds_ms, "median_ms": r.median_ms}
            for r in results
        ]
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    bad = [r for r in results if r.loads.get("mismatch") or r.loads.get("unverified")]
    if bad:
        raise SystemExit("a load of intact KV was not verified")


if __name__ == "__main__":
    main()
