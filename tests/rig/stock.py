"""Put an unpatched vLLM beside the environment's patched one: links, and what ``vllm-kv-checksum revert`` restores."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from rig.forkserver import ForkServer
from rig.model import CACHE
from rig.servers import fork_server
from vllm_kv_checksum.apply import find_package

FOLDER = CACHE / "stock"


def stock_environment(folder: Path = FOLDER) -> dict[str, str]:
    """Return what makes a process import the unpatched vLLM, building its tree first.

    Every file of the installed package is a link in the tree, until the installer puts vLLM's originals in the place
    of those that the series edits and takes the feature out. Raises if anything of the feature is left.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    link_stock_vllm(folder)
    for path in folder.joinpath("vllm").rglob("*.py"):
        if "kv_checksum" in path.read_text(errors="replace"):
            raise RuntimeError(f"{path} is not vLLM's own")
    return {"PYTHONPATH": str(folder)}


def link_stock_vllm(site: Path) -> None:
    """Put an unpatched vLLM, made of links where the series edits nothing, into a folder of packages.

    It is of the release that this process imports.
    """
    tool = str(Path(sys.executable).parent / "vllm-kv-checksum")
    installed = find_package(None)
    _link_tree(installed, site / "vllm")
    for metadata in installed.parent.glob("vllm-*.dist-info"):
        _link_tree(metadata, site / metadata.name)
    subprocess.run([tool, "revert", "--tree", str(site)], check=True)


def link_patched_vllm(site: Path, patches: int) -> None:
    """Put a vLLM with the first patches of the series into a folder of packages."""
    from vllm_kv_checksum.cli import feature_dir
    from vllm_kv_checksum.patches import changes_of_patches

    link_stock_vllm(site)
    changes = changes_of_patches(find_package(None), feature_dir())
    for _, files in itertools.islice(changes, patches):
        for change in files:
            path = site / change.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.write_bytes(change.new)


def stock_fork_server() -> tuple[ForkServer, dict[str, str]]:
    """Start a fork server of the unpatched vLLM; return it and the environment that its servers need too."""
    env = stock_environment()
    return fork_server(CACHE / "logs" / "stock", env), env


def _link_tree(source: Path, target: Path) -> None:
    """Rebuild the folder with a link for every file; links to folders are followed."""
    for folder, _, files in os.walk(source, followlinks=True):
        here = target / Path(folder).relative_to(source)
        here.mkdir(parents=True, exist_ok=True)
        for name in files:
            (here / name).symlink_to(Path(folder) / name)
