"""Test applying: it reverts bit-identical, is never left half done, and never overwrites somebody's change."""

import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from vllm_kv_checksum import apply as installer
from vllm_kv_checksum import cli, saved
from vllm_kv_checksum.diff import diff
from vllm_kv_checksum.edits import Module
from vllm_kv_checksum.series import load_series

FILES = {
    "v1/core/sched/scheduler.py": "import os\n\n\ndef run():\n    return 1\n",
    "config/other.py": '"""Doc."""\nimport sys\n\n\nclass C:\n    a = 1\n',
    "distributed/kv_transfer/__init__.py": "",
}


def series(code="before()") -> list[Module]:
    one, two = Module("v1/core/sched/scheduler.py"), Module("config/other.py")
    with one.function("run") as f:
        f.before("return 1", code)
    two.imports("import json")
    return [one, two]


@pytest.fixture
def feature(tmp_path):
    folder = tmp_path / "feature"
    folder.mkdir()
    (folder / "__init__.py").write_text('"""F."""\n')
    (folder / "part.py").write_text("x = 1\n")
    return folder


@pytest.fixture
def package(tmp_path):
    root = tmp_path / "site" / "vllm"
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "config/other.py").chmod(0o640)
    set_version(root, "0.33.0")
    return root


def set_version(package, version):
    for old in package.parent.glob("vllm-*.dist-info"):
        shutil.rmtree(old)
    info = package.parent / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nVersion: {version}\n")


def snapshot(folder: Path) -> dict[str, tuple]:
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_file():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            found[name] = (digest, path.stat().st_mode)
        else:
            found[name] = ("folder", path.stat().st_mode)
    return found


@pytest.mark.parametrize("link", [False, True])
def test_apply_and_revert(package, feature, link):
    before = snapshot(package)
    installer.apply(package, series(), feature, link=link)
    assert "before()" in (package / "v1/core/sched/scheduler.py").read_text()
    target = package / installer.FEATURE
    assert target.is_symlink() == link
    assert (target / "part.py").read_text() == "x = 1\n"
    assert installer.status(package)[0] == 0
    (target / "__pycache__").mkdir(exist_ok=True)
    installer.revert(package)
    (feature / "__pycache__").rmdir() if link else None
    assert snapshot(package) == before
    assert installer.status(package)[0] == 1
    assert (feature / "part.py").exists()
    assert "nothing to do" in installer.revert(package)


def test_applying_twice_changes_nothing(package, feature):
    installer.apply(package, series(), feature)
    once = snapshot(package)
    assert "already applied" in installer.apply(package, series(), feature)
    assert snapshot(package) == once


def test_a_newer_series_replaces_an_older_one(package, feature):
    before = snapshot(package)
    installer.apply(package, series(), feature)
    installer.apply(package, series("newer()"), feature)
    text = (package / "v1/core/sched/scheduler.py").read_text()
    assert "newer()" in text and "before()" not in text
    installer.revert(package)
    assert snapshot(package) == before


def test_runs_at_once_take_turns(package, feature, capsys):
    """Take turns even when the one that had the lock has just removed its file."""
    before = snapshot(package)
    with saved.locked(package):
        run = threading.Thread(
            target=installer.apply, args=(package, series(), feature)
        )
        run.start()
        time.sleep(0.3)
        assert run.is_alive()
        now = snapshot(package)
        del now[saved.LOCK]
        assert now == before
        assert f"waiting for another run on {package}" in capsys.readouterr().err
    run.join()
    assert installer.status(package)[0] == 0
    inside, most = [], []

    def take_turns():
        for _ in range(30):
            with saved.locked(package):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.0005)
                inside.pop()

    runs = [threading.Thread(target=take_turns) for _ in range(4)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert max(most) == 1 and len(most) == 120
    assert not (package / saved.LOCK).exists()


def test_all_is_on_disk_before_the_manifest_says_so(package, feature, monkeypatch):
    """What was renamed is synced, and then its folder, before the next manifest."""
    fsync, replace = os.fsync, os.replace
    steps: list[tuple[str, str]] = []

    def log_fsync(descriptor):
        steps.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def log_replace(source, target):
        steps.append(("rename", str(target)))
        assert ("sync", str(source)) in steps
        replace(source, target)

    monkeypatch.setattr(os, "fsync", log_fsync)
    monkeypatch.setattr(os, "replace", log_replace)
    installer.apply(package, series(), feature)
    installer.revert(package)
    manifests = [i for i, (_, path) in enumerate(steps) if path.endswith(".json")]
    assert len(manifests) == 3
    backups = f"{installer.MANIFEST_DIR}/originals"
    scheduler = "v1/core/sched/scheduler.py"
    for name, change, until in (
        (f"{backups}/{scheduler}", 0, manifests[0]),
        (scheduler, 0, manifests[1]),
        (f"{installer.FEATURE}/part.py", 0, manifests[1]),
        (scheduler, 1, len(steps)),
    ):
        path = package / name
        renames = [i for i, s in enumerate(steps) if s == ("rename", str(path))]
        after = steps[renames[change] : until]
        assert ("sync", str(path.parent)) in after, name
    for i in manifests:
        assert ("sync", str(package / installer.MANIFEST_DIR)) in steps[i:]
    assert steps[-1] == ("sync", str(package))


@contextmanager
def nobody():
    """Become somebody who may not write, where root may write everywhere."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_read_only_tree_is_named_with_a_way_out(package, feature):
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder, "site", "vllm")
        shutil.copytree(package.parent, there.parent)
        shutil.copytree(feature, Path(folder, "feature"))
        ours = Path(folder, "feature")

        def may_write(allowed):
            for path in (Path(folder), *Path(folder).rglob("*")):
                mode = stat.S_IMODE(path.stat().st_mode) | 0o555
                path.chmod(mode | 0o200 if allowed else mode & ~0o222)

        def refused(act):
            before = snapshot(there)
            with nobody(), pytest.raises(installer.InstallError) as error:
                act()
            assert snapshot(there) == before
            assert f"{there}" in str(error.value)
            for part in ("Permission denied", "as the user that owns", "wheel"):
                assert part in str(error.value)

        may_write(False)
        refused(lambda: installer.apply(there, series(), ours))
        with nobody():
            assert "nothing to do" in installer.revert(there)
        may_write(True)
        installer.apply(there, series(), ours)
        may_write(False)
        with nobody():
            assert "already applied" in installer.apply(there, series(), ours)
        refused(lambda: installer.revert(there))
        may_write(True)


class Broken(Exception):
    pass


def fail_at(monkeypatch, step) -> list[str]:
    """Make the n-th step of writing fail; the names of the steps done."""
    done: list[str] = []

    def guard(owner, name):
        real = getattr(owner, name)

        def run(*args, **kwargs):
            done.append(name)
            if len(done) == step:
                raise Broken(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, run)

    # Hundreds of runs, none of which is about power cuts.
    monkeypatch.setattr(saved.os, "fsync", lambda _: None)
    guard(installer, "write_atomically")
    guard(installer, "put_feature")
    guard(installer, "save_manifest")
    guard(installer, "remove")
    guard(saved.os, "replace")
    guard(saved.os, "symlink")
    guard(saved, "adopt")
    guard(installer, "make_folder")
    return done


def do_apply(package, feature, link):
    installer.apply(package, series(), feature, link=link)


def do_upgrade(package, feature, link):
    installer.apply(package, series("newer()")[:1], feature, link=link)


def do_revert(package, feature, link):
    installer.revert(package)


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("act", [do_apply, do_upgrade, do_revert])
def test_a_failure_at_any_step_leaves_the_tree_as_it_was(package, feature, act, link):
    if act is not do_apply:
        do_apply(package, feature, link)
    before = snapshot(package)
    for step in range(1, 200):
        with pytest.MonkeyPatch.context() as patch:
            done = fail_at(patch, step)
            try:
                act(package, feature, link)
                break
            except Broken:
                pass
        assert snapshot(package) == before, f"step {step}: {done[-1]}"
    assert step > 10
    assert installer.status(package)[0] == (1 if act is do_revert else 0)


@pytest.mark.parametrize("act", [do_apply, do_upgrade, do_revert])
def test_a_killed_run_is_taken_back(package, feature, act):
    """Leave the tree as SIGKILL does: nothing rolls back at the time."""
    before = snapshot(package)
    for step in range(1, 200):
        if act is not do_apply:
            do_apply(package, feature, False)
        with pytest.MonkeyPatch.context() as patch:
            fail_at(patch, step)
            patch.setattr(installer, "transaction", lambda *_: nullcontext())
            try:
                act(package, feature, False)
                break
            except Broken:
                pass
        manifest = installer.read_manifest(package)
        if act is do_apply:
            assert manifest is None or manifest.state == "applying"
        if manifest is not None and manifest.state != "applied":
            assert installer.status(package)[0] == 2
        installer.revert(package)
        for left in package.rglob(".*.kv_checksum_tmp"):
            left.unlink()
        assert snapshot(package) == before, step
    assert step > 10


def test_files_that_are_gone_or_back_are_said_and_put_in_again(package, feature):
    installer.apply(package, series(), feature)
    applied = snapshot(package)
    shutil.rmtree(package / installer.FEATURE)
    (package / "config/other.py").write_text(FILES["config/other.py"])
    code, text = installer.status(package)
    assert code == 2 and "config/other.py" in text and "part.py" in text
    installer.apply(package, series(), feature)
    assert {
        k: v[0] for k, v in snapshot(package).items() if "manifest.json" not in k
    } == {k: v[0] for k, v in applied.items() if "manifest.json" not in k}
    (package / installer.FEATURE / "part.py").write_text("mine\n")
    assert installer.status(package)[0] == 2
    with pytest.raises(installer.InstallError, match="part.py"):
        installer.revert(package)


def test_a_replaced_vllm_keeps_its_own_files(package, feature):
    installer.apply(package, series(), feature)
    set_version(package, "0.34.0")
    (package / "config/other.py").write_text("of 0.34.0\n")
    with pytest.raises(installer.InstallError):
        installer.revert(package)
    installer.revert(package, force=True)
    assert (package / "config/other.py").read_text() == "of 0.34.0\n"
    assert installer.status(package)[0] == 1


def test_a_damaged_manifest_is_one_clear_error(package, feature, capsys):
    installer.apply(package, series(), feature)
    (package / installer.MANIFEST_DIR / "manifest.json").write_text("{")
    package.joinpath("v1/core/sched/scheduler.py").touch()
    assert cli.main(["status", "--tree", str(package)]) == 2
    assert "is damaged" in capsys.readouterr().err


def test_a_changed_tree_is_never_overwritten(package, feature):
    installer.apply(package, series(), feature)
    changed = package / "config/other.py"
    changed.write_text("mine\n")
    assert installer.status(package)[0] == 2
    for act in (
        lambda: installer.apply(package, series("newer()"), feature),
        lambda: installer.apply(package, series(), feature),
        lambda: installer.revert(package),
    ):
        with pytest.raises(installer.InstallError, match="config/other.py"):
            act()
        assert changed.read_text() == "mine\n"
    installer.revert(package, force=True)
    assert changed.read_text() == FILES["config/other.py"]


def test_a_feature_of_somebody_else_is_not_touched(package, feature):
    (package / installer.FEATURE).mkdir()
    before = snapshot(package)
    with pytest.raises(installer.InstallError, match="not put there"):
        installer.apply(package, series(), feature)
    assert snapshot(package) == before


def test_unknown_versions(package, feature):
    set_version(package, "0.99.0")
    before = snapshot(package)
    with pytest.raises(installer.InstallError, match=r"0\.99\.0.*0\.33\.0.*--force"):
        installer.apply(package, series(), feature)
    assert snapshot(package) == before
    misfit = series()
    with misfit[0].function("run") as f:
        f.before("return 2", "x()")
    with pytest.raises(installer.InstallError, match="return 2"):
        installer.apply(package, misfit, feature, force=True)
    assert snapshot(package) == before
    installer.apply(package, series(), feature, force=True)
    set_version(package, "0.33.0+cpu")
    assert installer.status(package)[0] == 2


def test_diff_applies_with_git(package, feature, tmp_path):
    other = package / "config/other.py"
    other.write_text("import sys\n\na = '\x0c \u2028'  # no end of line")
    text = diff(package, series(), feature)
    copy = tmp_path / "checkout"
    shutil.copytree(package.parent, copy)
    git = ["git", "-C", str(copy), "apply", "-p1"]
    subprocess.run(git, input=text, text=True, check=True)
    installer.apply(package, series(), feature)
    assert diff(package, series(), feature) == text
    made = ("v1/core/sched/scheduler.py", f"{installer.FEATURE}/part.py")
    for name in (*made, "config/other.py"):
        assert (copy / "vllm" / name).read_text() == (package / name).read_text()


def test_command_line(package, capsys):
    assert cli.main(["status", "--tree", str(package.parent)]) == 1
    assert "not applied" in capsys.readouterr().out
    assert cli.main(["apply", "--tree", str(package)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("vllm-kv-checksum: error: ") and "is missing" in error
    assert cli.main(["apply", "--tree", str(package / "config")]) == 2
    assert "--tree" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "revert" in capsys.readouterr().out


def git_apply(package: Path, checkout: Path) -> str:
    """Apply what `diff` prints to a git repository of the package's files."""
    shutil.copytree(package, checkout / "vllm")
    git = ["git", "-C", str(checkout)]
    who = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, *who, "commit", "-qm", "base"], check=True)
    text = diff(package, load_series(), cli.feature_dir())
    subprocess.run([*git, "apply", "--index"], input=text.encode(), check=True)
    return text


def test_the_real_series_fits_the_installed_vllm_and_is_taken_back(tmp_path):
    installed = installer.find_package(None)
    root = tmp_path / "vllm"
    backups = installed / installer.MANIFEST_DIR / "originals"
    version = installer.read_version(installed)
    for module in filter(lambda m: m.concerns(version), load_series()):
        path = root / module.path
        path.parent.mkdir(parents=True, exist_ok=True)
        backup = backups / module.path
        shutil.copy(backup if backup.is_file() else installed / module.path, path)
    (root / installer.FEATURE).parent.mkdir(parents=True, exist_ok=True)
    set_version(root, version)
    before = snapshot(root)
    text = git_apply(root, tmp_path / "checkout")
    installer.apply(root, load_series(), cli.feature_dir())
    assert installer.status(root)[0] == 0
    applied = {
        k: v for k, v in snapshot(root).items() if installer.MANIFEST_DIR not in k
    }
    assert {k: v[0] for k, v in snapshot(tmp_path / "checkout/vllm").items()} == {
        k: v[0] for k, v in applied.items()
    }
    inserted = sum(
        line.startswith("+") and not line.startswith("+++")
        for line in text.split("diff --git")[0].splitlines()
    )
    assert inserted < 600
    installer.revert(root)
    assert snapshot(root) == before
