"""Test that the mutants' data fit the code, and that their runner tells what was seen from what was not."""

from __future__ import annotations

import pytest
from rig import mutants

import vllm
from vllm_kv_checksum import KNOWN_VERSIONS


@pytest.fixture(scope="module")
def known():
    return {mutant.id: mutant for mutant in mutants.read()}


@pytest.mark.skipif(
    not vllm.__version__.startswith(KNOWN_VERSIONS[-1]),
    reason="mutants break the newest release's edits",
)
def test_every_mutant_stands_once_in_its_function_and_has_tests(known):
    wrong = []
    for mutant in known.values():
        try:
            mutant.source()
        except (ValueError, SyntaxError) as error:
            wrong.append(f"{mutant.id}: {error}")
        missing = [file.name for file in mutant.test_files() if not file.exists()]
        if missing or not mutant.tests or not mutant.why:
            wrong.append(f"{mutant.id}: no tests {missing}, or no reason")
    assert wrong == []
    assert len(known) == len(mutants.read()) > 150


def test_no_id_stands_twice_and_what_is_left_out_has_its_reason(known):
    """An id names one break for ever: neither another one, nor one left out."""
    left_out = mutants.gone()
    ids = [mutant.id for mutant in mutants.read()] + [i for i, _ in left_out]
    assert sorted(ids) == sorted({*ids})
    assert all(why for _, why in left_out)


def test_a_mutant_that_no_test_sees_is_told_with_what_it_means(
    known, monkeypatch, capsys
):
    """Run the same break with the tests that see it, and with others."""
    seen = known["U14"]
    blind = mutants.Mutant(
        **{**vars(seen), "id": "blind", "tests": ("tests/series/test_edits.py",)}
    )
    assert blind.test_files()[0].exists()
    monkeypatch.setattr(mutants, "read", lambda: [seen, blind])
    assert mutants.main(["U14"]) == 0
    told = capsys.readouterr().out
    assert "U14 seen tests/v1/kv_connector/unit/kv_checksum/test_verdict.py::" in told
    assert "mutants: 1 of 1 seen" in told
    assert mutants.main(["blind"]) == 1
    told = capsys.readouterr().out
    module = "vllm.distributed.kv_transfer.kv_checksum.scheduler.group_comparison"
    assert f"blind SURVIVED in {module}" in told
    assert blind.why in told and "mutants: 0 of 1 seen" in told


def test_a_mutant_without_its_place_is_not_called_seen(known, capsys, monkeypatch):
    lost = mutants.Mutant(**{**vars(known["U14"]), "before": "nowhere"})
    monkeypatch.setattr(mutants, "read", lambda: [lost])
    assert mutants.main([]) == 1
    assert "U14 NOT RUN" in capsys.readouterr().out


def test_ids_that_are_not_there_are_named(capsys):
    with pytest.raises(SystemExit):
        mutants.main(["X99"])
    assert "no mutants X99" in capsys.readouterr().err


def test_a_mutant_that_needs_a_gpu_is_left_out_and_said(known, capsys, monkeypatch):
    monkeypatch.setattr(mutants.torch.cuda, "is_available", lambda: False)
    on_gpus = mutants.Mutant(**{**vars(known["E21"]), "gpu": True})
    monkeypatch.setattr(mutants, "read", lambda: [on_gpus])
    assert mutants.main([]) == 0
    told = capsys.readouterr().out
    assert "E21 left out it needs a GPU" in told
    assert "mutants: 0 of 1 seen, 1 left out, which need a GPU" in told
