"""Follow the drill of docs/features/kv_checksum.md as it is written: servers, commands and expected output.

Where there is a Prometheus, it scrapes D and the alerts of the document fire. Rig only: the servers are
forked, and the connector is told that KV lies in host memory.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from kv_checksum.rig.versions import older_than
from rig import documents
from rig.model import tiny_qwen3
from rig.prometheus import HOW, program, prometheus
from rig.servers import HOST, NIXL, SERVED_NAME, Server, serving

from e2e import pairs

pytestmark = pytest.mark.e2e

PROGRAMS = Path(sys.executable).parent

ERRORS = re.compile('"message":( ?)"[^"]*".*"reason":.*}}')
GENERAL = r'"message":\1"Internal server error",\1"type":\1"InternalServerError",\1"param":\1null,\1"code":\g<1>500}}'
"""The errors of the document, and what releases answer in their place that do not tell why."""

RULES = documents.FEATURES / "kv_checksum_alerts.yaml"


DRAWS = (
    ["--override-generation-config", '{"temperature": 0}']
    if older_than("0.31.0")
    else []
)
"""Triton's interpreter lacks what vLLM 0.30.0 draws tokens with, as the document's requests ask for."""


@pytest.fixture(scope="module")
def drill(forks):
    """Yield P and D with the configurations of the document's drill."""
    (block,) = [b for b in documents.blocks("bash", "gpu") if "FaultDrill" in b.text]
    words = shlex.split(block.text)
    settings = [
        json.loads(after)
        for word, after in zip(words, words[1:], strict=False)
        if word == "--kv-transfer-config"
    ]
    p, d = (
        Server(
            f"docs-drill-{s['kv_role']}",
            s["kv_role"],
            model=tiny_qwen3(),
            transfer={**s, **NIXL},
            args=DRAWS,
            fork_server=forks,
        )
        for s in settings
    )
    with serving(p, d):
        yield p, d


@pytest.fixture
def alerts(drill, tmp_path):
    """Yield a Prometheus that has seen D before the drill, or None."""
    if program("prometheus") is None:
        yield None
        return
    with prometheus(tmp_path, RULES, [drill[1]]) as server:
        server.wait("up")
        yield server


def test_the_drill_of_the_document(drill, alerts):
    p, d = drill
    where = {
        f"{k}": f"http://{HOST}:{s.port}" for k, s in zip("PD", drill, strict=True)
    }
    if alerts is not None:
        assert alerts.firing() == set()
    done = subprocess.run(
        ["bash", "-u", "-c", documents.script("drill")],
        env={
            **os.environ,
            **where,
            "MODEL": SERVED_NAME,
            "no_proxy": HOST,
            "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    (expected,) = documents.blocks("text", "drill")
    text = expected.text if pairs.TELLS_WHY else ERRORS.sub(GENERAL, expected.text)
    if not pairs.STREAMS_TELL:
        text = re.sub('data: {"error".*\n\n', "", text)
    lines = text.replace("MODEL", SERVED_NAME).splitlines()
    # The first command of the document, before any request, lists the counters.
    found = done.stdout.splitlines()
    assert found[-len(lines) :] == lines, done.stdout + done.stderr + d.log_errors()
    assert "P and D will verify each other (exit status 0)" in found
    assert_the_doctor_tells_what_the_drill_did(*where.values())
    (logged,) = documents.blocks("text", "log")
    for line in logged.text.splitlines():
        assert any(documents.fits(line, x) for x in d.log_text().splitlines()), line
    if alerts is None:
        pytest.skip(f"the drill passed; its alerts were not tried: {HOW}")
    for name in ("KVChecksumMismatch", "KVChecksumRequestsFail"):
        alerts.wait(name)


def assert_the_doctor_tells_what_the_drill_did(p: str, d: str):
    command = [PROGRAMS / "vllm-kv-checksum", "doctor", p, d]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and done.stderr == "", done.stdout + done.stderr
    lines = done.stdout.splitlines()
    settings = "checksums on (definition 2, payload version 2), fail-"
    assert lines[0].startswith(
        f"{p}: P, {settings}open; NixlConnector (kv_transfer_params);"
    )
    assert lines[1] == (
        f"{d}: D, {settings}closed, policy fail; KVChecksumFaultDrill (kv_transfer_params); "
        "loads since its start: 2 verified, 2 mismatch, 1 unverified"
    )
    assert f"{d} will verify what {p} sends" in lines
    for told in (
        f"not verified: {d}: 2 of 5 loads since its start were a mismatch: ",
        f"not verified: {d}: 1 of 5 loads since its start were not verified: no_payload",
        f"note: {d}: KVChecksumFaultDrill damages loads there on purpose",
    ):
        assert [x for x in lines if x.startswith(told)], done.stdout
    assert not [x for x in lines if "note" in x and "sent nothing yet" in x]


def test_every_metric_is_on_both_sides_from_the_start(drill):
    for server in drill:
        page = {name for name, _ in server.metrics() if "kv_checksum" in name}
        wanted = names_in_the_document() - {"vllm:kv_checksum_peer_loads_total"}
        # That one has no peer to name before the first bad load.
        assert {n.removesuffix("_created") for n in page} >= wanted
    assert pairs.skipped_groups(drill[1]) == {}


def names_in_the_document() -> set[str]:
    table = documents.GUIDE.read_text().split("## Metrics\n")[1].split("\n#")[0]
    return {x.split("`")[1] for x in table.splitlines() if x.startswith("| `vllm:")}
