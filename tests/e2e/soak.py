"""Run a mixed load over NIXL pull for a long time, with a share of its transfers damaged.

Real ``vllm serve`` processes P and D, real NIXL over UCX on loopback. D fails loads that
it cannot verify (fail-closed, policy "fail"), so that every verdict reaches a client. At
the end every damaged load must have been refused, no other one, the tables of the
checksums must be as empty as at the beginning, and no process may have grown. Exit status
0 only if all that holds; what was measured is written as it goes (``--json``).
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rig import progress, verdicts
from rig.forkserver import ForkServer
from rig.memory import Sampler, Trend, trend
from rig.model import CACHE, tiny_qwen3
from rig.routing import prefill_decode
from rig.servers import Server, serving

from e2e import pairs  # noqa: E402
from e2e.load import Clients, Draws, Tally, seen  # noqa: E402

FLAT = 0.01
"""What a process may grow, as a share of its resident memory, over the last two thirds."""

JUDGED_FROM_MINUTES = 10
"""In a shorter run servers are still taking what they need; growth is reported only."""

BOUNDED = ("reporter._warned", "evidence.recent", "peers._named", "living Peer")
"""Tables that hold one entry per fixed reason, the last mismatches, or the peers that have names: never more than some."""

SERVERS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0",
}
"""API server and engine in processes of their own, as vLLM has them by default. On a CPU,
oneDNN keeps code compiled for each number of tokens (1024 matrix products, hundreds of MiB
until it is full): without that, what grows is the servers' own."""


@dataclass(frozen=True)
class Settings:
    """The settings of one run. With ``control`` checksums are off, nothing is damaged, and growth alone is measured."""

    minutes: float = 30
    share: float = 0.02
    seed: int = 1
    clients: int = 16
    control: bool = False
    report_every_s: float = 60
    sample_every_s: float = 5


class Soak:
    """One run against servers that are up."""

    def __init__(
        self, p: Server, d: Server, settings: Settings, results: Path | None
    ) -> None:
        self.p, self.d, self.settings = p, d, settings
        self._results = results
        self._began = time.monotonic()
        self._faults = {} if settings.control else pairs.every_fault()
        share = 0.0 if settings.control else settings.share
        draws = Draws(settings.seed, share, self._faults)
        self._clients = Clients(p, d, draws, settings.clients)
        self._rows: list[dict[str, Any]] = []
        self._end: dict[str, Any] = {}

    @property
    def tally(self) -> Tally:
        """Return what became of the requests."""
        return self._clients.tally

    def run(self) -> list[str]:
        """Run the soak, and return what did not hold."""
        for n in range(3):
            warm = pairs.prompt_of(90 + n, self.settings.seed)
            prefill_decode(self.p, self.d, warm, 2).raise_for_status()
        time.sleep(1)
        before = [server.checksum_tables() for server in (self.p, self.d)]
        loads = verdicts.counted(self.d)
        sampler = Sampler((self.p, self.d), self.settings.sample_every_s)
        self._began = time.monotonic()
        self._clients.start()
        try:
            self._watch(sampler)
        finally:
            self._clients.stop()
            sampler.close()
            self._write(sampler)
        if self.p.alive() and self.d.alive():
            if not self.settings.control:
                self.tally.problems += verdicts.problems(self.p)
                self.tally.problems += verdicts.problems(self.d)
                self._judge_loads(loads)
            self._judge_tables(before)
            self._judge_memory(sampler)
            self._write(sampler)
        return self.tally.problems

    def _watch(self, sampler: Sampler) -> None:
        """Report until the time is over or a server is gone."""
        seconds = 60 * self.settings.minutes
        next_row = self._began
        with progress.bar(round(seconds), "soak", "s") as bar:
            while (now := time.monotonic()) < self._began + seconds:
                gone = [x.name for x in (self.p, self.d) if not x.alive()]
                if gone:
                    self.tally.problem(f"{' and '.join(gone)} ended")
                    return
                if now >= next_row:
                    next_row = now + self.settings.report_every_s
                    self._report(sampler)
                    self._write(sampler)
                requests = self.tally.asked.total()
                problems = len(self.tally.problems)
                told = dict(requests=requests, problems=problems)
                progress.advance(bar, round(now - self._began), **told)
                time.sleep(0.5)
        self._report(sampler)

    def _report(self, sampler: Sampler) -> None:
        """Print one line and keep it."""
        tally = self.tally
        last = {name: found[-1][1] for name, found in sampler.samples().items()}
        row = {
            "minute": round((time.monotonic() - self._began) / 60, 2),
            "requests": sum(tally.asked.values()),
            "answered": tally.answered,
            "clients that left": tally.left,
            "compared": tally.compared,
            "damaged": sum(tally.damaged.values()),
            "refused": self._refused(),
            "problems": len(tally.problems),
            **pairs.loads(self.d),
        }
        self._rows.append({**row, "rss_kib": last})
        rss = ", ".join(f"{k} {v / 1024:.0f}" for k, v in sorted(last.items()))
        progress.say("; ".join(f"{k} {v}" for k, v in row.items()))
        progress.say(f"    RSS in MiB: {rss}")

    def _refused(self) -> int:
        """Return how many clients were told that their damaged load failed."""
        tally = self.tally
        return sum(map(tally.told, ("mismatch", "not verified", "failed")))

    def _judge_loads(self, before: verdicts.Loads) -> None:
        """Compare D's counters with what clients were told and what the drill did."""
        tally, log = self.tally, self.d.log_text()
        done = set(re.findall(r"FAULT DRILL: \S+ (?:.* )?of (\S+)", log))
        left = set(re.findall(r"FAULT DRILL left (\S+) as it is", log))
        for request_id in tally.not_refused:
            if not any(f"-{request_id}-" in x for x in left):
                tally.problem(f"{request_id} was damaged and served")
        refused = self._refused()
        after = verdicts.counted(self.d)
        found = {k: after.of(k) - before.of(k) for k in pairs.VERDICTS}
        self._judge_starts(after.started - before.started)
        expected = {
            "mismatch": tally.told("mismatch"),
            "unverified": tally.told("not verified"),
        }
        if not pairs.TELLS_WHY:
            expected = {"mismatch": refused - found["unverified"]}
        if len(done) != refused:
            tally.problem(f"{len(done)} loads were damaged, {refused} refused")
        for verdict, number in expected.items():
            if found[verdict] != number:
                tally.problem(f"{found[verdict]} loads {verdict}, told {number}")
        failed = self.d.metric("vllm:kv_checksum_failed_total")
        if failed != refused:
            tally.problem(f"D counts {failed:.0f} failed requests, not {refused}")
        if not found["verified"]:
            tally.problem("no load was verified")
        self._end["loads"] = found
        self._end["D"] = {
            name: self.d.metric(f"vllm:{name}_total")
            for name in (
                "kv_checksum_blocks_compared",
                "prefix_cache_hits",
                "num_preemptions",
            )
        }
        self._end["damaged"] = seen(tally, list(self._faults.values()))
        self._end["left as they were by the drill"] = len(left)

    def _judge_starts(self, started: int) -> None:
        """Check that every answered request began with a load: some part of a prompt is never found locally."""
        tally = self.tally
        told = tally.answered + sum(tally.damaged.values())
        if not told <= started <= told + tally.left_d:
            tally.problem(
                f"{started} loads started, {told} requests were answered and "
                f"{tally.left_d} left"
            )
        self._end["loads started"] = started

    def _judge_tables(self, before: list[dict[str, int]], timeout: float = 60) -> None:
        """Check that tables become what they were; requests that clients left may take their time."""
        deadline = time.monotonic() + timeout
        while grown := self._grown_tables(before):
            if time.monotonic() > deadline:
                self.tally.problem(f"tables did not empty: {grown}")
                break
            time.sleep(2)
        self._end["tables not empty"] = grown

    def _grown_tables(self, before: list[dict[str, int]]) -> dict[str, int]:
        grown = {}
        for server, then in zip((self.p, self.d), before, strict=True):
            for name, size in server.checksum_tables().items():
                if size > then.get(name, 0) and not name.endswith(BOUNDED):
                    grown[f"{server.name} {name}"] = size - then.get(name, 0)
        return grown

    def _judge_memory(self, sampler: Sampler) -> None:
        """Fit a line to the memory of each process and say what grows."""
        self._end["memory"] = rows = {}
        for name, line in lines_of(sampler.samples(), self.settings.minutes).items():
            rows[name] = {**asdict(line), "growth": line.growth}
            print(f"{name}: {told(line)}", flush=True)
            if grows(line, self.settings.minutes) and name.endswith("RSS"):
                self.tally.problem(f"{name} grows: {told(line)}")

    def _write(self, sampler: Sampler) -> None:
        """Put what is known so far into the file of results."""
        if self._results is None:
            return
        known = {
            "settings": asdict(self.settings),
            "asked": dict(self.tally.asked),
            "minutes": self._rows,
            **self._end,
            "problems": self.tally.problems,
            "samples (minute, RSS KiB, PSS KiB)": sampler.samples(),
        }
        scratch = self._results.with_suffix(".part")
        scratch.write_text(json.dumps(known, indent=1) + "\n")
        scratch.replace(self._results)


def lines_of(
    samples: dict[str, list[tuple[float, int, int]]], minutes: float
) -> dict[str, Trend]:
    """Return the trend of the last two thirds, by process and measure; not of a process that ended before."""
    lines = {}
    for name, found in samples.items():
        late = [sample for sample in found if sample[0] >= minutes / 3]
        for column, measure in ((1, "RSS"), (2, "PSS")):
            if len(late) >= 3:
                points = [(sample[0], float(sample[column])) for sample in late]
                lines[f"{name} {measure}"] = trend(points)
    return lines


def grows(line: Trend, minutes: float) -> bool:
    """Return whether a process grew by more than `FLAT`, beyond doubt, in a run that is long enough to tell."""
    certain = line.slope > 2 * line.error
    return minutes >= JUDGED_FROM_MINUTES and certain and line.growth > FLAT


def told(line: Trend) -> str:
    """Return a trend in words."""
    return (
        f"{line.mean / 1024:.1f} MiB, slope {line.slope:+.1f} +- {line.error:.1f} "
        f"KiB/min over {line.minutes:.1f} min ({100 * line.growth:+.2f}%)"
    )


def run(
    settings: Settings,
    *,
    name: str = "soak",
    results: Path | None = None,
    forks: ForkServer | None = None,
) -> Soak:
    """Start P and D, run, and stop them. What did not hold is in the result's ``tally.problems``."""
    common: dict[str, Any] = {
        "dtype": "float32",
        "env": SERVERS,
        "fork_server": forks,
    }
    model, on = tiny_qwen3("float32"), not settings.control
    p = pairs.producer(f"{name}-p", model, on=on, **common)
    d = (
        pairs.consumer(f"{name}-d", model, "fail", faults=pairs.every_fault(), **common)
        if on
        else Server(f"{name}-d", "kv_consumer", model=model, **common)
    )
    soak = Soak(p, d, settings, results)
    try:
        with serving(p, d):
            soak.run()
    except AssertionError:
        # What servers are asked when they are stopped, the soak has asked and noted.
        if not soak.tally.problems:
            raise
    return soak


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = Settings()
    add = parser.add_argument
    add("--minutes", type=float, default=defaults.minutes)
    add("--share", type=float, default=defaults.share, help="share of damaged loads")
    add("--seed", type=int, default=defaults.seed)
    add("--clients", type=int, default=defaults.clients, help="requests at once")
    add("--control", action="store_true", help="checksums off, nothing damaged")
    add("--json", type=Path, default=CACHE / "soak.json", help="file of results")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    settings = Settings(
        given.minutes, given.share, given.seed, given.clients, given.control
    )
    print(f"{settings}; results: {given.json}", flush=True)
    problems = run(settings, results=given.json).tally.problems
    for problem in problems[:50]:
        print(f"DOES NOT HOLD: {problem}")
    if len(problems) > 50:
        print(f"DOES NOT HOLD: {len(problems) - 50} more, see {given.json}")
    print("soak:", f"{len(problems)} problems" if problems else "everything held")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
