# SPDX-License-Identifier: Apache-2.0
"""Fuzz one target in this process, under atheris; `run` starts it.

``child.py TARGET FOLDER [libFuzzer's arguments]``. What breaks the oracle is kept in
``FOLDER/crashes``, one input per place in the code, and fuzzing goes on. What libFuzzer
itself ends the process for (a hang, memory) it writes there too.
"""

import gc
import json
import operator
import random
import resource
import sys
import time
import traceback
from collections import Counter
from hashlib import sha256
from pathlib import Path
from types import FunctionType

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / ".rig/atheris"))

import atheris  # noqa: E402
import numpy as np  # noqa: E402
import psutil  # noqa: E402

from fuzz.base import Target, check, quiet  # noqa: E402
from fuzz.mutate import mutate  # noqa: E402
from fuzz.targets import TARGETS  # noqa: E402

FEATURE = "vllm.distributed.kv_transfer.kv_checksum"

SPARE_MEMORY = 512 * 2**20
"""What the process may map beyond what it has at the start."""

MEMORY_EVERY = 16
"""Every so many inputs, memory is measured."""

INVENTED = 0.15
"""Share of the inputs that a target makes up, where it does."""


class Fuzzer:
    """Runs inputs and keeps count."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.target, self.folder = target, folder
        self.runs, self.slowest, self.noted = 0, 0.0, 0.0
        self.outcomes: Counter[str] = Counter()
        self.crashes: dict[str, str] = {}

    def one(self, data: bytes) -> None:
        if not self.runs:
            free_what_arrays_compare_to()  # not before atheris has begun
        self.runs += 1
        try:
            with quiet() as lines:
                outcome, spent = check(
                    self.target, data, lines, memory=self.runs % MEMORY_EVERY == 0
                )
            if self.runs % MEMORY_EVERY:
                self.slowest = max(self.slowest, spent)
        except Exception as error:
            outcome = "crash"
            self.keep(data, error)
        self.outcomes[outcome] += 1
        if time.monotonic() - self.noted > 1:
            self.note()

    def keep(self, data: bytes, error: Exception) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        here = [f for f in frames if str(ROOT) in f.filename]
        last = here[-1] if here else frames[-1]
        place = f"{type(error).__name__} {Path(last.filename).name}:{last.lineno}"
        if place in self.crashes:
            return
        name = sha256(data).hexdigest()[:16]
        self.crashes[place] = name
        (self.folder / "crashes" / name).write_bytes(data)
        text = "".join(traceback.format_exception(error))
        (self.folder / "crashes" / f"{name}.txt").write_text(text)
        print(f"\ncrash {name}: {place}: {str(error)[:200]}", file=sys.stderr)
        self.note()

    def note(self) -> None:
        self.noted = time.monotonic()
        found = {
            "runs": self.runs,
            "slowest_s": round(self.slowest, 4),
            "outcomes": dict(self.outcomes.most_common()),
            "crashes": self.crashes,
        }
        scratch = self.folder / "child.new"
        scratch.write_text(json.dumps(found))
        scratch.replace(self.folder / "child.json")

    def mutated(self, data: bytes, max_size: int, seed: int) -> bytes:
        """Change an input: half of all changes keep the message's form, some inputs are made anew."""
        draw = random.Random(seed)
        if draw.random() < INVENTED and (invented := self.target.invent(draw)):
            return invented
        if draw.random() < 0.5:
            try:
                tree = self.target.parse(bytes(data))
                for _ in range(draw.choice((1, 1, 1, 2, 3))):
                    tree = mutate(tree, draw)
                if draw.random() < 0.5:
                    self.target.repair(tree)
                changed = self.target.unparse(tree)
            except Exception:
                pass  # no message, or none any more
            else:
                if len(changed) <= max_size:
                    return changed
        return atheris.Mutate(data, max_size)


def instrument(target: type[Target]) -> None:
    """Record coverage in the feature's modules and in the target's functions of vLLM.

    atheris' own import hook takes all of vLLM, which loads for minutes.
    """
    modules = [m for name, m in sys.modules.items() if name.startswith(FEATURE)]
    owners: list[object] = []
    for module in modules:
        owners.append(module)
        owners += [
            v
            for v in vars(module).values()
            if isinstance(v, type) and v.__module__ == module.__name__
        ]
    functions = [
        getattr(value, "__func__", getattr(value, "fget", value))
        for owner in owners
        for value in vars(owner).values()
    ]
    files = {module.__file__ for module in modules}
    for function in {
        id(f): f for f in functions if isinstance(f, FunctionType)
    }.values():
        if function.__code__.co_filename in files:
            atheris.instrument_func(function)
    for function in target.of_vllm:
        atheris.instrument_func(function)


def free_what_arrays_compare_to() -> None:
    """Keep comparisons of arrays from atheris 3.0.0, which never frees their results."""
    trace, o = atheris._trace_cmp, operator
    compare = (o.lt, o.le, o.eq, o.ne, o.gt, o.ge)
    arrays = np.ndarray, np.generic

    def traced(left: object, right: object, which: int, *place: object) -> object:
        if isinstance(left, arrays) or isinstance(right, arrays):
            return compare[which](left, right)
        return trace(left, right, which, *place)

    atheris._trace_cmp = traced


def limit_memory() -> None:
    limit = psutil.Process().memory_info().vms + SPARE_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    name, folder, *arguments = sys.argv[1:]
    instrument(TARGETS[name])
    fuzzer = Fuzzer(TARGETS[name](), Path(folder))
    atheris.Setup([sys.argv[0], *arguments], fuzzer.one, custom_mutator=fuzzer.mutated)
    limit_memory()
    gc.freeze()  # as vLLM's engine does: what was imported takes 0.4 s to look through
    atheris.Fuzz()


if __name__ == "__main__":
    main()
