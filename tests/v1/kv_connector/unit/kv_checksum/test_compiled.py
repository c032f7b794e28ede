# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test the kernel's machine code for GPUs that are not here."""

import json
import os
import subprocess
import sys

import pytest

from .rig import compiled

MAX_INSTRUCTIONS_PER_PIECE = 21
"""An H200 can issue about 25 per 8-byte piece at full memory speed."""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Run a process of its own: Triton decides at import whether it interprets."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, "-m", compiled.__name__],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_it_compiles_everywhere_without_spills(report):
    kernels = report["kernels"]
    assert {k["target"] for k in kernels} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    assert len(kernels) == 4 * len(compiled.SHAPES) + len(compiled.ON_ONE_TARGET)
    assert [k for k in [*kernels, *report["narrow"]] if k["spills"]] == []


def test_loads_are_128_bits_wide(report):
    for kernel in report["kernels"]:
        assert kernel["wide_loads"] > 0, kernel
        if not kernel.get("unrolled", True):
            assert kernel["narrow_loads"] == 0, kernel


def test_few_instructions_per_piece(report):
    """Count the same for all layers, be they compressed or not, and for rings."""
    for kernel in report["kernels"]:
        if "per_piece" in kernel:
            assert kernel["per_piece"] <= MAX_INSTRUCTIONS_PER_PIECE, kernel


def test_one_variant_per_layer_shape(report):
    """Compile once, whatever the layer, the rows, and where they and the sums lie."""
    variants = {"one shape": 1, "small units": 1, "two shapes": 2}
    assert report["variants"] == variants
