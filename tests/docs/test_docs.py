"""Test the operators' documents: every command is run, every name exists, the alert rules load and fire.

Blocks that need servers are run by ``tests/e2e/test_drill_of_the_docs.py`` and ``test_servers_of_the_guide.py``, which starts
those that need a GPU as far as a machine without one can; here vLLM parses their configurations. Mooncake's settings are those
of the rig's servers.
"""

import ast
import inspect
import json
import os
import re
import shlex
import subprocess
import textwrap
from pathlib import Path

import pytest
from rig import documents, exchanges, scratch, servers, stock
from rig.prometheus import HOW, program

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_checksum import KVChecksumCarrier, info, metrics
from vllm.distributed.kv_transfer.kv_checksum.checksum import Skipped
from vllm.distributed.kv_transfer.kv_checksum.connectors import (
    mooncake_store,
    simple_cpu_offload,
)
from vllm.distributed.kv_transfer.kv_checksum.verdict import LeftOut, Unverified
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.metrics import loggers

FEATURES = documents.FEATURES
MARKS = {
    "bash": {"run", "drill", "promtool", "gpu", "mooncake"},
    "text": {"drill", "log"},
    "dockerfile": {""},  # its RUN lines are commands of "run" blocks
}


def test_every_block_says_how_it_is_tested():
    for language, marks in MARKS.items():
        assert {b.mark for b in documents.blocks(language)} == marks
    fences = re.findall(r"^```(\w+)", documents.GUIDE.read_text(), re.MULTILINE)
    assert set(fences) == set(MARKS)


@pytest.fixture
def scratch_venv(tmp_path):
    """Return an environment with an unpatched vLLM."""
    site = scratch.make_venv(tmp_path / "venv")
    stock.link_stock_vllm(site)
    return tmp_path / "venv"


def test_installing_as_the_document_says(scratch_venv, tmp_path):
    """Install without an index: pip builds with the test environment's own setuptools."""
    here = scratch.checkout(tmp_path / "checkout")

    def said(script):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=here,
            env=scratch.environment(scratch_venv),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def assert_applied(status):
        assert status.startswith("applied series") and str(scratch_venv) in status

    assert_applied(said(documents.script("run")).splitlines()[-1])
    said("vllm-kv-checksum diff && vllm-kv-checksum revert")
    said("pip uninstall -y vllm-kv-checksum")
    (dockerfile,) = documents.blocks("dockerfile")
    copied = re.findall(r"^COPY \. (.*)$", dockerfile.text, re.MULTILINE)
    run = re.findall(r"^RUN (.*)$", dockerfile.text, re.MULTILINE)
    assert len(copied) == 1 and len(run) == 2
    for line in run:
        said(line.replace(copied[0], str(here)))
    assert_applied(said("vllm-kv-checksum status"))


def configurations():
    """Return every ``--kv-transfer-config`` of the blocks that need a GPU."""
    words = shlex.split(documents.script("gpu"))
    return [
        json.loads(after)
        for word, after in zip(words, words[1:], strict=False)
        if word == "--kv-transfer-config"
    ]


def test_vllm_takes_every_configuration_of_the_document():
    assert len(configurations()) == documents.script("gpu").count("vllm serve") >= 8
    for settings in configurations():
        config = KVTransferConfig(**settings)
        assert config.enable_kv_checksum
        assert KVConnectorFactory.get_connector_class(config)
        for inner in config.kv_connector_extra_config.get("connectors", ()):
            assert KVConnectorFactory.get_connector_class(KVTransferConfig(**inner))


def test_the_rig_s_servers_have_the_settings_of_mooncake_that_the_document_names():
    lines = documents.script("mooncake").splitlines()
    named = dict(line.removeprefix("export ").split("=") for line in lines)
    assert named and named.items() <= servers.ENVIRONMENT.items()


def names_in_code() -> set[str]:
    """Return the samples on ``/metrics`` that the feature makes."""
    names = set()

    class Metric:
        def __init__(self, name, **_):
            names.add(name + self.suffix)

        def labels(self, *_):
            return self

        def set(self, _):
            pass

    counter = type("Counter", (Metric,), {"suffix": "_total"})
    gauge = type("Gauge", (Metric,), {"suffix": ""})
    metrics.KVChecksumProm(counter, gauge, [], {0: []})
    return names | {info.NAME}


def test_documents_rules_and_dashboard_name_the_metrics_of_the_code():
    ours = names_in_code()
    for file in FEATURES.iterdir():
        named = set(re.findall(r"vllm:kv_checksum_\w+", file.read_text()))
        assert named and named <= ours, (file.name, named - ours)
        others = set(re.findall(r"vllm:(?!kv_checksum)\w+", file.read_text()))
        source = Path(loggers.__file__).read_text()
        for name in others:
            assert (
                f'"vllm:{name.removeprefix("vllm:").removesuffix("_total")}"' in source
            )
    guide = documents.GUIDE.read_text()
    assert {n for n in ours if n in guide} == ours
    board = (FEATURES / "kv_checksum_dashboard.json").read_text()
    assert {n for n in ours if n in board} == ours


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("Unverified loads", Unverified),
        ("Groups left out of one request", LeftOut),
        ("Skipped groups", Skipped),
    ],
)
def test_the_tables_of_reasons_are_those_of_the_code(section, values):
    text = documents.GUIDE.read_text().split(f"### {section}\n")[1].split("\n#")[0]
    rows = re.findall(r"^\| `(\w+)`", text, re.MULTILINE)
    assert rows == ["reason", *(v.value for v in values)]


def test_the_guide_lists_why_a_store_s_loads_are_not_checked():
    """Find every text that a store's decision can give, as its source has it."""
    section = documents.GUIDE.read_text().partition("### Loads from a store")[2]
    section = section.partition("NIXL push")[0]
    said = {
        text
        for module in (mooncake_store, simple_cpu_offload)
        for text in texts_returned(module.why_not_stored)
        if text != "enable_kv_checksum is off"  # then nobody asks
    }
    listed = set(re.findall(r"^\| `(.*?)`", section, re.MULTILINE))
    assert said <= listed, said - listed
    assert len(listed) == len(said) + 3
    assert (
        "layers are not full attention" in section and "KV cache group ...:" in section
    )


def texts_returned(function):
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    returns = [n.value for n in ast.walk(tree) if isinstance(n, ast.Return)]
    return {n.value for n in returns if isinstance(n, ast.Constant) and n.value}


def test_label_values_are_those_of_the_code():
    guide = documents.GUIDE.read_text()
    for values in (
        metrics.VERDICTS,
        [c.value for c in KVChecksumCarrier],
        [r.value for r in LeftOut],
    ):
        assert ", ".join(values) in guide


def headings(path):
    return {
        re.sub(r"[^\w -]", "", h).lower().replace(" ", "-")
        for h in re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    }


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)]+)\)", documents.GUIDE.read_text()):
        file, _, heading = link.partition("#")
        target = FEATURES / file if file else documents.GUIDE
        assert target.exists(), link
        assert not heading or heading in headings(target), link


def test_the_rules_load_and_fire_on_the_drills_series():
    if program("promtool") is None:
        pytest.skip(HOW)
    tool = str(Path(program("promtool")).parent)
    done = subprocess.run(
        ["bash", "-eu", "-c", documents.script("promtool")],
        cwd=FEATURES.parent.parent,
        env={**os.environ, "PATH": f"{tool}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SUCCESS") == 2


def test_the_dashboards_queries_parse(tmp_path):
    """Parse the queries with promtool, in place of Grafana, after filling in variables."""
    if program("promtool") is None:
        pytest.skip(HOW)
    board = json.loads((FEATURES / "kv_checksum_dashboard.json").read_text())
    rules = []
    for panel in board["panels"]:
        for number, target in enumerate(panel["targets"]):
            query = re.sub(r"\$__(rate_interval|range)", "5m", target["expr"])
            query = re.sub(r"\$(model_name|instance)", ".*", query)
            rules.append({"record": f"panel:{panel['id']}:{number}", "expr": query})
    path = tmp_path / "panels.yaml"
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(
        [program("promtool"), "check", "rules", path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout
    variables = {v["name"] for v in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(board["panels"])))
    assert used == variables


def test_the_table_of_routers_is_what_the_replay_shows():
    found = re.findall(
        r"^\| (.*) \| (NIXL pull|NIXL push|Mooncake) \| (.*?) \|",
        documents.GUIDE.read_text(),
        re.MULTILINE,
    )
    names = {"nixl_pull": "NIXL pull", "nixl_push": "NIXL push", "mooncake": "Mooncake"}
    assert found == [
        (x.router, names[x.connector], x.becomes) for x in exchanges.read()
    ]
