"""Test modes and owners: new files are as readable as vLLM's own, whatever the umask."""

import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec  # noqa: F401 (the child that imports the feature may not read it)
import numpy as np  # noqa: F401
import pytest
from series.test_apply import feature, package, series  # noqa: F401
from series.test_wheel import make_wheel

from vllm_kv_checksum import apply as installer
from vllm_kv_checksum import saved
from vllm_kv_checksum.series import load_series

NOBODY = 65534
ROOT = os.geteuid() == 0
UMASKS = (0o000, 0o022, 0o027, 0o077)

needs_root = pytest.mark.skipif(not ROOT, reason="only root has other users at hand")


@pytest.fixture
def open_tmp():
    """Yield a folder that every user reaches, which pytest's own are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def tree(open_tmp):
    """Return the files of this environment's vLLM that the series edits."""
    installed, root = installer.find_package(None), open_tmp / "site" / "vllm"
    backups = installed / installer.MANIFEST_DIR / "originals"
    version = installer.read_version(installed)
    for module in filter(lambda m: m.concerns(version), load_series()):
        path = root / module.path
        path.parent.mkdir(parents=True, exist_ok=True)
        backup = backups / module.path
        path.write_bytes(
            (backup if backup.is_file() else installed / module.path).read_bytes()
        )
    (root / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    for path in (root.parent, root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return root


def command(umask: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_kv_checksum.cli", *map(str, arguments)],
        umask=umask,
        capture_output=True,
        text=True,
    )


def modes(folder: Path) -> dict[str, tuple]:
    """Return mode, owner, group and content (or target) of everything but Python's caches."""
    found = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        if "__pycache__" in path.parts:
            continue
        about = path.lstat()
        data = os.readlink(path) if path.is_symlink() else None
        data = path.read_bytes() if path.is_file() and data is None else data
        found[str(path)] = (oct(about.st_mode), about.st_uid, about.st_gid, data)
    return found


def as_nobody(check: Callable[[], object]) -> str:
    """Return what goes wrong where another user runs `check`; "" for nothing."""
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            text = str(check() or "")
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def read_and_import(root: Path) -> None:
    """Read everything, and run those of the feature's modules that need nothing else."""
    for folder, _, files in os.walk(root, onerror=_raise, followlinks=True):
        if not folder.endswith("__pycache__"):
            for name in files:
                Path(folder, name).read_bytes()
    for name in ("payload", "checksum"):
        path = root / installer.FEATURE / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _raise(error: OSError) -> None:
    raise error


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("umask", UMASKS, ids=oct)
def test_any_umask_gives_the_modes_of_vllm_s_own_files(tree, umask, link):
    before = modes(tree)
    done = command(umask, "apply", "--tree", tree, *(["--link"] if link else []))
    assert done.returncode == 0, done.stderr
    after = modes(tree)
    kept = {name: about[:3] for name, about in before.items()}
    assert {name: after[name][:3] for name in before} == kept
    new = [Path(name) for name in after.keys() - before.keys()]
    assert len(new) > 30
    for path in new:
        if not path.is_symlink():
            want = 0o755 if path.is_dir() else 0o644
            assert stat.S_IMODE(path.stat().st_mode) == want, path
    if ROOT:
        assert as_nobody(lambda: read_and_import(tree)) == ""
    done = command(umask, "status", "--tree", tree)
    assert done.returncode == 0, done.stdout
    done = command(umask, "revert", "--tree", tree)
    assert done.returncode == 0, done.stderr
    assert modes(tree) == before


@needs_root
@pytest.mark.parametrize("link", [False, True])
def test_root_keeps_the_owner_of_the_tree(package, feature, link):  # noqa: F811
    for path in (package, *package.rglob("*")):
        os.chown(path, 1234, 4321)
    before = modes(package)
    installer.apply(package, series(), feature, link=link)
    after = modes(package)
    assert {about[1:3] for about in after.values()} == {(1234, 4321)}
    assert (package / installer.FEATURE).lstat().st_uid == 1234
    # Also what is put back after a failure, be it removed or replaced by then.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved, "sync_folders", lambda folders: 1 / 0)
        patch.setattr(installer, "sync_folders", lambda folders: 1 / 0)
        for act in (
            lambda: installer.apply(package, series("newer()"), feature, link=not link),
            lambda: installer.revert(package),
        ):
            with pytest.raises(ZeroDivisionError):
                act()
            assert modes(package) == after
    installer.revert(package)
    assert modes(package) == before


def test_a_removed_tree_comes_back_with_its_modes(package, feature):  # noqa: F811
    """Fail at the end of a revert, when the feature's folders are gone."""
    installer.apply(package, series(), feature)
    (package / installer.FEATURE).chmod(0o2750)
    (package / installer.MANIFEST_DIR / "originals").chmod(0o700)
    (package / installer.FEATURE / "part.py").chmod(0o640)
    before = modes(package)
    with pytest.MonkeyPatch.context() as patch:
        steps = iter((0, 1))
        real = installer.remove
        patch.setattr(
            installer, "remove", lambda path: (real(path), 1 // (1 - next(steps)))
        )
        umask = os.umask(0o077)
        try:
            with pytest.raises(ZeroDivisionError):
                installer.revert(package)
        finally:
            os.umask(umask)
    assert modes(package) == before


PARTS = {
    "feature": installer.FEATURE,
    "module": f"{installer.FEATURE}/part.py",
    "manifest folder": installer.MANIFEST_DIR,
    "manifest": f"{installer.MANIFEST_DIR}/manifest.json",
    "copy": f"{installer.MANIFEST_DIR}/originals/v1/core/sched/scheduler.py",
}


@pytest.mark.parametrize("part", PARTS)
def test_status_names_what_is_closed_and_apply_opens_it(package, feature, part):  # noqa: F811
    """Start from what earlier versions left under a strict umask."""
    installer.apply(package, series(), feature)
    right = {name: about[:3] for name, about in modes(package).items()}
    path = package / PARTS[part]
    path.chmod(path.stat().st_mode & ~0o077)
    code, text = installer.status(package)
    assert code == 2 and f"{path}:" in text and "vllm-kv-checksum apply" in text
    assert "applied series" in installer.apply(package, series(), feature)
    assert installer.status(package)[0] == 0
    assert {k: v[:3] for k, v in modes(package).items()} == right


def test_many_closed_files_are_a_short_line(package, feature):  # noqa: F811
    for number in range(40):
        (feature / f"more_{number}.py").write_text("")
    installer.apply(package, series(), feature)
    for path in (package / installer.FEATURE).iterdir():
        path.chmod(0o600)
    text = installer.status(package)[1]
    assert "and 37 more" in text and len(text) < 2000


def test_a_private_vllm_is_nobody_s_business(package, feature):  # noqa: F811
    for path in (package, *package.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    installer.apply(package, series(), feature)
    assert installer.status(package)[0] == 0
    for path in (package, *package.rglob("*")):
        assert not path.stat().st_mode & 0o077


def test_a_link_into_a_private_folder_is_said(open_tmp, package, feature):  # noqa: F811
    there = shutil.copytree(package.parent, open_tmp / "site") / "vllm"
    source = shutil.copytree(feature, open_tmp / "src" / "feature")
    for path in (open_tmp / "src", source, *source.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    installer.apply(there, series(), source, link=True)
    assert installer.status(there)[0] == 0
    for closed in (open_tmp / "src", source, source / "part.py"):
        mode = closed.stat().st_mode
        closed.chmod(mode & ~0o077)
        code, text = installer.status(there)
        assert code == 2 and str(closed) in text and "without --link" in text
        closed.chmod(mode)
    # Where vLLM itself is out of reach, the link keeps nobody out.
    there.chmod(0o700)
    source.chmod(0o700)
    assert "cannot read" not in installer.status(there)[1]


@needs_root
@pytest.mark.parametrize("part", ["manifest folder", "manifest"])
def test_another_user_s_status_says_who_can_help(open_tmp, package, feature, part):  # noqa: F811
    there = shutil.copytree(package.parent, open_tmp / "site") / "vllm"
    installer.apply(there, series(), feature)
    (there / PARTS[part]).chmod(0o700 if part.endswith("folder") else 0o600)
    text = as_nobody(lambda: installer.status(there))
    assert text.startswith("(2, ") and "as the owner of the vLLM tree" in text


def test_a_file_that_is_gone_comes_back_as_it_was(package, feature):  # noqa: F811
    before = modes(package)
    installer.apply(package, series(), feature)
    (package / "config/other.py").unlink()  # 0640
    umask = os.umask(0o077)
    try:
        installer.revert(package, force=True)
    finally:
        os.umask(umask)
    assert modes(package) == before


def test_a_wheel_is_as_readable_as_its_base(tmp_path):
    base = make_wheel(tmp_path / "base")
    for mode in (0o644, 0o640):
        base.chmod(mode)
        base.parent.chmod(0o755)
        out = tmp_path / f"out{mode}"
        done = command(0o077, "wheel", base, "-o", out)
        assert done.returncode == 0, done.stderr
        assert stat.S_IMODE(Path(done.stdout.strip()).stat().st_mode) == mode
        assert stat.S_IMODE(out.stat().st_mode) == 0o755
