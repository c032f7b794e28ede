"""Test the documents' structure: every link leads somewhere, every map and figure is the code's."""

import json
import re
from pathlib import Path

import evidence
import plots
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from rig.model import CACHE

from vllm.distributed.kv_transfer import kv_checksum
from vllm.distributed.kv_transfer.kv_checksum import checksum, metrics
from vllm.distributed.kv_transfer.kv_checksum.scheduler import client_errors, report
from vllm.distributed.kv_transfer.kv_checksum.verdict import (
    Difference,
    GroupVerdict,
    LoadVerdict,
)

ROOT = CACHE.parent
README = ROOT / "README.md"
DESIGN = ROOT / "docs/design/kv_checksum.md"
EVIDENCE = ROOT / "docs/design/kv_checksum_evidence.md"
RESULTS = ROOT / "benchmarks/results"
DOCUMENTS = sorted([README, *ROOT.glob("docs/**/*.md")])
FEATURE = Path(kv_checksum.__file__).parent

FENCE = re.compile(r"^```(\w*).*?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def sections(path, level="##"):
    """Return the text of every section of a level by its heading, in order."""
    text = FENCE.sub("", path.read_text())
    parts = re.split(rf"^{level} (.*)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def anchors(path):
    """Return the anchors that GitHub gives a document's headings."""
    text = FENCE.sub("", path.read_text())
    return {
        re.sub(r"[^\w -]", "", h).lower().replace(" ", "-")
        for h in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


def rows(text, head):
    """Return the cells of the table whose first line begins with `head`."""
    lines = text[text.index(head) :].splitlines()[2:]
    end = next(i for i, line in enumerate([*lines, ""]) if not line.startswith("|"))
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines[:end]
    ]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_every_link_leads_somewhere(path):
    links = re.findall(r"\]\(([^)]+)\)", FENCE.sub("", path.read_text()))
    assert links
    for link in links:
        file, _, heading = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        assert not heading or heading in anchors(target), link


def test_every_picture_is_shown():
    for picture in ROOT.glob("docs/**/*.svg"):
        shown = [p for p in DOCUMENTS if f"]({picture.name})" in p.read_text()]
        assert shown, picture


def test_the_design_is_in_a_reader_s_order():
    assert list(sections(DESIGN)) == [
        "What it does, and why",
        "One request, from P to D",
        "Where the code is",
        "Vocabulary",
        "The definition",
        "A request's life",
        "Payload and carriers",
        "Verdicts and failure",
        "Cache layouts",
        "Stored checksums",
        "The ledger",
        "Cost",
    ]
    before, _, rest = DESIGN.read_text().partition("<!-- begin: model families -->")
    made, _, after = rest.partition("<!-- end: model families -->")
    assert made and len((before + after).splitlines()) < 400


def test_the_design_draws_one_request():
    (diagram,) = [text for kind, text in FENCE.findall(DESIGN.read_text()) if kind]
    actors = dict(re.findall(r"participant (\w+) as (.*)", diagram))
    assert sorted(actors.values()) == [
        "D scheduler",
        "D worker",
        "P scheduler",
        "P worker",
        "proxy",
    ]
    ends = re.findall(r"^ *(\w+)-?->>(\w+): .", diagram, re.MULTILINE)
    assert len(ends) > 8 and {name for pair in ends for name in pair} == set(actors)


def test_the_vocabulary_has_every_term():
    words = [row[0] for row in rows(sections(DESIGN)["Vocabulary"], "| term |")]
    assert words == [
        "piece",
        "slice",
        "unit",
        "factor",
        "term",
        "position",
        "replica key",
        "check",
        "fingerprint",
        "record",
        "payload",
        "verdict",
        "ledger",
    ]


def test_the_definition_is_the_code_s():
    """Evaluate the printed formula: it gives `checksum_terms`."""
    text = sections(DESIGN)["The definition"]
    lines = dict(re.findall(r"^    (\w+) *= (.*?)(?:   .*)?$", text, re.MULTILINE))
    (factor,), (fold,) = (
        re.findall(r" G = (\w+)", text),
        re.findall(r" C = (\w+)", text),
    )
    low32 = re.search(r"low32\(v\) = (.*)$", text, re.MULTILINE)[1].replace("^", "**")
    known = {"G": int(factor, 16), "C": int(fold, 16), "H": 2**16, "low32": None}
    known["low32"] = lambda v: eval(low32, {"v": v})
    for layer, head, x, (t, P, p) in (
        (0, 0, 1, (0, 16, 0)),
        (31, 7, 2**64 - 1, (4095, 64, 63)),
        (5, 3, 0x3F80000000000000, (17, 2, 1)),
    ):
        names = {**known, "layer": layer, "head": head, "x": x, "t": t, "P": P, "p": p}
        for name in ("j", "m", "w", "y", "u", "term"):
            names[name] = eval(lines[name], names) % 2**64
        assert names["m"] == checksum.slice_factor(layer, head)
        pieces, weights = (checksum.np.array([n], "u8") for n in (x, names["w"]))
        assert names["term"] == int(checksum.checksum_terms(pieces, weights)[0])


@pytest.mark.parametrize("path", [README, DESIGN], ids=["readme", "design"])
def test_the_map_is_the_package_s(path):
    listed = re.findall(r"^    (\w+/?)  +\w", kv_checksum.__doc__, re.MULTILINE)
    there = {p.stem for p in FEATURE.glob("*.py")} - {"__init__"}
    there |= {f"{p.parent.name}/" for p in FEATURE.glob("*/__init__.py")}
    assert set(listed) == there and len(listed) == len(there)
    (drawn,) = re.findall(
        r"((?:^    \w+/?  +\w.*\n)+)", kv_checksum.__doc__, re.MULTILINE
    )
    assert drawn in path.read_text()


def test_the_readme_leads_to_the_code():
    text = README.read_text()
    table = rows(text, "| to read |")
    assert [row[0] for row in table[:4]] == [
        "the definition",
        "the GPU kernel",
        "the verdict of a load",
        "one connector's part",
    ]
    for named, row in zip(
        ("def checksum_terms", "@triton.jit", "class LoadVerdict", "def ask"),
        table,
        strict=False,
    ):
        link = re.search(r"\]\(([^)#]+)\)", row[1])[1]
        assert named in (ROOT / link).read_text(), link
    assert text.index("## Where things are") < text.index("## What is covered")


def test_the_readme_s_mismatch_is_what_the_code_says(monkeypatch):
    """Make its line, client error and metrics again from the values in the line."""
    shown = [text for kind, text in FENCE.findall(README.read_text()) if kind == "text"]
    line, error, counted = (text.rstrip("\n") for text in shown)
    said = re.fullmatch(
        r"KV checksum mismatch: request (\S+), remote engine (\S+) at (\w+):(\d+) "
        r"\(remote_request_id (\S+)\), group 0: 1 of (\d+) blocks differ, "
        r"position (\d+) sent (\w+) loaded (\w+); request failed",
        line,
    )
    req_id, engine, host, port, remote_id, compared, at, sent, loaded = said.groups()
    params = {"remote_engine_id": engine, "remote_host": host, "remote_port": port}
    params["remote_request_id"] = remote_id
    position = int(at)
    differ = Difference(position, int(sent, 16), int(loaded, 16))
    group = GroupVerdict(0, int(compared), [position], [differ])
    verdict = LoadVerdict({0: group})
    logged = []
    monkeypatch.setattr(
        report.logger, "error", lambda text, *a: logged.append(text % a)
    )
    source = report.remote_engine(params)
    report.Reporter().load(req_id, verdict, source, "request failed")
    assert logged == [line]
    assert client_errors.client_error(verdict) == (
        "kv_checksum_mismatch",
        error,
    )
    registry = CollectorRegistry()

    class InRegistry:
        def __init__(self, kind):
            self.kind = kind

        def __call__(self, multiprocess_mode="", **kwargs):
            return self.kind(registry=registry, **kwargs)

    prom = metrics.KVChecksumProm(
        InRegistry(Counter),
        InRegistry(Gauge),
        ["model_name", "engine"],
        {0: ["MODEL", "0"]},
    )
    stats = {
        "loads:mismatch:kv_transfer_params": 1,
        "blocks_compared": verdict.num_compared,
        "blocks_mismatched": verdict.num_mismatched,
        "failed": 1,
    }
    prom.observe(stats, 0)
    exported = generate_latest(registry).decode().splitlines()
    nonzero = [n for n in exported if re.match(r"vllm:\w+_total.* [^0]", n)]
    assert sorted(nonzero) == sorted(counted.splitlines())


def host_result(size):
    return json.loads((RESULTS / f"host_blocks_{size}.json").read_text())


def test_the_rates_that_are_drawn_are_the_table_s():
    names = ["numba", "read", None, "torch", "copy"]
    names += ["Adler-32 (zlib)", "CRC-32 (zlib)", "xxh3-64 (xxhash)"]
    result = json.loads((RESULTS / "kernel_cpu.json").read_text())
    table = rows(EVIDENCE.read_text(), "| one layer's blocks |")
    assert len(table) == len(plots.rates(result)) == 9
    for row, found in zip(table, result["results"], strict=True):
        rates = found["GB/s"]
        assert plots.named_bytes(found["bytes"]) == row[1].removesuffix(" (one block)")
        for name, cell in zip(names, row[2:], strict=True):
            if name is None:
                assert cell == f"{found['of read']:.0%}"
            else:
                assert float(cell) == rates[name]
    drawn = (ROOT / "docs/design/kv_checksum_kernel_cpu.svg").read_text()
    for rates in plots.rates(result).values():
        assert f"{rates['numba']:g} of {rates['read']:g}" in drawn


def test_the_host_s_times_that_are_drawn_are_the_table_s():
    table = rows(EVIDENCE.read_text(), "| request(s) |")
    drawn = (ROOT / "docs/design/kv_checksum_host.svg").read_text()
    results = [host_result(size) for size in (16, 64, 128)]
    for column, result in enumerate(results, start=3):
        # In the table's order; it may have rows that are not drawn.
        cells = iter(int(row[column].split()[0]) for row in table)
        assert all(found["us"] in cells for found in result["results"])
    sums = {
        name: sum(took.values()) for name, took in plots.host_steps(results).items()
    }
    assert len(sums) == 6
    for name, total in sums.items():
        assert f"> {total:.0f}<" in drawn and f">{name}<" in drawn
    text = sections(EVIDENCE, "###")["The host"]
    about = re.search(r"about ([\d.]+) ms on P and about ([\d.]+) ms on D", text)
    assert sums["P, blocks of 16"] / 1000 == pytest.approx(float(about[1]), abs=0.05)
    assert sums["D, blocks of 16"] / 1000 == pytest.approx(float(about[2]), abs=0.05)
    # The rows are what the benchmark prints.
    source = (ROOT / "benchmarks/benchmark_kv_checksum_host.py").read_text()
    for name in plots.STEPS:
        assert name.replace("8 workers", "{WORKERS} workers") in source


def test_what_is_drawn_says_where_it_is_from():
    """Results are transcribed from a table, or as their program wrote them."""
    for file in RESULTS.iterdir():
        result = json.loads(file.read_text())
        if file.stem not in ("kernel_instructions", "serving", "serving_switched"):
            assert "kv_checksum_evidence.md" in result["transcribed_from"]
            assert file.name in EVIDENCE.read_text()


def test_the_requests_and_layouts_that_are_drawn_are_the_tables_():
    text = EVIDENCE.read_text()
    (requests,) = evidence.results("requests")
    totals = {(r["tokens"], r["side"]): r["us"] for r in requests["whole requests"]}
    table = rows(text, "| tokens | P |")
    assert len(totals) == 2 * len(table) == 8
    for row in table:
        for side, cell in (("P", row[1]), ("D", row[3])):
            tokens = int(row[0].replace(",", ""))
            found = totals[tokens, side]["without reading"]
            assert found == int(cell.replace(",", ""))
    (layouts,) = evidence.results("cpu_layouts")
    drawn = {(r["cache"], r["bytes"]): r for r in layouts["results"]}
    table = rows(text, "| layer | 1 MiB |")
    assert len(drawn) == 3 * len(table)
    for row in table:
        for size, cell in zip((2**20, 2**24, 2**26), row[1:4], strict=True):
            shares, _, ns = cell.partition(", ")
            result = drawn[row[0], size]
            assert int(ns.removesuffix(" ns").replace(",", "")) == result["ns per unit"]
            yardsticks = ("of plain sum in place", "of read")
            for yardstick, share in zip(yardsticks, shares.split(" / "), strict=True):
                told = [int(n) for n in share.removesuffix("%").split("-")]
                ends = [round(100 * end) for end in result[yardstick]]
                assert ends == [told[0], told[-1]]


@pytest.mark.parametrize("plot", [*evidence.PLOTS])
def test_the_plots_are_the_same_every_time(plot, tmp_path):
    pytest.importorskip("matplotlib")
    drawn = evidence.draw(plot, tmp_path)
    kept = evidence.DOCUMENT.parent / f"kv_checksum_{plot}.svg"
    assert kept.exists() == (drawn is not None)
    if drawn is not None:
        assert drawn.read_bytes() == kept.read_bytes()


def test_results_of_two_programs_are_not_drawn_together(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="no results of one program"):
        plots.draw([{"cells": []}, {"machine": ""}], tmp_path / "none")


@pytest.mark.parametrize("name", [*evidence.sections()])
def test_generated_sections_are_what_the_results_say(name):
    assert evidence.written(name) == evidence.sections()[name]
