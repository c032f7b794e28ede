"""Show verified loads, injected faults, and a corruption that nobody injected.

Real ``vllm serve`` processes, real NIXL over UCX on loopback. Exit status 0 only if
every claim held.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
from rig import progress
from rig.model import tiny_qwen3
from rig.servers import Server, retire, serving

from e2e import pairs  # noqa: E402

MAX_TOKENS = 12

CASES = {"nixl_pull": 9, "nixl_push": 7, "mooncake": 7}
"""How many cases there are over each connector, for the bar."""


@dataclass
class Row:
    """The result of one case."""

    case: str
    policy: str
    http: int
    verdicts: str
    text: str
    holds: bool

    def __str__(self) -> str:
        mark = "ok" if self.holds else "FAILED"
        return (
            f"{self.case:<38} {self.policy:<12} {self.http:<5} "
            f"{self.verdicts:<34} {self.text:<11} {mark}"
        )


class Demo:
    """Runs cases and prints a row for each as soon as it is known."""

    def __init__(self, cases: int) -> None:
        self.began = time.monotonic()
        self.rows: list[Row] = []
        self.bar = progress.bar(cases, "demo", "case")

    def say(self, text: str) -> None:
        """Print what happens now, with the time since the beginning."""
        progress.say(f"[{time.monotonic() - self.began:5.0f} s] {text}")

    def head(self) -> None:
        """Print the names of the columns."""
        progress.say(
            f"{'case':<38} {'policy':<12} {'HTTP':<5} {'loads on D':<34} {'text':<11}"
        )

    def case(
        self,
        case: str,
        policy: str,
        servers: tuple[Server, Server],
        prompts: list[tuple[int, int]],
        request_id: str,
        holds: Callable[[dict[str, int], bool, int], bool],
    ) -> None:
        """Send prompts (length, seed) through P and D, compare with P's own answers."""
        p, d = servers
        counts = dict.fromkeys(pairs.VERDICTS, 0)
        answers: list[httpx.Response] = []
        expected: list[str] = []
        for i, (length, seed) in enumerate(prompts):
            asked, text = pairs.ask_anew(
                p, d, pairs.prompts_of(length, seed), MAX_TOKENS, f"{request_id}-{i}"
            )
            answers.append(asked.answer)
            expected.append(text)
            counts |= {k: counts[k] + n for k, n in asked.counted.items()}
        status = max(a.status_code for a in answers)
        right = status == 200 and [pairs.text_of(a) for a in answers] == expected
        verdicts = ", ".join(f"{v} {k}" for k, v in counts.items() if v)
        text = "right" if right else "wrong" if status == 200 else "error"
        row = Row(case, policy, status, verdicts, text, holds(counts, right, status))
        self.rows.append(row)
        progress.say(row)
        self.bar.update()

    def finish(self) -> int:
        """Print what held and what did not; return the exit status."""
        self.bar.close()
        print()
        for row in self.rows:
            mark = "holds" if row.holds else "DOES NOT HOLD"
            print(f"{mark}: {row.case}, {row.policy}: {row.verdicts}, text {row.text}")
        self.say("done")
        return 0 if self.rows and all(row.holds for row in self.rows) else 1


def clean_and_damaged(
    demo: Demo, p: Server, consumers: dict[str, Server], connector: str
) -> None:
    """Show loads as they are, with one bit flipped, and without their checksums."""
    clean = [(n, 21) for n in (1, 32, 100, 300, 700, 1500)]
    n = len(clean)
    demo.case(
        f"clean loads over {connector}",
        "fail",
        (p, consumers["fail"]),
        clean,
        "clean",
        lambda c, right, _: (
            c == {"verified": n, "mismatch": 0, "unverified": 0} and right
        ),
    )
    for case, request_id, verdict, seed in (
        ("one bit flipped after the transfer", "flip-demo", "mismatch", 22),
        ("checksums lost on the way", "lost-demo", "unverified", 24),
    ):
        for mode, d in consumers.items():
            # A prompt of its own each time: D keeps what it has in its prefix cache.
            demo.case(
                case,
                mode,
                (p, d),
                [(450, seed)],
                request_id,
                lambda c, right, status, mode=mode, verdict=verdict: (
                    c[verdict] == 1
                    and {
                        "fail-open": status == 200,
                        "fail": status == pairs.FAILED_STATUS,
                        "recompute": right,
                    }[mode]
                ),
            )


def vllms_own_corruption(demo: Demo, p: Server, model: Path) -> None:
    """Show that stock vLLM on CPU answers wrong tokens: NIXL pull, block size 32 on P, 64 on D."""
    demo.say("block size 32 on P, 64 on D: nothing is injected from here on")
    larger = {
        mode: pairs.consumer(
            f"demo-d64-{mode}", model, mode, drill=False, block_size=64
        )
        for mode in ("fail-open", "recompute")
    }
    with serving(*larger.values()):
        for mode, d in larger.items():
            demo.case(
                "vLLM's own corruption, 32 to 64",
                mode,
                (p, d),
                [(500, 23)],
                "clean",
                lambda c, right, status, mode=mode: (
                    c["mismatch"] == 1
                    and status == 200
                    and right == (mode == "recompute")
                ),
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connector", choices=pairs.CONNECTORS, default="nixl_pull")
    chosen = parser.parse_args().connector
    connector = pairs.CONNECTORS[chosen]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    demo = Demo(CASES[chosen])
    demo.say("writing a tiny model with random weights")
    model = tiny_qwen3()
    p = pairs.producer("demo-p", model, connector=connector)
    consumers = {
        mode: pairs.consumer(f"demo-d-{mode}", model, mode, connector=connector)
        for mode in pairs.MODES
    }
    demo.say(
        f"starting P, and D in three modes, {connector} (logs: .rig/logs/demo-*.log)"
    )
    with serving(p, *consumers.values()):
        demo.say("ready")
        demo.head()
        clean_and_damaged(demo, p, consumers, connector)
        if chosen == "nixl_pull":
            retire(list(consumers.values()))
            vllms_own_corruption(demo, p, model)
    return demo.finish()


if __name__ == "__main__":
    sys.exit(main())
