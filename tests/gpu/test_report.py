"""Test the parts of ``make gpu-report`` that need no card: what it makes and checks, how it judges, and what it writes.

The measurements here are made up, or the interpreter's on tiny caches; none says anything of a card.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace

import gpu_report
import kernel_variants
import pytest
import torch
from benchmark_kv_checksum import Shape

from vllm.distributed.kv_transfer.kv_checksum.worker import worker
from vllm.distributed.kv_transfer.kv_checksum.worker.kernels import (
    torch_reference,
    triton_kernel,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")

SMALL = [
    gpu_report.Case(Shape("head-major", 2, 16, 8)),
    gpu_report.Case(Shape("token-major", 2, 16, 8), token_major=True),
    gpu_report.Case(Shape("half", 2, 16, 8), tokens=8),
    gpu_report.Case(Shape("MLA", 1, 64, 18)),
    gpu_report.Case(Shape("rows", 5, 1, 40)),
]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(gpu_report, "CASES", SMALL)
    monkeypatch.setattr(gpu_report, "PUBLISHED", SMALL[0])
    monkeypatch.setattr(gpu_report, "ROWS_OF_1_MB", SMALL[-1])
    monkeypatch.setattr(gpu_report, "SIZES", [2**11])


def test_without_a_card_it_says_so_with_a_status_of_its_own(capsys):
    assert gpu_report.main([]) == gpu_report.NO_CARD == 77
    assert "NOT RUN: torch sees no CUDA card" in capsys.readouterr().err


def test_the_published_case_is_134_megabytes():
    case = gpu_report.PUBLISHED
    assert 2**27 // case.shape.block_bytes == 2048
    assert case.shape.block_bytes == 8 * 16 * 128 * 2 * 2


def test_sizes_end_where_the_card_s_memory_does():
    for case in gpu_report.CASES:
        numbers = gpu_report.sizes(case, 40 * 10**9)
        left = 2**33 - numbers[-1] * case.shape.block_bytes
        assert 0 <= left < case.shape.block_bytes
        assert gpu_report.sizes(case, 2**24)[-1] * case.shape.block_bytes <= 2**22


def test_a_kernel_with_other_sums_is_found(small):
    kernels = {"today": triton_kernel}
    assert gpu_report.wrong_sums("cpu", kernels) == []
    kernels["other"] = kernel_variants.variant(kernel_variants.DEFINITION_1)
    found = gpu_report.wrong_sums("cpu", kernels)
    assert found == [f"{case.name}, other" for case in SMALL]


@pytest.mark.parametrize("sizes", kernel_variants.TILINGS)
def test_tiles_of_every_size_give_the_same_sums(small, sizes):
    kernel = kernel_variants.variant(kernel_variants.tiling(*sizes))
    assert sizes[0] == kernel._TILE and sizes[2] == kernel._NUM_WARPS
    assert gpu_report.wrong_sums("cpu", {"tiled": kernel}) == []


def test_the_probes_leave_out_what_they_name():
    # One slice, so that one program alone adds to a sum.
    made = gpu_report.Prepared(gpu_report.Case(Shape("", 1, 16, 8)), 3, "cpu")
    right = made.sums(torch_reference)
    plain = kernel_variants.variant(kernel_variants.PROBES["instructions"])
    assert not torch.equal(made.sums(plain), right)
    words = made.layer.blocks
    folded = words ^ ((words >> 33) & (2**31 - 1))
    assert made.sums(plain).sum() == folded.sum()
    stored = kernel_variants.variant(kernel_variants.PROBES["atomics"])
    made.out.fill_(1)
    made.summing(stored)()
    # Stored, not added: what was there before is gone.
    assert torch.equal(made.out, right)


def test_a_text_that_the_kernel_lacks_is_an_error():
    with pytest.raises(ValueError, match="the kernel has changed"):
        kernel_variants.variant((("nowhere", ""),))


def test_the_yardsticks_read_and_copy_all():
    words = torch.randint(-(2**62), 2**62, (20_000,))
    assert kernel_variants.reader(words)().item() == words.sum()
    target = torch.zeros_like(words)
    kernel_variants.copier(words, target)()
    assert torch.equal(target, words)


@pytest.fixture
def report(small, monkeypatch):
    """Return a report of the interpreter: its form is right, its rates mean nothing."""
    monkeypatch.setattr(gpu_report, "TILINGS", kernel_variants.TILINGS[:2])
    return gpu_report.run("cpu", 2**14, 5, 1, SMALL[:2])


def test_a_whole_run(report, tmp_path):
    assert report["left out"] == [] and len(report["results"]) == 2 + 2
    assert {tuple(one["tiling"]) for one in report["variants"]} == {
        *kernel_variants.TILINGS[:2]
    }
    gpu_report.write(report, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["machine"]
    told = (tmp_path / "report.md").read_text()
    assert "| head-major |" in told and "Sizes for head-major: " in told


def test_what_there_is_no_time_for_is_named(small, monkeypatch):
    monkeypatch.setattr(gpu_report, "TILINGS", kernel_variants.TILINGS[:1])
    report = gpu_report.run("cpu", 2**14, -1, 1, SMALL)
    assert report["results"] == []
    assert report["left out"][-5:] == [case.name for case in SMALL]


def test_wrong_sums_end_it(small, monkeypatch):
    monkeypatch.setattr(gpu_report, "wrong_sums", lambda *_: ["here"])
    with pytest.raises(SystemExit, match="WRONG SUMS: here"):
        gpu_report.run("cpu", 2**14, 5, 1, SMALL)


def test_the_cost_of_a_load_is_counted():
    cost = gpu_report.worker_costs("cpu", 4, 3, 1)
    # The CPU's kernel is not Triton's.
    assert cost["launches"] == 0 and cost["host us"] > 0
    assert cost["until the sums are on the host us"] >= cost["host us"]


def test_launches_are_counted(monkeypatch):
    """Layers of one shape share a launch."""
    monkeypatch.setattr(worker, "select_backend", lambda *_: triton_kernel.prepare)
    cost = gpu_report.worker_costs("cpu", 4, 3, 1)
    assert cost["launches"] == 1


def test_the_program_from_its_options_to_its_files(
    small, monkeypatch, tmp_path, capsys
):
    """The card is made up: it is the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**14, 2**15))
    monkeypatch.setattr(gpu_report, "TILINGS", kernel_variants.TILINGS[:1])
    run = gpu_report.run
    monkeypatch.setattr(gpu_report, "run", lambda device, *args: run("cpu", *args))
    options = ["--minutes", "5", "--repeats", "1", "--out", str(tmp_path)]
    assert gpu_report.main(options) == 0
    assert {file.suffix for file in tmp_path.iterdir()} >= {".json", ".md"}
    assert (tmp_path / "report.md").read_text() in capsys.readouterr().out


def made_up():
    """Return a made-up report of a card that does not exist."""
    rates = {"triton": 800.0, "definition 1": 900.0, "copy": 850.0, "read": 1000.0}
    row = {"shape": "a case", "blocks": 9, "bytes": 2**27, "GB/s": rates}
    row |= {"ms": {"triton": 0.1678}, "of read": 0.8}
    tried = [
        {**row, "tiling": sizes, "of read": share}
        for sizes, share in ((gpu_report.TODAY, 0.8), ((512, 8, 2), 0.9))
    ]
    return {
        "machine": "made up",
        "results": [row],
        "variants": tried,
        "recommendations": {"a case": gpu_report.recommendation(tried)},
        "bounds": {
            "a case": gpu_report.bound(0.8, {"atomics": 0.9, "instructions": 0.8})
        },
        "worker": [{"launches": 1, "host us": 123.0}],
        "published": "a figure",
        "left out": ["another case"],
    }


def test_the_table_and_the_plot_of_a_made_up_measurement(tmp_path, capsys):
    gpu_report.write(made_up(), tmp_path)
    told = (tmp_path / "report.md").read_text()
    assert "| a case | 134.2 | 0.1678 | 800 | 900 | 850 | 1000 | 80% |" in told
    assert "take tiles of 512 pieces, 4096 per program, 2 warps: 90%" in told
    assert "What bounds a case: atomics: 90% of a plain read without, 80% with." in told
    assert "Left out, for lack of time: another case." in told
    if importlib.util.find_spec("matplotlib"):
        assert "800 of 1000" in (tmp_path / "report.svg").read_text()
    else:
        assert "no SVG: this needs matplotlib" in capsys.readouterr().out


def test_verdicts_on_made_up_shares():
    today = {"tiling": gpu_report.TODAY, "of read": 0.9}
    other = {"tiling": (512, 8, 1), "of read": 0.91}
    assert gpu_report.recommendation([today, other]).startswith("keep tiles of 256")
    assert gpu_report.bound(0.9, {}).startswith("none: 90%")
    same = {"atomics": 0.7, "instructions": 0.71}
    assert gpu_report.bound(0.7, same) == (
        "none of atomics, instructions: 70% of a plain read"
    )
    assert replace(gpu_report.PUBLISHED, tokens=8).tokens == 8
