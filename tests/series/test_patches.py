"""Test the series as patches: git takes them, each stands by itself, together they are `apply`."""

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from kv_checksum.rig import transports
from rig.stock import link_patched_vllm

from vllm_kv_checksum import cli, patches
from vllm_kv_checksum.apply import FEATURE, find_package, make_plan
from vllm_kv_checksum.cli import feature_dir
from vllm_kv_checksum.patches import Change, changes_of_patches
from vllm_kv_checksum.series import PATCHES, load_series

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "vllm." + FEATURE.replace("/", ".")
UNIT = "tests/v1/kv_connector/unit/kv_checksum"
HERE_ALONE = {
    **dict.fromkeys(("spacing",), "they run programs of benchmarks/"),
    **dict.fromkeys(("cuda",), "it runs where vLLM is not installed, too"),
    **dict.fromkeys(("model_families",), "it plans in a process that the rig sets up"),
    **dict.fromkeys(("real_caches", "real_states"), "models that the rig writes"),
    **dict.fromkeys(
        (
            "compressed_tiers",
            "connectors_conform",
            "context_parallel",
            "fault_drill",
            "mooncake_store_failures",
            "nixl_push_damaged",
            "real_store",
            "real_workers",
            "replicas",
            "vllm_refuses",
        ),
        "they need the rig's libraries and servers on CPUs",
    ),
}
"""Tests that no patch brings, and why."""


@pytest.fixture(scope="module")
def plan():
    return make_plan(find_package(None), load_series(), feature_dir(), force=True)


@pytest.fixture(scope="module")
def changes():
    return list(changes_of_patches(find_package(None), feature_dir(), ROOT))


def git(folder, *arguments, **kwargs):
    identity = ["-c", "user.name=Test", "-c", "user.email=test@localhost"]
    result = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        capture_output=True,
        text=True,
        **kwargs,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.fixture
def repository(plan, tmp_path):
    """Return a repository that holds vLLM's own files, as far as the series touches them."""
    for name, data in plan.originals.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "base")
    return tmp_path


def files_below(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_git_am_of_all_gives_what_apply_gives(
    plan, changes, repository, tmp_path_factory
):
    """VLLM 0.30.0 has nothing for one of them to change."""
    written = [patch for patch, files in changes if files]
    assert len(written) >= len(PATCHES) - plan.vllm_version.startswith("0.30.")
    folder = tmp_path_factory.mktemp("patches")
    author = "Ada Löve <ada@localhost>"
    command = ["format-patch", "-o", str(folder), "--from", author]
    assert cli.main(command) == 0
    patches = sorted(folder.glob("*.patch"))
    assert [p.stem.partition("-")[2] for p in patches] == [p.name for p in written]
    git(repository, "am", *map(str, patches))
    feature = {f"{FEATURE}/{name}": data for name, data in plan.feature.items()}
    assert files_below(repository / "vllm") == {**plan.edited, **feature}
    log = git(repository, "log", "--format=%an <%ae>|%s", "--reverse").splitlines()[1:]
    assert [line.partition("|")[0] for line in log] == [author] * len(written)
    titles = [line.partition("|")[2] for line in log]
    assert titles == [p.message.partition("\n")[0] for p in written]
    assert all(len(title) <= 72 for title in titles)
    brought = git(repository, "ls-files", "tests", "docs").split()
    assert f"{UNIT}/test_worker.py" in brought
    assert "docs/features/kv_checksum.md" in brought
    for name in brought:
        assert (repository / name).read_bytes() == (ROOT / name).read_bytes()


def test_a_patch_that_changes_nothing_is_not_written(monkeypatch, tmp_path):
    found = [(PATCHES[0], []), (PATCHES[1], [Change("vllm/a.py", None, b"a = 1\n")])]
    monkeypatch.setattr(patches, "changes_of_patches", lambda *_: iter(found))
    package, author = find_package(None), "Ada <ada@localhost>"
    (path,) = patches.write_patches(package, feature_dir(), tmp_path, author=author)
    assert path.name == f"0001-{PATCHES[1].name}.patch"
    assert "Subject: [PATCH 01/1] " in path.read_text()


def test_every_module_and_test_comes_once(changes, plan):
    new = [c.path for _, files in changes for c in files if c.old is None]
    assert len(new) == len(set(new))
    modules = {f"vllm/{FEATURE}/{name}" for name in plan.feature}
    assert modules <= set(new)
    tests = {path.stem[5:] for path in (ROOT / UNIT).glob("test_*.py")}
    brought = {Path(p).stem[5:] for p in new if Path(p).match(f"{UNIT}/test_*.py")}
    assert tests - brought == HERE_ALONE.keys()


@cache
def imported_names(path: str, source: bytes) -> list[tuple[str, str]]:
    """Compile a file, and return (module, name) of what it imports from the feature."""
    compile(source, path, "exec")
    return [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(source, path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE)
        for alias in node.names
    ]


def test_each_patch_compiles_and_imports_what_is_there(changes):
    """Check by syntax that every name of the feature that a file imports is defined."""
    tree: dict[str, bytes] = {}
    for patch, files in changes:
        tree |= {c.path: c.new for c in files}
        modules = {
            p.removesuffix(".py").removesuffix("/__init__").replace("/", "."): p
            for p in tree
            if p.startswith(f"vllm/{FEATURE}/")
        }
        for path, source in tree.items():
            if not path.startswith("vllm/"):
                continue
            for module, name in imported_names(path, source):
                assert module in modules, (patch.name, path, module)
                if f"{module}.{name}" in modules:
                    continue
                names = top_level_names(tree[modules[module]])
                lazy = re.search(rf'"{name}": "([\w.]+)"', names.get("", ""))
                if lazy:
                    assert f"{module}.{lazy[1]}" in modules, (patch.name, path, name)
                else:
                    assert name in names, (patch.name, path, module, name)


@cache
def top_level_names(source: bytes) -> dict[str, str]:
    """Return the names that a module defines or imports; under "" its text, if it is lazy."""
    text = source.decode()
    found = {"": text} if "def __getattr__" in text else {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = ""
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {ast.unparse(target): "" for target in targets}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name: "" for alias in node.names}
    return found


def test_each_transport_comes_with_its_connector(changes):
    """The whole tree has them all, and tests of schedulers come with the first."""
    assert transports.FAKES.keys() == {"pull", "push", "mooncake"}
    brought = {
        Path(c.path).relative_to(UNIT).as_posix(): patch.name
        for patch, files in changes
        for c in files
        if Path(c.path).is_relative_to(UNIT)
    }
    for name in ("nixl_pull", "nixl_push", "mooncake"):
        patch = name.replace("_", "-")
        assert brought[f"rig/transports/{name}.py"] == patch
    assert brought["test_scheduler.py"] == "nixl-pull"
    assert brought["test_nixl_push.py"] == "nixl-push"
    assert brought["test_mooncake.py"] == "mooncake"


def test_a_folder_with_patches_and_a_bad_author_are_refused(tmp_path, capsys):
    assert cli.main(["format-patch", "-o", str(tmp_path), "--from", "nobody"]) == 2
    assert "--from 'nobody' is not of the form" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "0001-old.patch").write_text("")
    assert cli.main(["format-patch", "-o", str(tmp_path)]) == 2
    assert "holds patches already" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, len(PATCHES) + 1))
def test_each_patch_passes_its_own_tests(changes, number, tmp_path):
    patch, files = changes[number - 1]
    site = tmp_path / "site"
    site.mkdir()
    link_patched_vllm(site, number)
    env = {**os.environ, "PYTHONPATH": str(site)}
    modules = [
        c.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for c in files
        # Models for GPUs alone cannot be imported here, stock or not.
        if c.path.startswith("vllm/") and not c.path.startswith("vllm/models/")
    ]
    code = "import importlib\nfor m in {}: importlib.import_module(m)"
    run = [sys.executable, "-c", code.format(modules)]
    done = subprocess.run(run, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    # A transport's module lets tests that came with the first run over it, too.
    bring_transports = [
        any("/rig/transports/" in c.path for c in files) for _, files in changes
    ]
    own = number - 1
    first = bring_transports.index(True) if bring_transports[own] else own
    tests = [
        c.path
        for _, earlier in changes[first:number]
        for c in earlier
        if Path(c.path).match(f"{UNIT}/test_*.py")
    ]
    if tests:
        tree = tmp_path / "tree"
        for _, earlier in changes[:number]:
            own_files = ("tests/", "docs/")
            for path in (c.path for c in earlier if c.path.startswith(own_files)):
                tree.joinpath(path).parent.mkdir(parents=True, exist_ok=True)
                tree.joinpath(path).write_bytes((ROOT / path).read_bytes())
        # What vLLM's own tree has around them, as far as they need it here.
        around = ["pyproject.toml", "tests/conftest.py"]
        around.append("benchmarks/kernels/without_vllm.py")
        for name in around:
            tree.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
            tree.joinpath(name).write_bytes((ROOT / name).read_bytes())
        markers = "not e2e and not slow and not campaign and not upstream"
        run = [sys.executable, "-m", "pytest", "-q", "-x", "-m", markers, *tests]
        done = subprocess.run(run, env=env, cwd=tree, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:]
        print(patch.name, done.stdout.splitlines()[-1])
