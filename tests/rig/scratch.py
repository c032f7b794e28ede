"""Make environments and checkouts in which installing can be tried, without an index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from rig.model import CACHE


def make_venv(folder: Path) -> Path:
    """Make an environment that has all of this one but vLLM and this project, and return its ``site-packages``."""
    venv = [sys.executable, "-m", "venv", "--symlinks", "--without-pip"]
    subprocess.run([*venv, folder], check=True)
    site = next((folder / "lib").iterdir()) / "site-packages"
    (packages,) = Path(sys.prefix).glob("lib/python3*/site-packages")
    for path in packages.iterdir():
        if "vllm" not in path.name.lower():
            (site / path.name).symlink_to(path)
    pip = folder / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec {folder}/bin/python -m pip "$@"\n')
    pip.chmod(0o755)
    return site


def environment(venv: Path) -> dict[str, str]:
    """Return variables with which commands run there, and pip builds with what is there."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    path = f"{venv}/bin:{kept['PATH']}"
    return kept | {"PATH": path, "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0"}


def checkout(target: Path) -> Path:
    """Copy what ``pip install .`` reads of this repository, and return where."""
    root = CACHE.parent
    for name in ("vllm", "vllm_kv_checksum"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root / name, target / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy2(root / name, target / name)
    return target
