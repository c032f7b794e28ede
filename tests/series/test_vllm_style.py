"""Test that the applied tree passes vLLM's own checks, with no finding that stock does not have.

The rules are those of this project's `pyproject.toml`, which are vLLM's.
"""

import ast
import difflib
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from vllm_kv_checksum.apply import FEATURE, find_package, make_plan
from vllm_kv_checksum.cli import feature_dir
from vllm_kv_checksum.series import load_series

CONFIG = Path(__file__).resolve().parents[2] / "pyproject.toml"
HEADER = (
    "# SPDX-License-Identifier: Apache-2.0",
    "# SPDX-FileCopyrightText: Copyright contributors to the vLLM project",
)
FORBIDDEN = {
    "base64": "pybase64",
    "re": "regex",
    "pickle": "msgspec",
    "cloudpickle": "msgspec",
    "triton": "vllm.triton_utils",
}
"""Modules that vLLM's checks forbid to import, and what to import instead."""


@pytest.fixture(scope="module")
def plan():
    return make_plan(find_package(None), load_series(), feature_dir(), force=True)


@pytest.fixture(scope="module")
def trees(plan, tmp_path_factory):
    """Return the edited files as vLLM has them, and as they are applied, with the feature."""
    folder = tmp_path_factory.mktemp("style")
    feature = {f"{FEATURE}/{name}": data for name, data in plan.feature.items()}
    for tree, files in {
        "stock": plan.originals,
        "applied": {**plan.edited, **feature},
    }.items():
        for name, data in files.items():
            path = folder / tree / "vllm" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return folder / "stock", folder / "applied"


def ruff(tree: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "ruff", *arguments, "--config", str(CONFIG), "."]
    result = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert result.returncode in (0, 1), result.stderr
    return result.stdout


def findings(tree: Path) -> Counter:
    told = json.loads(ruff(tree, "check", "--output-format", "json"))
    return Counter(
        (str(Path(f["filename"]).relative_to(tree.resolve())), f["code"], f["message"])
        for f in told
        if f["code"] != "INP001"  # the trees hold the edited files alone
    )


def test_ruff_finds_nothing_that_stock_has_not(trees):
    stock, applied = trees
    assert findings(applied) - findings(stock) == Counter()


def unformatted(tree: Path) -> set[str]:
    told = ruff(tree, "format", "--check")
    return set(re.findall(r"(?m)^ *--> (\S+?):\d", told))


def test_ruff_formats_nothing_anew(trees):
    stock, applied = trees
    assert unformatted(applied) - unformatted(stock) == set()


def test_the_checks_do_find_something(trees):
    """Run ruff with these rules on a file with one fault of each kind."""
    _, applied = trees
    bad = applied / "vllm" / "bad.py"
    bad.write_text("import zlib\nimport ast\nprint( ast,zlib )\n")
    try:
        assert ("vllm/bad.py", "I001") in {f[:2] for f in findings(applied)}
        assert "vllm/bad.py" in unformatted(applied)
    finally:
        bad.unlink()


def test_modules_begin_with_the_two_spdx_lines(plan):
    wrong = [
        name
        for name, data in plan.feature.items()
        if tuple(data.decode().split("\n")[:2]) != HEADER
    ]
    assert wrong == []


def test_modules_import_nothing_that_vllm_forbids(plan):
    found = [
        (name, module)
        for name, data in plan.feature.items()
        for node in ast.walk(ast.parse(data))
        for module in _imported(node)
        if module.partition(".")[0] in FORBIDDEN
    ]
    assert found == []


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return []


def test_nothing_is_inserted_directly_below_a_comment_of_vllm(plan):
    """It would stand between the comment and the statement that it explains."""
    wrong = []
    for name, old in plan.originals.items():
        before = old.decode().split("\n")
        after = plan.edited[name].decode().split("\n")
        matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
        for kind, i, _, j, _ in matcher.get_opcodes():
            if kind == "insert" and i and before[i - 1].lstrip().startswith("#"):
                wrong.append((name, j + 1, after[j]))
    assert wrong == []
