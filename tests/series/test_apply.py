"""Applying: bit-identical back, never half, never over somebody's change."""

import hashlib
import os
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest

from vllm_kv_checksum import apply as installer
from vllm_kv_checksum import cli, saved
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
            found[name] = ("folder",)
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

    guard(installer, "write_atomically")
    guard(installer, "put_feature")
    guard(installer, "save_manifest")
    guard(installer, "remove")
    guard(saved.os, "replace")
    guard(saved.os, "symlink")
    guard(saved.shutil, "copymode")
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
    """As SIGKILL leaves it: nothing rolls back at the time."""
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
    text = installer.diff(package, series(), feature)
    copy = tmp_path / "checkout"
    shutil.copytree(package.parent, copy)
    git = ["git", "-C", str(copy), "apply", "-p1"]
    subprocess.run(git, input=text, text=True, check=True)
    installer.apply(package, series(), feature)
    assert installer.diff(package, series(), feature) == text
    for name in ("v1/core/sched/scheduler.py", f"{installer.FEATURE}/part.py"):
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


def test_the_real_series_fits_the_installed_vllm_and_is_taken_back(tmp_path):
    installed = installer.find_package(None)
    root = tmp_path / "vllm"
    backups = installed / installer.MANIFEST_DIR / "originals"
    for module in load_series():
        path = root / module.path
        path.parent.mkdir(parents=True, exist_ok=True)
        backup = backups / module.path
        shutil.copy(backup if backup.is_file() else installed / module.path, path)
    (root / installer.FEATURE).parent.mkdir(parents=True, exist_ok=True)
    set_version(root, installer.read_version(installed))
    before = snapshot(root)
    installer.apply(root, load_series(), cli.feature_dir())
    assert installer.status(root)[0] == 0
    inserted = sum(
        line.startswith("+") and not line.startswith("+++")
        for line in installer.diff(root, load_series(), cli.feature_dir())
        .split("new file mode")[0]
        .splitlines()
    )
    assert inserted < 600
    installer.revert(root)
    assert snapshot(root) == before
