# SPDX-License-Identifier: Apache-2.0
"""Fuzz what clients and peers can send, each kind of message in a process of its own.

``.venv/bin/python tests/fuzz/run.py --minutes 30`` goes through all targets, one after
another on one core, and prints a table; the exit status is 1 if anything broke. What
was found stays in ``.rig/fuzz``. Needs the network once, to fetch atheris.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rig import progress

from fuzz.targets import TARGETS, read_corpus

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

WORK, ATHERIS = ROOT / ".rig/fuzz", ROOT / ".rig/atheris"
REPORT_EVERY_S = 30.0
HANG_S, RSS_LIMIT_MB = 120, 3000  # a shared machine may stop for half a minute


def get_atheris() -> None:
    """Fetch the pinned atheris unless it is there."""
    wanted = HERE / "requirements.txt"
    note = ATHERIS / "requirements.txt"
    if note.exists() and note.read_bytes() == wanted.read_bytes():
        return
    print("fuzz: fetching atheris", flush=True)
    shutil.rmtree(ATHERIS, ignore_errors=True)
    flags = ["--quiet", "--no-deps", "--require-hashes", "--target", str(ATHERIS)]
    pip = [sys.executable, "-m", "pip", "install", *flags, "-r", str(wanted)]
    if subprocess.run(pip).returncode:
        raise SystemExit("fuzz: atheris could not be fetched; check the network")
    shutil.copy(wanted, note)


def prepare(name: str) -> tuple[Path, list[str]]:
    """Return a fresh folder for one target, and the folders with inputs for it."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("corpus", "crashes", "kept"):
        (folder / part).mkdir(parents=True)
    for seed, data in (read_corpus()[name] | TARGETS[name]().long_seeds()).items():
        (folder / "kept" / seed).write_bytes(data)
    return folder, [str(folder / part) for part in ("corpus", "kept")]


def fuzz(name: str, seconds: float, seed: int) -> dict[str, Any]:
    """Fuzz one target; what came of it."""
    folder, inputs = prepare(name)
    arguments = [
        f"-max_total_time={max(1, round(seconds))}",
        f"-max_len={TARGETS[name].max_len}",
        f"-timeout={HANG_S}",
        f"-rss_limit_mb={RSS_LIMIT_MB}",
        f"-seed={seed}",
        f"-artifact_prefix={folder}/crashes/",
        "-print_final_stats=1",
        "-reload=0",
    ]
    child = [sys.executable, str(HERE / "child.py"), name, str(folder)]
    log = folder / "log"
    with log.open("wb") as out:
        running = subprocess.Popen(
            [*child, *arguments, *inputs], stdout=out, stderr=out, cwd=folder
        )
        try:
            code = watch(running, name, seconds, log)
        finally:
            running.kill()
    return result_of(name, folder, code)


def watch(
    running: subprocess.Popen[bytes], name: str, seconds: float, log: Path
) -> int:
    """Tell how far a target is until its process ends; return the exit status."""
    began = told = time.monotonic()
    with progress.bar(round(seconds), f"fuzz: {name}", "s") as bar:
        while True:
            try:
                return running.wait(1)
            except subprocess.TimeoutExpired:
                now = time.monotonic()
            progress.advance(bar, round(now - began))
            if now - told >= REPORT_EVERY_S:
                told = now
                spent = f"{now - began:.0f} s"
                progress.say(f"fuzz: {name}, {spent}: {last_pulse(log)}")


def last_pulse(log: Path) -> str:
    lines = [x for x in log.read_text(errors="replace").splitlines() if "cov: " in x]
    return lines[-1].strip() if lines else "loading"


def result_of(name: str, folder: Path, code: int) -> dict[str, Any]:
    """Return the table's row, from libFuzzer's log and the child's own counts."""
    text = (folder / "log").read_text(errors="replace")

    def number(pattern: str) -> int:
        found = re.findall(pattern, text)
        return int(found[-1]) if found else 0

    own = folder / "child.json"
    child = json.loads(own.read_text()) if own.exists() else {}
    files = [p for p in (folder / "crashes").glob("*") if p.suffix != ".txt"]
    return {
        "target": name,
        "executions": number(r"stat::number_of_executed_units: (\d+)")
        or child.get("runs", 0),
        "per_s": number(r"stat::average_exec_per_sec: +(\d+)"),
        "edges": number(r"cov: (\d+)"),
        "features": number(r"ft: (\d+)"),
        "inputs": number(r"corp: (\d+)"),
        "crashes": len(files),
        "ended_well": code == 0,
        "slowest_ms": round(child.get("slowest_s", 0) * 1000, 1),
        "peak_rss_mb": number(r"stat::peak_rss_mb: +(\d+)"),
        "outcomes": child.get("outcomes", {}),
        "crash_places": child.get("crashes", {}),
    }


COLUMNS = (
    *("target", "executions", "per_s", "edges", "features", "inputs"),
    *("crashes", "slowest_ms", "peak_rss_mb"),
)


def print_table(results: list[dict[str, Any]]) -> None:
    print("\n| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for result in results:
        print("| " + " | ".join(f"{result[c]}" for c in COLUMNS) + " |")
    for result in results:
        print(f"\n{result['target']}: {result['outcomes']}")
        if not result["ended_well"]:
            print(f"  libFuzzer ended it; see {WORK / result['target'] / 'log'}")
        for place, found in result["crash_places"].items():
            print(f"  {place}: {WORK / result['target'] / 'crashes' / found}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="in total (30)")
    parser.add_argument(
        "--target", action="append", choices=TARGETS, help="repeat for several (all)"
    )
    parser.add_argument("--seed", type=int, default=1, help="libFuzzer's seed (1)")
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    options = parser.parse_args()
    get_atheris()
    names = options.target or list(TARGETS)
    shares = sum(TARGETS[name].share for name in names)
    results = []
    for name in names:
        seconds = options.minutes * 60 * TARGETS[name].share / shares
        print(f"fuzz: {name} for {seconds:.0f} s", flush=True)
        results.append(fuzz(name, seconds, options.seed))
    print_table(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(r["crashes"] or not r["ended_well"] for r in results))


if __name__ == "__main__":
    sys.exit(main())
