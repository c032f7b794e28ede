"""Test that the published counts of instructions are those of the kernel as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from kernel_instructions import PATHS, RESULT, ROOT

KINDS = (
    "64 tokens, 82 pieces of 8 bytes",
    "64 states of 4 tokens, 1 of 73 pieces of 8 bytes",
    "64 tokens, 32 of 33 pieces of 4 bytes",
    "8 rows, state rows, 4096 pieces of 2 bytes",
)
"""A long loop, tiles of many small units, units of narrow pieces, and the narrowest."""

COUNT_AGAIN = """
import json, sys
import kernel_instructions as counted
found = [
    [kind.geometry.name, kind.counts[target], counted.count(kind.geometry, target)]
    for kind in counted.Result.read().kinds
    for target in ("sm_90", "gfx942")
    if kind.geometry.name in sys.argv[1:]
]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def again():
    """Run a process of its own: Triton decides at import whether it interprets."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [*PATHS, "benchmarks/kernels"]
    env["PYTHONPATH"] = os.pathsep.join(str(ROOT / path) for path in paths)
    command = [sys.executable, "-c", COUNT_AGAIN, *KINDS]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_counts_of_several_kinds_are_the_published_ones(again):
    assert {name for name, *_ in again} == {*KINDS}
    changed = [name for name, published, now in again if published != now]
    assert changed == [], f"make {RESULT.name} anew: see kernel_instructions.py"
