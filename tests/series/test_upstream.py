"""Run those of vLLM's tests that once failed on the patched tree alone; ``make test-upstream`` runs many more."""

import json

import pytest
from rig import upstream


@pytest.mark.upstream
@pytest.mark.skipif(
    not upstream.SOURCE.exists(),
    reason="vLLM's tests are not there: make test-upstream fetches them",
)
def test_what_passes_on_stock_passes_on_the_patched_tree():
    assert upstream.compare(upstream.NAMED, timeout=300, fresh=False) == []
    stock, _ = upstream.trees()
    assert len(upstream.passed(stock, upstream.NAMED)) >= 35


def test_a_test_that_failed_in_any_phase_did_not_pass(tmp_path):
    lines = (
        ["ok", "passed"],
        ["bad", "failed"],
        ["torn", "passed"],
        ["torn", "failed"],
    )
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "v1--test_a.py.jsonl").write_text(text)
    tree = upstream.Tree("some", (), tmp_path)
    assert upstream.passed(tree, ["v1/test_a.py", "never/ran.py"]) == {"ok"}


@pytest.mark.parametrize("always", [True, False])
def test_what_passes_on_stock_alone_is_told_from_what_does_not_always_pass(
    tmp_path, monkeypatch, always
):
    """Compare two runs per tree, in which only `gone` fails twice on the patched one."""
    runs = {
        "stock": [("gone", "flaky", "other"), ("gone", "flaky")],
        "patched": [("other",), ("flaky",) if always else ("flaky", "gone")],
    }
    trees = [upstream.Tree(name, (), tmp_path / name) for name in runs]

    def run(tree, names, timeout):
        tree.results.mkdir(exist_ok=True)
        text = "".join(f'["{t}", "passed"]\n' for t in runs[tree.name].pop(0))
        upstream.result_file(tree, names[0]).write_text(text)

    monkeypatch.setattr(upstream, "trees", lambda: trees)
    monkeypatch.setattr(upstream, "run", run)
    found = upstream.compare(["test_a.py"], timeout=1, fresh=False)
    assert found == (["gone"] if always else [])
