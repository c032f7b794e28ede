"""Break the feature, or its installer, one line at a time, and run the tests that ought to see it (``make mutants``).

The breaks are data (``tests/v1/kv_connector/unit/kv_checksum/data/mutants.toml``), chosen for what they mean in service, and
located by module, function and text. A break is made in memory, as the module is imported
(``mutating/sitecustomize.py``), so several run at once and no file is touched. Each has a process of its own, forked
from one that has imported the packages under vLLM. A break that no test sees is told with what
goes wrong in service.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

import tomllib
import torch

from rig import processes, progress
from rig.mutating import forked
from rig.mutating.change import changed_source

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "tests" / "v1" / "kv_connector" / "unit" / "kv_checksum"
DATA = UNIT / "data" / "mutants.toml"

SEEN, SURVIVED, BROKEN, LEFT_OUT = "seen", "SURVIVED", "NOT RUN", "left out"


@dataclass(frozen=True)
class Mutant:
    """One break. ``tests`` are names of unit test files without ``test_``, or paths.

    A path may go on with ``::`` and the name of one test.

    With ``gpu``, only tests on a GPU can see it; without one it is left out.
    """

    id: str
    module: str
    function: str
    before: str
    after: str
    why: str
    tests: tuple[str, ...]
    gpu: bool = False

    def source(self) -> str:
        """Return the module's source with the break, or raise ``ValueError``."""
        # Packages on the way are not imported: a model's want what no test needs.
        package, *rest = self.module.split(".")
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise ValueError(f"no package {package}")
        file = Path(spec.origin)
        if rest:
            file = file.parent.joinpath(*rest).with_suffix(".py")
        if not file.exists():
            raise ValueError(f"no module {self.module}")
        return changed_source(file.read_text(), self.function, self.before, self.after)

    def test_files(self) -> list[Path]:
        """Return the files of the tests that ought to see it."""
        return [Path(test.partition("::")[0]) for test in self.selected()]

    def selected(self) -> list[str]:
        """Return what pytest is asked to run: files, or single tests of a file."""
        return [
            str(ROOT / name if "/" in name else UNIT / f"test_{name}.py")
            for name in self.tests
        ]


def read() -> list[Mutant]:
    """Return all mutants."""
    entries = tomllib.loads(DATA.read_text())["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def gone() -> list[tuple[str, str]]:
    """Return the ids of breaks that are none today, each with the reason."""
    entries = tomllib.loads(DATA.read_text())["gone"]
    return [(entry["id"], entry["why"]) for entry in entries]


def run(mutant: Mutant, timeout: float) -> tuple[str, str]:
    """Run a mutant's tests; return the outcome, and the first test that failed or what is wrong."""
    try:
        mutant.source()
    except (ValueError, SyntaxError) as error:
        return BROKEN, str(error)
    if mutant.gpu and not torch.cuda.is_available():
        return LEFT_OUT, "it needs a GPU"
    with tempfile.TemporaryDirectory(prefix="kv-checksum-mutant-") as folder:
        told = Path(folder) / "mutant.json"
        change = {x: getattr(mutant, x) for x in ("function", "before", "after")}
        told.write_text(json.dumps({"module": mutant.module, "change": change}))
        env = {
            "KV_CHECKSUM_MUTANT": str(told),
            "PYTHONPATH": str(Path(__file__).parent / "mutating"),
        }
        if mutant.module.endswith(".numba_kernel"):
            # Compiled code is kept by file, and callers have what they call inlined.
            env["NUMBA_CACHE_DIR"] = folder
        files = mutant.selected()
        options = ["-q", "-x", "-p", "no:cacheprovider", "--basetemp", f"{folder}/tmp"]
        options += ["-m", "not e2e and not slow and not campaign and not upstream"]
        log = f"{folder}/log"
        told_to = (mutant.module, [*files, *options], env, str(ROOT), log)
        process = _context().Process(target=forked.run, args=told_to)
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            processes.end(process.pid, polite_s=0)
            process.join()
            return SEEN, f"no end within {timeout:.0f} s"
        return _outcome(process.exitcode, Path(log).read_text())


@cache
def _context() -> ForkServerContext:
    """Return the way to start processes: forked from one that has imported what all need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rig.mutating.preloaded"])
    # The fork server finds its preload by the environment alone.
    os.environ["PYTHONPATH"] = str(ROOT / "tests")
    return context


def _outcome(status: int, output: str) -> tuple[str, str]:
    failed = [x for x in output.splitlines() if x.startswith(("FAILED ", "ERROR "))]
    tests = [
        x.split(" ")[1] for x in failed if "::" in x or x.startswith("ERROR tests")
    ]
    if status in (1, 2) and tests:
        return SEEN, tests[0]
    if status == 0:
        return SURVIVED, ""
    return BROKEN, f"pytest ended with {status}: {output[-300:]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutants that were asked for; return 1 if any was not seen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("ids", nargs="*", metavar="ID", help="which; all by default")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=float, default=900, metavar="SECONDS")
    parser.add_argument("--json", type=Path, metavar="FILE", help="outcomes, by id")
    args = parser.parse_args(arguments)
    known = {mutant.id: mutant for mutant in read()}
    if unknown := sorted(set(args.ids) - known.keys()):
        parser.error(f"no mutants {', '.join(unknown)} in {DATA.relative_to(ROOT)}")
    chosen = [known[i] for i in args.ids] or list(known.values())
    outcomes: dict[str, tuple[str, str]] = {}
    for mutant, outcome in _outcomes(chosen, args.jobs, args.timeout):
        outcomes[mutant.id] = outcome
        if args.json:
            args.json.write_text(json.dumps(outcomes, indent=1))
    return _tell(chosen, outcomes)


def _outcomes(
    chosen: list[Mutant], jobs: int, timeout: float
) -> Iterator[tuple[Mutant, tuple[str, str]]]:
    began = time.monotonic()
    with (
        ThreadPoolExecutor(jobs) as pool,
        progress.bar(len(chosen), "mutants", "mutant") as bar,
    ):
        runs = {pool.submit(run, mutant, timeout): mutant for mutant in chosen}
        for number, ended in enumerate(as_completed(runs), 1):
            mutant, outcome = runs[ended], ended.result()
            left = (time.monotonic() - began) / number * (len(chosen) - number)
            progress.say(
                f"{number}/{len(chosen)} {mutant.id} {outcome[0]} {outcome[1]} "
                f"(about {left:.0f} s to go)"
            )
            bar.update()
            yield mutant, outcome


def _tell(chosen: list[Mutant], outcomes: dict[str, tuple[str, str]]) -> int:
    missed = [
        mutant for mutant in chosen if outcomes[mutant.id][0] not in (SEEN, LEFT_OUT)
    ]
    for mutant in missed:
        outcome, detail = outcomes[mutant.id]
        print(
            f"\n{mutant.id} {outcome} in {mutant.module}, {mutant.function}: {detail}"
        )
        print(f"  {mutant.before.strip()}\n  -> {mutant.after.strip()}")
        print(f"  {mutant.why}\n  tried: {', '.join(map(str, mutant.tests))}")
    left_out = sum(outcome == LEFT_OUT for outcome, _ in outcomes.values())
    seen = len(chosen) - len(missed) - left_out
    told = f", {left_out} left out, which need a GPU" if left_out else ""
    print(f"\nmutants: {seen} of {len(chosen)} seen{told}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
