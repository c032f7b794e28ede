"""Test patched wheels: what they hold, that pip takes them, and what is refused."""

import csv
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from rig.model import CACHE
from rig.small_wheel import NAME, TOOL, VERSION, make_wheel, row

from vllm_kv_checksum import apply as installer
from vllm_kv_checksum import cli
from vllm_kv_checksum.series import load_series

OFFICIAL = "0.33.0"


@pytest.fixture
def few_edits(monkeypatch):
    """Use the first modules of the series only, where it does not matter which."""
    few = [module for module in load_series() if module.concerns(VERSION)][:2]
    monkeypatch.setattr(cli, "load_series", lambda: few)


def patch(base: Path, folder: Path, *more: str) -> int:
    return cli.main(["wheel", str(base), "-o", str(folder), *more])


def check_record(wheel: Path) -> None:
    """Check that RECORD lists every file of the wheel once, with its hash and size."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        record = next(n for n in names if n.endswith(".dist-info/RECORD"))
        rows = list(csv.reader(archive.read(record).decode().splitlines()))
        # Names of tuned kernels' files hold commas.
        expected = [
            [n, *row("", archive.read(n)).split(",")[1:]] for n in names if n != record
        ]
        assert sorted(rows) == sorted([*expected, [record, "", ""]])
        assert len(set(names)) == len(names)


def check_installed(wheel: Path, target: Path, capsys) -> None:
    """Check that pip takes the wheel and `status` knows it, and that only vLLM's own wheel leads back."""
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps"]
    command = [*pip, "--no-compile", "--target", str(target), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    capsys.readouterr()
    assert cli.main(["status", "--tree", str(target)]) == 0
    assert "in a patched wheel" in capsys.readouterr().out
    for command in ("revert", "apply", "diff"):
        assert cli.main([command, "--tree", str(target)]) == 2
        error = capsys.readouterr().err
        assert f"pip install --force-reinstall --no-deps vllm=={VERSION}\n" in error
    assert cli.main(["status", "--tree", str(target)]) == 0
    (target / "vllm/config/kv_transfer.py").write_text("mine\n")
    assert cli.main(["status", "--tree", str(target)]) == 2


def test_a_patched_wheel(tmp_path, capsys):
    base = make_wheel(tmp_path / "base")
    assert patch(base, tmp_path / "new" / "out") == 0
    wheel = Path(capsys.readouterr().out.strip())
    assert wheel == tmp_path / "new" / "out" / NAME.format(f"{VERSION}+kvchecksum.1")
    assert list(wheel.parent.iterdir()) == [wheel]
    check_record(wheel)
    with zipfile.ZipFile(base) as old, zipfile.ZipFile(wheel) as new:
        info = f"vllm-{VERSION}+kvchecksum.1.dist-info"
        metadata = old.read(f"vllm-{VERSION}.dist-info/METADATA").decode()
        wanted = metadata.replace(
            f"Version: {VERSION}", f"Version: {VERSION}+kvchecksum.1"
        )
        assert new.read(f"{info}/METADATA").decode() == wanted
        for name in ("vllm/_version.py", TOOL):
            was, now = old.getinfo(name), new.getinfo(name)
            assert old.read(name) == new.read(name)
            for kept in ("external_attr", "compress_type", "date_time"):
                assert getattr(was, kept) == getattr(now, kept)
        applied = tmp_path / "applied"
        old.extractall(applied)
        installer.apply(applied / "vllm", load_series(), cli.feature_dir())
        edited = [f"vllm/{m.path}" for m in load_series() if m.concerns(VERSION)]
        feature = applied / "vllm" / installer.FEATURE
        edited += [str(p.relative_to(applied)) for p in feature.glob("*.py")]
        for name in edited:
            assert new.read(name) == (applied / name).read_bytes(), name
    check_installed(wheel, tmp_path / "installed", capsys)


def test_a_local_version_is_kept(tmp_path, few_edits):
    base = make_wheel(tmp_path / "base", f"{VERSION}+cu129")
    assert patch(base, tmp_path / "out") == 0
    wheel = tmp_path / "out" / NAME.format(f"{VERSION}+cu129.kvchecksum.1")
    check_record(wheel)


def patched(folder):
    patch(make_wheel(folder / "own"), folder)
    return next(folder.glob("*.whl"))


def no_wheel(folder):
    path = folder / "vllm-0.33.0-py3-none-any.whl"
    path.write_text("<html>")
    return path


def another(folder):
    path = folder / "other-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("other-1.0.dist-info/RECORD", "")
    return path


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (no_wheel, "is not an intact wheel"),
        (another, "is not a wheel of vLLM"),
        (lambda f: f / "absent.whl", "absent.whl: No such file"),
        (lambda f: make_wheel(f).rename(f / "vllm.whl"), "not the name"),
        (lambda f: make_wheel(f, "0.99.0"), "not a known version"),
        (
            lambda f: make_wheel(f, damaged=True),
            f"damaged: {TOOL} .* download it again",
        ),
        (patched, "patched already"),
    ],
)
def test_refused(make, said, tmp_path, capsys, few_edits):
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    assert patch(make(folder), out) == 2
    assert re.search(said, capsys.readouterr().err)
    assert not out.exists() or not list(out.iterdir())


def test_an_unknown_version_can_be_forced(tmp_path, few_edits):
    assert (
        patch(make_wheel(tmp_path / "in", "0.99.0"), tmp_path / "out", "--force") == 0
    )


def test_an_output_is_never_overwritten(tmp_path, capsys, few_edits):
    base, out = make_wheel(tmp_path / "in"), tmp_path / "out"
    out.mkdir()
    there = out / NAME.format(f"{VERSION}+kvchecksum.1")
    there.write_text("mine")
    assert patch(base, out) == 2
    assert f"{there} exists" in capsys.readouterr().err
    assert there.read_text() == "mine" and list(out.iterdir()) == [there]


MEASURED = """
import sys
from pathlib import Path
from vllm_kv_checksum.cli import main
status = main(sys.argv[1:])
print(Path("/proc/self/status").read_text())
sys.exit(status)
"""
"""The tool, and the most memory that it held; what the parent holds counts in ``ru_maxrss``."""


@pytest.mark.slow
def test_the_real_wheel(tmp_path, capsys):
    """Patch it in less memory than its largest file takes."""
    folder = CACHE / "official"
    if not list(folder.glob(f"vllm-{OFFICIAL}-*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "--no-deps"]
        subprocess.run([*pip, f"vllm=={OFFICIAL}", "-d", str(folder)], check=True)
    base = next(folder.glob(f"vllm-{OFFICIAL}-*.whl"))
    patched = subprocess.run(
        [sys.executable, "-c", MEASURED, "wheel", str(base), "-o", str(tmp_path)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", patched.stdout, re.MULTILINE)
    with zipfile.ZipFile(base) as archive:
        largest = max(member.file_size for member in archive.infolist())
    assert int(peak[1]) * 1024 < largest
    wheel = tmp_path / base.name.replace(OFFICIAL, f"{OFFICIAL}+kvchecksum.1")
    check_record(wheel)
    check_installed(wheel, tmp_path / "installed", capsys)
