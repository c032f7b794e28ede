# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test what is kept of mismatches: complete, bounded, and never in the engine's way."""

import json
import os

import pytest

from vllm.distributed.kv_transfer.kv_checksum import KVChecksumBlocks
from vllm.distributed.kv_transfer.kv_checksum.payload import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_checksum.scheduler import evidence
from vllm.distributed.kv_transfer.kv_checksum.scheduler.pending import PendingLoad
from vllm.distributed.kv_transfer.kv_checksum.verdict import (
    Difference,
    GroupVerdict,
    LoadVerdict,
)

from .rig import instances as rig
from .rig.instances import flip_bit, load, pair, tokens


def lines(folder):
    files = sorted(folder.iterdir(), key=lambda f: ".old." not in f.name)
    return [json.loads(x) for f in files for x in f.read_text().splitlines()]


def mismatch(positions=5, groups=1):
    samples = [Difference(p, 2**64 - 1, p) for p in range(3)]
    group = GroupVerdict(0, 9, list(range(positions)), samples)
    return LoadVerdict(dict.fromkeys(range(groups), group))


def loaded(req_id="r", **params):
    return PendingLoad(
        req_id,
        KVChecksumBlocks(1, {}),
        carrier=KVChecksumCarrier.CONNECTOR,
        params=params,
    )


@pytest.mark.parametrize("mode", rig.MODES)
def test_a_mismatch_is_written_as_the_log_tells_it(
    model, transport, mode, tmp_path, log
):
    settings = dict(rig.MODES[mode], kv_checksum_evidence_dir=str(tmp_path))
    p, d = pair(model, None, settings, transport=transport)
    load(p, d, 100, "good", prompt=tokens(100, 1))
    assert not list(tmp_path.iterdir()), "a verified load touches no file"
    d.damage = flip_bit
    load(p, d, 100, "bad", prompt=tokens(100, 2))
    kept = d.scheduler.kv_checksum._judging.evidence
    assert kept.flush(10)
    (entry,) = lines(tmp_path)
    assert json.loads(json.dumps(kept.recent[0])) == entry
    (line,) = [x for x in log if "KV checksum mismatch" in x]
    (group,) = entry["groups"].values()
    (sample,) = group["samples"]
    told = f"position {sample['position']} sent {sample['expected']}"
    assert f"{told} loaded {sample['found']}" in line
    assert line.endswith(f"; {entry['action']}")
    assert f"request {entry['request_id']}, " in line
    assert f"remote engine {entry['peer_engine']} at " in line
    assert entry["peer_host"] in line.split(" at ")[1]
    assert (group["compared"], group["mismatched"]) == (7, 1)
    assert group["positions"] == [sample["position"]]
    assert entry["carrier"] == d.transport.carrier.value
    assert set(entry) == {
        "time",
        "request_id",
        "peer_engine",
        "peer_host",
        "connector",
        "carrier",
        "other_prompt",
        "num_tokens",
        "num_bad_groups",
        "groups",
        "action",
    }, "neither tokens nor KV may get in"


def test_memory_and_lines_are_bounded_whatever_clients_send():
    kept = evidence.Evidence(None)
    for _ in range(300):
        kept.add(
            loaded("r" * 9999, remote_engine_id="x" * 9999), mismatch(10_000, 50), "x"
        )
    assert len(kept.recent) == 256
    assert max(len(json.dumps(entry)) for entry in kept.recent) < 64_000


def test_files_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "MAX_FILE_BYTES", 2000)
    old = [tmp_path / f"kv_checksum_mismatches.h.{n}.jsonl" for n in range(70)]
    for n, file in enumerate(old):
        file.write_text("{}\n")
        os.utime(file, (n, n))
    other = tmp_path / "other.jsonl"
    other.touch()
    kept = evidence.Evidence(str(tmp_path))
    for n in range(40):
        kept.add(loaded(f"r{n}"), mismatch(), "served")
        assert kept.flush(10)
    files = list(tmp_path.glob("kv_checksum_mismatches.*"))
    assert len(files) <= 64 and old[-1].exists() and not old[0].exists()
    assert max(f.stat().st_size for f in files) < 2000 and other.exists()
    ids = [e["request_id"] for e in lines(tmp_path) if "time" in e]
    assert ids[-1] == "r39" and len(ids) < 40


def test_a_disk_that_takes_nothing_is_said_once_and_holds_nobody_up(tmp_path, log):
    """Take the directory away; when it is there again, lines are written again."""
    folder = tmp_path / "gone"
    folder.mkdir()
    kept = evidence.Evidence(str(folder))
    folder.rmdir()
    for _ in range(3):
        kept.add(loaded(), mismatch(), "served")
    assert kept.flush(10)
    (line,) = [x for x in log if "kv_checksum_evidence_dir" in x]
    assert line.startswith("WARNING") and str(folder) in line
    folder.mkdir()
    kept.add(loaded("next"), mismatch(), "served")
    assert kept.flush(10)
    assert [e["request_id"] for e in lines(folder)] == ["next"]


def test_a_disk_that_hangs_loses_old_lines_and_tells_how_many(tmp_path, monkeypatch):
    kept = evidence.Evidence(str(tmp_path))
    with kept._changed:  # the thread waits for this
        monkeypatch.setattr(evidence.Thread, "start", lambda thread: None)
        for n in range(300):
            kept.add(loaded(f"r{n}"), mismatch(), "served")
    monkeypatch.undo()
    kept._thread.start()
    assert kept.flush(20)
    written = lines(tmp_path)
    assert len(written) == 256 and written[0]["request_id"] == "r44"
    assert written[0]["lost_before"] == 44
