"""Run the tests that need a CUDA card (``make test-gpu``).

An environment of its own (``.venv-gpu``) gets vLLM's CUDA wheel and this project, applied to it. Where that wheel cannot
be installed, torch and Triton alone do: the kernel's and the worker's tests run, the servers' are left out, which is said.
Where nothing can be installed, the Python that runs this serves, if it has them. ``--python`` names one to use as it is.

The exit status is 77 without a card, 78 if no environment sees it, else that of the tests.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNIT = "tests/v1/kv_connector/unit/kv_checksum"
LOCK = ROOT / "tests" / "rig" / "requirements.lock"

NO_CARD, NO_ENVIRONMENT = 77, 78
"""Exit statuses; the first is what test programs say by custom if they cannot run."""

VLLM = "vllm==0.33.0"
ALONE = ("torch", "triton", "numpy", "matplotlib")
"""What the kernel's and the worker's tests need, and the report's plot."""

KERNEL_TESTS = (f"{UNIT}/test_kernels.py", f"{UNIT}/test_cuda.py")
WORKER_TESTS = tuple(
    f"{UNIT}/test_{name}.py"
    for name in (
        "worker",
        "rows",
        "states",
        "rings",
        "context_parallel",
        "stream_order",
    )
)
SERVER_TESTS = ("tests/gpu/test_servers.py",)

SEES_CARD = "import pytest, torch, triton; assert torch.cuda.is_available()"
HAS_VLLM = "import vllm; assert vllm.__version__ and vllm.__file__"


def cards() -> int:
    """Return how many CUDA cards the driver tells of, without any package."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    number = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number)):
        return 0
    return number.value


def pinned(*names: str) -> list[str]:
    """Return requirements of these packages, in the versions of the lock."""
    found = dict(re.findall(r"^([\w.-]+)==(\S+)", LOCK.read_text(), re.M))
    return [f"{name}=={found[name]}" for name in names]


def can(python: str | Path, code: str) -> bool:
    """Tell whether a Python runs some code, outside the checkout."""
    done = subprocess.run(
        [str(python), "-c", code], cwd="/", capture_output=True, check=False
    )
    return done.returncode == 0


def _run(*command: str | Path) -> bool:
    print("+", *command, flush=True)
    return (
        subprocess.run([str(c) for c in command], cwd=ROOT, check=False).returncode == 0
    )


def _installed(folder: Path, *packages: str) -> Path | None:
    """Make an environment with these packages; return its Python, or None if that fails."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.EnvBuilder(with_pip=True, symlinks=True).create(folder)
    tests = pinned("pytest", "pytest-timeout")
    if not _run(python, "-m", "pip", "install", "-q", *tests, *packages):
        return None
    return python if can(python, SEES_CARD) else None


def environment(folder: Path) -> tuple[Path, bool] | None:
    """Return a Python that sees the card and whether it has vLLM, or None."""
    python = _installed(folder, VLLM)
    if python is not None:
        command = python.parent / "vllm-kv-checksum"
        if (
            _run(python, "-m", "pip", "install", "-q", "-e", ROOT)
            and _run(command, "revert") | _run(command, "apply", "--link")
            and can(python, HAS_VLLM)
        ):
            return python, True
    print(f"{VLLM} cannot be used here: torch and Triton alone", flush=True)
    python = _installed(folder.with_name(folder.name + "-alone"), *ALONE)
    if python is not None:
        return python, False
    print("nothing can be installed: the Python that runs this", flush=True)
    if can(sys.executable, SEES_CARD):
        return Path(sys.executable), can(sys.executable, HAS_VLLM)
    return None


Suite = tuple[str, Sequence[str], dict[str, str]]
"""A name, test files, and their environment."""


def suites(with_vllm: bool) -> list[Suite]:
    """Return what is run."""
    checked = {"VLLM_GPU_SYNC_CHECK": "error"}
    name = "the kernels and the order of streams"
    found: list[Suite] = [(name, KERNEL_TESTS, checked)]
    if with_vllm:
        found.append(("the worker", WORKER_TESTS, checked))
        found.append(("two servers on one card", SERVER_TESTS, checked))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, help="an environment to use as it is")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-gpu")
    args = parser.parse_args(arguments)
    number = cards()
    if number == 0:
        print("test-gpu: NOT RUN: this machine has no CUDA card", file=sys.stderr)
        return NO_CARD
    if args.python is not None:
        sees = can(args.python, SEES_CARD)
        found = (args.python, can(args.python, HAS_VLLM)) if sees else None
    else:
        found = environment(args.folder)
    if found is None:
        print(
            "test-gpu: NOT RUN: no torch and Triton that see the card", file=sys.stderr
        )
        return NO_ENVIRONMENT
    python, with_vllm = found
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    outcomes = {}
    for name, files, more in suites(with_vllm):
        command = [str(python), "-m", "pytest", "-q", "-rs", *files]
        print("+", *command, flush=True)
        env = {**inherited, **more}
        outcomes[name] = subprocess.run(
            command, cwd=ROOT, env=env, check=False
        ).returncode
    for name, status in outcomes.items():
        print(f"test-gpu: {name}: {'passed' if status == 0 else f'FAILED ({status})'}")
    if not with_vllm:
        print(
            "test-gpu: the worker's own and the servers' tests were left out: no vLLM"
        )
    return max(outcomes.values())


if __name__ == "__main__":
    sys.exit(main())
