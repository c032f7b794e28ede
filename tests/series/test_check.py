"""Test judging a vLLM: what is there is found, what is not is named, and nothing is written."""

import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from rig import releases
from rig.stock import link_stock_vllm

from vllm_kv_checksum import KNOWN_VERSIONS, cli
from vllm_kv_checksum.apply import find_package, read_feature
from vllm_kv_checksum.check import Report, check
from vllm_kv_checksum.series import PATCHES, load_series
from vllm_kv_checksum.stock import open_stock

SCHEDULER = "v1/core/sched/scheduler.py"
MOONCAKE = "distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return a folder that holds the unpatched vLLM under test."""
    folder = tmp_path_factory.mktemp("stock")
    link_stock_vllm(folder)
    return folder


@pytest.fixture(scope="module")
def feature():
    return read_feature(cli.feature_dir())


@pytest.fixture(scope="module")
def stock(site, feature):
    """Return the same vLLM, read once."""
    with open_stock(site, None) as opened:
        assert not check(opened, feature).problems
        return opened


def look(folder: Path) -> dict[str, tuple]:
    """Return what is in a folder, without following its links."""
    return {
        str(path): (path.lstat().st_mtime_ns, path.lstat().st_size, path.is_symlink())
        for path in folder.rglob("*")
    }


def changed(stock, path: str, *texts: tuple[str, str]):
    """Return the vLLM with some text of a file replaced; without any, it lacks the file."""
    source = stock.read(path).decode() if texts else None
    for old, new in texts:
        if old not in source:
            assert not stock.version.startswith(KNOWN_VERSIONS[-1])
            pytest.skip(f"vLLM {stock.version} has no {old}")
        source = source.replace(old, new)

    def read(name: str) -> bytes | None:
        if name != path:
            return stock.read(name)
        return None if source is None else source.encode()

    trees = {name: tree for name, tree in stock._trees.items() if name != path}
    return replace(stock, read=read, _trees=trees, _paths={})


def told(report: Report) -> list[tuple[str, str, str]]:
    return [(f.patch, f.kind, f"{f.what}: {f.problem}") for f in report.problems]


def test_a_stock_vllm_fits_and_every_anchor_is_named(site, capsys):
    before = look(site)
    assert cli.main(["check", "--tree", str(site)]) == 0
    text = capsys.readouterr().out
    assert "MISSING" not in text
    assert all(f"{patch.name}: fits\n" in text for patch in PATCHES)
    version = find_version(site)
    assert f"vLLM {version} (known version) in {site}/vllm fits: apply." in text
    for module in load_series():
        for edit in module.edits:
            if edit.concerns(version):
                where = f"    anchor {module.path}: {edit.scope}"
                assert any(
                    line.startswith(where) and edit.anchor in line
                    for line in text.splitlines()
                ), (module.path, edit.scope, edit.anchor)
    # By hand: the scheduler's hook into updates relies on this parameter.
    assert (
        f"names {SCHEDULER}: Scheduler._free_request (parameters request): found\n"
        in text
    )
    assert look(site) == before


def find_version(site: Path) -> str:
    (metadata,) = site.glob("vllm-*.dist-info/METADATA")
    lines = metadata.read_text().splitlines()
    return next(line[9:] for line in lines if line.startswith("Version: "))


def test_an_anchor_changed_by_hand_is_named_and_nothing_is_written(
    site, tmp_path, capsys
):
    tree = tmp_path / "tree"
    shutil.copytree(site, tree, symlinks=True)
    file = tree / "vllm" / SCHEDULER
    text = file.read_text()
    file.unlink()
    file.write_text(text.replace("if ext_tokens is None:", "if None is ext_tokens:"))
    before = look(tree)
    assert cli.main(["check", "--tree", str(tree)]) == 1
    printed = capsys.readouterr().out
    missing = [line for line in printed.splitlines() if "MISSING" in line]
    assert len(missing) == 1
    assert missing[0].startswith(
        f"    anchor {SCHEDULER}: Scheduler.schedule, before `if ext_tokens is None:`"
    )
    assert "scheduler: does not fit\n" in printed
    assert "does not fit:\n" in printed and "Nothing was written" in printed
    assert cli.main(["check", "--tree", str(tree), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False and found["known"] is True
    assert [name for name, fits in found["patches"].items() if not fits] == [
        "scheduler"
    ]
    (problem,) = [f for f in found["findings"] if f["problem"]]
    assert problem["file"] == SCHEDULER and problem["kind"] == "anchor"
    assert "matches 0 statements" in problem["problem"]
    assert look(tree) == before


@pytest.mark.parametrize(
    ("path", "texts", "patch", "expected"),
    [
        (
            "v1/core/sched/scheduler.py",
            [("def _free_request(", "def _free(")],
            "scheduler",
            "anchor Scheduler._free_request, after `connector_delay_free_blocks",
        ),
        (
            "v1/core/sched/scheduler.py",
            [("block_aligned_local", "aligned")],
            "scheduler",
            "names Scheduler.schedule: Scheduler.schedule has no block_aligned_local",
        ),
        (
            "v1/core/sched/scheduler.py",
            [("_handle_failed_recving", "_handle_failures")],
            "scheduler",
            "Scheduler.update_from_output has no self._handle_failed_recving",
        ),
        (
            MOONCAKE,
            [("pull_metas", "metas")],
            "mooncake",
            "MooncakeConnectorWorker.process_pulling_result has no pull_metas",
        ),
        (
            "model_executor/layers/mamba/abstract.py",
            [("MambaSpec(", "Spec(")],
            "mamba-state-splits",
            "anchor MambaBase.get_kv_cache_spec, the call of MambaSpec",
        ),
        (
            "model_executor/layers/mamba/mamba_utils.py",
            [("class MambaStateShapeCalculator", "class Calculator")],
            "mamba-state-splits",
            "anchor MambaStateShapeCalculator (before it)",
        ),
        (
            "v1/simple_kv_offload/worker.py",
            [("TYPE_CHECKING", "TYPES")],
            "simple-cpu-offload",
            "anchor a place for imports",
        ),
        (
            "distributed/kv_transfer/kv_connector/v1/multi_connector.py",
            [("Any", "Some")],
            "multi-connector",
            "names MultiConnector: MultiConnector has no Any",
        ),
        (
            "model_executor/layers/mamba/short_conv.py",
            [],
            "mamba-state-splits",
            "anchor ShortConv (last in it): the file is missing",
        ),
        (
            "v1/kv_cache_interface.py",
            [("class UniformTypeKVCacheSpecs", "class UniformSpecs")],
            "definition",
            "vllm.v1.kv_cache_interface has no UniformTypeKVCacheSpecs",
        ),
        (
            "distributed/kv_transfer/kv_connector/v1/base.py",
            [("class KVConnectorBase_V1(", "class KVConnectorBase(")],
            "worker",
            "anchor KVConnectorBase_V1 (last in it)",
        ),
        (
            "v1/kv_cache_interface.py",
            [("max_tp_shards", "shards")],
            "replicated-indexer",
            "MiniMaxM3IndexerCache.get_kv_cache_spec has no "
            "MLAAttentionSpec(max_tp_shards=...)",
        ),
        ("v1/outputs.py", [("def is_empty", "def is_empty(")], "settings", "read"),
    ],
)
def test_what_a_vllm_lacks_is_named(stock, feature, path, texts, patch, expected):
    report = check(changed(stock, path, *texts), feature)
    found = [(p, f"{kind} {text}") for p, kind, text in told(report)]
    assert any(p.startswith(patch) and expected in text for p, text in found), found
    assert not report.patches()[next(p for p, _ in found if p.startswith(patch))]
    assert "does not fit:" in report.to_text()


def test_names_that_nothing_relies_on_may_change(stock, feature):
    other = changed(stock, "v1/metrics/loggers.py", ("mm_cache_stats", "mm_stats"))
    assert told(check(other, feature)) == []


def test_an_unknown_version_is_judged_by_what_it_has(stock, feature):
    if not stock.version.startswith(KNOWN_VERSIONS[-1]):
        pytest.skip("an older release, which gets other edits than an unknown one")
    report = check(replace(stock, version="9.9.9"), feature)
    assert not report.problems and not report.known
    assert "(unknown version)" in report.to_text()
    assert "fits: apply --force" in report.to_text()
    # Below 0.33.0 other edits are made: a worker that defers sends lacks nothing.
    older = check(replace(stock, version="0.32.0"), feature)
    assert not any("finalize_step" in f.what for f in older.findings)


def test_a_wheel_is_judged_like_the_tree_in_it(site, tmp_path, capsys):
    wheel = tmp_path / "vllm-0.33.0-cp38-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in (p for p in site.rglob("*") if p.suffix in (".py", "")):
            if path.is_file() and (path.relative_to(site).parts[0] == "vllm"):
                archive.write(path, path.relative_to(site).as_posix())
        version = find_version(site)
        for name in ("METADATA", "RECORD"):
            text = f"Version: {version}\n" if name == "METADATA" else ""
            archive.writestr(f"vllm-{version}.dist-info/{name}", text)
    capsys.readouterr()
    before = look(tmp_path)
    assert cli.main(["check", "--wheel", str(wheel), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert cli.main(["check", "--tree", str(site), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert found["findings"] == tree["findings"]
    assert (found["vllm"], found["place"]) == (version, str(wheel))
    assert look(tmp_path) == before


def test_what_cannot_be_judged_says_why(site, tmp_path, capsys):
    def error(*arguments: str) -> str:
        assert cli.main(["check", *arguments]) == 2
        return capsys.readouterr().err

    assert "no vLLM found in /nowhere" in error("--tree", "/nowhere")
    assert f"no vLLM found in {tmp_path}" in error("--tree", str(tmp_path))
    patched = str(find_package(None))
    text = error("--tree", patched)
    assert f"the series is applied to the vLLM in {patched}" in text
    assert "revert" in text and "--wheel" in text
    assert "No such file" in error("--wheel", str(tmp_path / "vllm.whl"))
    file = tmp_path / "vllm-0.33.0-cp38-abi3-linux_x86_64.whl"
    file.write_bytes(b"text")
    assert "is not an intact wheel" in error("--wheel", str(file))
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("other/__init__.py", "")
    assert "is not a wheel of vLLM" in error("--wheel", str(file))
    with pytest.raises(SystemExit):
        cli.main(["check", "--tree", str(site), "--wheel", str(file)])
    assert "not allowed with" in capsys.readouterr().err


def test_help_says_what_it_does(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "write nothing" in text and "Exit status 0: all of these are there" in text
    for option in ("--tree DIR", "--wheel FILE", "--json"):
        assert option in text


@pytest.mark.slow
@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_every_known_release_fits_and_one_changed_anchor_is_named(
    version, tmp_path, capsys
):
    """Judge vLLM's own wheel, and a tree out of it, before and after a change by hand."""
    wheel = releases.wheel_of(version)
    assert cli.main(["check", "--wheel", str(wheel), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["vllm"] == version and found["known"] and found["fits"]
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path, [n for n in archive.namelist() if n[-3:] == ".py"])
    tree = ["check", "--tree", str(tmp_path)]
    assert cli.main(tree) == 0
    assert f"vLLM {version} (known version)" in capsys.readouterr().out
    scheduler = tmp_path / "vllm" / SCHEDULER
    source = scheduler.read_text()
    anchor = "if ext_tokens is None:"
    assert source.count(anchor) == 1
    scheduler.write_text(source.replace(anchor, "if ext_tokens is None or False:"))
    before = look(tmp_path)
    assert cli.main(tree) == 1
    conclusion = capsys.readouterr().out.rpartition("does not fit:")[2]
    assert f"anchor {SCHEDULER}: Scheduler.schedule, before `{anchor}`" in conclusion
    assert conclusion.count("  anchor ") == 1
    assert look(tmp_path) == before
