"""Run a mutant's tests in a process that is forked from one with the packages that vLLM imports.

They are most of what a run waits for, and no mutant is in them. Import ``preloaded`` in the fork server; vLLM
itself is imported behind the fork, because a mutant's module must be read with its change.
"""

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rig import processes

HERE = Path(__file__).resolve().parent


def run(
    module: str, arguments: Sequence[str], env: Mapping[str, str], cwd: str, log: str
) -> None:
    """Turn this process into pytest on a mutant of ``module``; never returns."""
    code = 3
    try:
        processes.lead_session(Path(log))
        os.chdir(cwd)
        os.environ.update(env)
        sys.argv = ["pytest", *arguments]
        code = _tests_of(module, arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _tests_of(module: str, arguments: Sequence[str]) -> int:
    if module in sys.modules:
        raise RuntimeError(f"{module} was imported before it could be changed")
    if "numba" in sys.modules:
        from numba.core import config

        config.reload_config()  # the cache's folder may be the mutant's own
    path = HERE / "sitecustomize.py"
    spec = importlib.util.spec_from_file_location("kv_checksum_mutant", path)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    import pytest

    return int(pytest.main(list(arguments)))
