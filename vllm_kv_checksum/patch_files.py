"""Tell which tests and documents of the checkout go with which patch.

A test goes with the first patch that brings all that it imports, itself or through its
helpers; a helper goes with the first test that needs it, unless a patch names it.
"""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from .apply import FEATURE
from .series import Patch

TESTS = Path("tests/v1/kv_connector/unit/kv_checksum")
_DATA = {"test_checksum.py": ["data/kv_checksum_vectors.json"]}
"""Data that tests read, by the name of the test's file."""

_PROGRAMS = {"plans.py": ["rig/model_families/make_plans.py"]}
"""Helpers that others run in a process of their own, by the name of their file."""

_FEATURE_PACKAGE = "vllm." + FEATURE.replace("/", ".")
_OF_THIS_PROJECT = (
    "bare_worker",
    "campaign",
    "kv_checksum_rig",
    "rig",
    "spacing",
    "without_vllm",
)
"""Packages that stay here: tests that need them do, too."""


def files_of_patches(
    patches: Sequence[Patch], feature: Sequence[Sequence[str]], checkout: Path
) -> list[list[str]]:
    """Return the tests and documents of every patch, by path in the checkout.

    Args:
        patches: the series.
        feature: the feature's modules that each patch brings.
        checkout: the project's checkout.

    """
    brought_by = {
        _module(name): number for number, names in enumerate(feature) for name in names
    }
    found: list[list[str]] = [list(_listed(p.files, checkout)) for p in patches]
    named = {checkout / f: number for number, files in enumerate(found) for f in files}
    placed = set(named)
    for number, test in sorted(_placed_tests(patches, brought_by, named, checkout)):
        for path in _with_helpers(checkout / TESTS / test, checkout):
            if path not in placed:
                placed.add(path)
                found[number].append(path.relative_to(checkout).as_posix())
    return found


def _placed_tests(
    patches: Sequence[Patch],
    brought_by: dict[str, int],
    named: dict[Path, int],
    checkout: Path,
) -> Iterator[tuple[int, str]]:
    """Yield every test that goes with a patch, after the patch's number."""
    own = {name: number for number, p in enumerate(patches) for name in p.tests}
    for test in sorted((checkout / TESTS).glob("test_*.py")):
        files = _with_helpers(test, checkout)
        needed = [n for f in files if f.suffix == ".py" for n in _imports(f)]
        if any(name.partition(".")[0] in _OF_THIS_PROJECT for name in needed):
            continue
        numbers = [brought_by.get(name, 0) for name in needed]
        number = max([0, *numbers, *(named.get(path, 0) for path in files)])
        yield own.get(test.stem.removeprefix("test_"), number), test.name


def _with_helpers(test: Path, checkout: Path) -> list[Path]:
    """Return a test's own data, the test, and every file that it imports from there."""
    root = checkout / TESTS
    found = [root / "__init__.py", root / "conftest.py"]
    found += [root / name for name in _DATA.get(test.name, ())]
    pending = [test]
    while pending:
        path = pending.pop()
        if path in found:
            continue
        found.append(path)
        pending += [root / name for name in _PROGRAMS.get(path.name, ())]
        for name in _relative_imports(path, root):
            target = root / name
            for package in target.parents:
                if package != root and package.is_relative_to(root):
                    pending.append(package / "__init__.py")
            pending.append(target)
    return found


def _relative_imports(path: Path, root: Path) -> Iterator[str]:
    """Yield the files that a file imports by relative names, below `root`."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        folder = path.parents[node.level - 1]
        base = (
            folder.joinpath(*(node.module or "").split(".")) if node.module else folder
        )
        candidates = [base, *(base / alias.name for alias in node.names)]
        for candidate in candidates:
            for file in (candidate.with_suffix(".py"), candidate / "__init__.py"):
                if file.is_file():
                    yield file.relative_to(root).as_posix()


def _imports(path: Path) -> Iterator[str]:
    """Yield the absolute names that a file imports, and those of names in packages."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _module(name: str) -> str:
    """Return the dotted name of one of the feature's files."""
    parts = name.removesuffix(".py").split("/")
    return ".".join([_FEATURE_PACKAGE, *(p for p in parts if p != "__init__")])


def _listed(files: Sequence[str], checkout: Path) -> Iterator[str]:
    """Yield files of the checkout; those below a path that ends in a slash."""
    for name in files:
        if not name.endswith("/"):
            yield name
            continue
        for path in sorted((checkout / name).rglob("*")):
            if path.is_file():
                yield path.relative_to(checkout).as_posix()
