"""Test ``make test-gpu`` where there is no card: it says so, and what it would run does run."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rig import gpu

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(torch.__file__).parents[1]

no_card = pytest.mark.skipif(gpu.cards() > 0, reason="there is a card")


@pytest.fixture(scope="module")
def without_vllm(tmp_path_factory):
    """Return the environment of a Python that finds all packages but vLLM and this project."""
    folder = tmp_path_factory.mktemp("packages")
    for package in SITE.iterdir():
        ours = package.name.startswith(("vllm", "__editable__"))
        if not ours and package.suffix != ".pth":
            (folder / package.name).symlink_to(package)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("KV_CHECKSUM")}
    return {**kept, "PYTHONPATH": str(folder)}


@no_card
def test_without_a_card_it_says_so_with_a_status_of_its_own():
    command = [sys.executable, ROOT / "tests/rig/gpu.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == gpu.NO_CARD == 77
    assert "NOT RUN: this machine has no CUDA card" in done.stderr


@no_card
def test_an_environment_that_does_not_see_the_card_has_another_status(
    monkeypatch, capsys
):
    monkeypatch.setattr(gpu, "cards", lambda: 1)
    assert gpu.main(["--python", sys.executable]) == gpu.NO_ENVIRONMENT == 78
    assert "no torch and Triton that see the card" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("init", "count", "number"), [(0, 0, 2), (0, 999, 0), (100, 0, 0)]
)
def test_the_driver_tells_how_many_cards_there_are(monkeypatch, init, count, number):
    """The driver is made up: 100 is its CUDA_ERROR_NO_DEVICE, 999 its CUDA_ERROR_UNKNOWN."""

    class Driver:
        def cuInit(self, flags):
            return init

        def cuDeviceGetCount(self, found):
            found._obj.value = 2
            return count

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert gpu.cards() == number


@pytest.fixture
def installs(monkeypatch, tmp_path):
    """Note what would be run to make environments; return this and a function that sets what fails or is not there."""
    run, failing = [], set()

    def noted(*command):
        run.append(" ".join(str(part) for part in command))
        return not any(word in run[-1] for word in failing)

    monkeypatch.setattr(gpu, "_run", noted)
    monkeypatch.setattr(gpu, "can", lambda python, code: str(python) not in failing)
    return run, failing.add


def test_an_environment_gets_vllm_and_the_series(installs, tmp_path):
    run, _ = installs
    python, with_vllm = gpu.environment(tmp_path / "here")
    assert python == tmp_path / "here/bin/python" and python.exists() and with_vllm
    assert "pytest==" in run[0] and run[0].endswith("vllm==0.33.0")
    assert run[1].endswith(f"-e {ROOT}")
    assert [line.split("vllm-kv-checksum ")[1] for line in run[2:]] == [
        "revert",
        "apply --link",
    ]


def test_torch_and_triton_alone_do_where_vllm_cannot_be_installed(installs, tmp_path):
    run, fails = installs
    fails("vllm==")
    python, with_vllm = gpu.environment(tmp_path / "here")
    assert python == tmp_path / "here-alone/bin/python" and not with_vllm
    assert len(run) == 2 and run[1].endswith(" ".join(gpu.ALONE))


def test_the_python_that_runs_it_is_the_last_resort(installs, tmp_path):
    _, fails = installs
    fails("pip install")
    assert gpu.environment(tmp_path / "here") == (Path(sys.executable), True)
    fails(sys.executable)
    assert gpu.environment(tmp_path / "here") is None


def test_every_test_of_streams_on_a_card_runs_on_the_fake_of_one():
    """So that none of their lines is run for the first time where minutes are short."""
    paths = ("tests", "tests/v1/kv_connector/unit")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "gpu.fake_card", f"{gpu.UNIT}/test_cuda.py"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / p) for p in paths)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "7 passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.parametrize(("code", "status"), [("pass", 0), ("assert False", 1)])
def test_the_status_is_that_of_the_tests(monkeypatch, capfd, tmp_path, code, status):
    (tmp_path / "test_it.py").write_text(f"def test_it():\n    {code}\n")
    monkeypatch.setattr(gpu, "cards", lambda: 1)
    monkeypatch.setattr(gpu, "can", lambda python, code: code == gpu.SEES_CARD)
    files = [str(tmp_path / "test_it.py")]
    monkeypatch.setattr(gpu, "suites", lambda with_vllm: [("it", files, {})])
    assert gpu.main(["--python", sys.executable]) == status
    told = capfd.readouterr().out
    assert f"it: {'FAILED (1)' if status else 'passed'}" in told
    assert "were left out: no vLLM" in told


def test_every_file_that_it_runs_is_there():
    for _, files, env in gpu.suites(with_vllm=True):
        assert [file for file in files if not (ROOT / file).exists()] == []
        assert env == {"VLLM_GPU_SYNC_CHECK": "error"}
    assert len(gpu.suites(with_vllm=True)) == 3 and len(gpu.suites(False)) == 1


def test_the_kernel_s_tests_run_without_vllm(without_vllm):
    """Torch and Triton are enough; without a card the interpreter runs a part of them."""
    part = "large_factors or rings or wider_matrix or alignment"
    command = [sys.executable, "-S", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-k", part, *gpu.KERNEL_TESTS]
    done = subprocess.run(
        command, cwd=ROOT, env=without_vllm, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_the_worker_runs_without_vllm(without_vllm):
    """As the tests and the report on a card have it, over layers that are given."""
    code = """
import sys
sys.path.insert(0, "benchmarks/kernels")
import torch
from bare_worker import bare_worker
from benchmark_kv_checksum import Shape, layer_of
from vllm.distributed.kv_transfer.kv_checksum.checksum import KVChecksumBlocks, KVChecksumScheduled
worker = bare_worker({0: (16, [layer_of(Shape("", 2, 16, 8), 4, "cpu")])})
worker.bind(KVChecksumScheduled(reqs_to_send={"r": KVChecksumBlocks(32, {0: (0, [2, 1])})}))
(record,) = worker.post_forward(None, set(), set()).finalize()
print(record.checksums["r"][0].values.shape)
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=ROOT,
        env=without_vllm,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "(2, 1)\n", done.stderr[-2000:]
