# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test log lines: bounded, attributed, in storms; and what a failing client reads."""

import logging
from types import SimpleNamespace

import pytest

from vllm.distributed.kv_transfer.kv_checksum import KVChecksumBlocks
from vllm.distributed.kv_transfer.kv_checksum.payload import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_checksum.scheduler import factory, report
from vllm.distributed.kv_transfer.kv_checksum.scheduler.pending import PendingLoad
from vllm.distributed.kv_transfer.kv_checksum.verdict import (
    Difference,
    GroupVerdict,
    LoadVerdict,
    Unverified,
)
from vllm.v1.outputs import KVConnectorOutput

from .rig.instances import RequestStatus, pair


def mismatch(groups=1, blocks=5):
    samples = [Difference(p, 2**64 - 1, p) for p in range(3)]
    return LoadVerdict(
        {g: GroupVerdict(0, 9, list(range(blocks)), samples) for g in range(groups)}
    )


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({}, "an unknown engine"),
        (
            {"remote_engine_id": "e", "remote_host": "h", "remote_port": 5},
            "remote engine e at h:5",
        ),
        (
            {
                "remote_engine_id": "e",
                "remote_bootstrap_addr": "http://h:9",
                "transfer_id": "x",
            },
            "remote engine e at http://h:9 (transfer_id x)",
        ),
        ({"remote_engine_id": {}, "remote_host": ["h"]}, "remote engine <dict> at <li"),
        ({"remote_engine_id": "a\nERROR b"}, "remote engine a?ERROR b"),
    ],
)
def test_the_sending_engine_is_named_as_far_as_it_is_known(params, said):
    assert report.remote_engine(params).startswith(said)


def test_startup_says_how_checksums_are_carried_and_what_a_bad_load_leads_to(
    model, transport, log, caplog
):
    caplog.set_level(logging.INFO, factory.logger.name)
    p, d = pair(model, None, dict(kv_checksum_fail_closed=True), transport=transport)
    on = [x for x in log if x.startswith("INFO KV checksums are on")]
    carried = f"carried by {d.transport.carrier.value}, "
    connector = d.transport.connector
    assert [x.split(": ")[1] for x in on] == [
        f"loads through {connector} are verified, {carried}fail-open",
        f"loads through {connector} are verified, {carried}fail-closed (fail)",
    ]


def test_a_line_is_bounded_whatever_clients_send(log):
    params = dict.fromkeys(
        ("remote_engine_id", "remote_host", "remote_port", "transfer_id"), "x" * 10_000
    )
    source = report.remote_engine(params)
    report.Reporter().load("r" * 9999, mismatch(500, 10_000), source, "served")
    (line,) = log
    assert len(line) < 2000
    assert (
        "group 0: 10000 of 9 blocks differ (positions 0-9999), position 0 sent f"
        in line
    )
    assert "496 more groups" in line and line.endswith("; served")


def test_a_storm_is_counted_whole_and_shown_in_part(model, log, monkeypatch):
    _, d = pair(model)
    kv_checksum, now = d.scheduler.kv_checksum, [0.0]
    kv_checksum._reporter = report.Reporter(lambda: now[0])
    kv_checksum._consequences.reporter = kv_checksum._reporter
    monkeypatch.setattr(kv_checksum._judging, "judge", lambda *_: mismatch())
    waiting = SimpleNamespace(
        status=RequestStatus.WAITING_FOR_REMOTE_KVS, _block_hasher=None
    )
    log.clear()
    for step in range(10):
        now[0] = float(step)
        ids = {f"{step}-{n}" for n in range(100)}
        for req_id in ids:
            kv_checksum._stats["loads_started"] += 1
            kv_checksum._recvs[req_id] = PendingLoad(
                req_id,
                KVChecksumBlocks(1, {}),
                carrier=KVChecksumCarrier.CONNECTOR,
            )
        output = KVConnectorOutput(finished_recving=ids)
        kv_checksum.collect(output)
        kv_checksum.verify(output, dict.fromkeys(ids, waiting))
    stats = kv_checksum.take_stats()
    assert stats["loads:mismatch:connector"] == 1000
    assert stats["blocks_mismatched"] == 5000
    shown = [x for x in log if "KV checksum mismatch: request" in x]
    assert len(shown) == report.MAX_LINES and len(log) == report.MAX_LINES + 1
    kv_checksum.collect(None)
    assert len(log) == report.MAX_LINES + 1, "the window has not ended"
    now[0] = report.WINDOW_S
    kv_checksum.collect(None)
    assert log[-1].startswith("ERROR KV checksum mismatches: 990 more")
    kv_checksum.collect(None)
    assert len(log) == report.MAX_LINES + 2
    kv_checksum._reporter.load("next", mismatch(), "source", "served")
    assert "request next" in log[-1], "the next window shows lines again"


def test_each_reason_for_unverified_loads_is_said_once(log):
    reporter = report.Reporter()
    reasons = (Unverified.NO_PAYLOAD, Unverified.FINGERPRINT, Unverified.NUM_TOKENS)
    for number in range(2):
        for reason in reasons:
            verdict = LoadVerdict(unverified=reason)
            reporter.load(f"r{number}", verdict, "source", "served")
    warned = [x for x in log if x.startswith("WARNING KV checksums not verified: ")]
    said = [f"{reason.value} (first for request r0, source; " for reason in reasons]
    assert len(warned) == 3
    assert all(text in x for text, x in zip(said, warned, strict=True))


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        ([3], "1 of 9 blocks differ, position 0"),
        ([3, 4, 5], "3 of 9 blocks differ (positions 3-5), "),
        ([0, 3, 4, 100, 2000], "5 of 9 blocks differ (positions 0, 3-4, 100, 2000), "),
        (
            list(range(0, 40, 2)),
            "20 of 9 blocks differ (positions 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, "
            "22, 24, 26, 28, 30, 4 more), ",
        ),
    ],
)
def test_the_positions_that_differ_are_named_as_ranges(positions, said):
    samples = [Difference(0, 1, 2)]
    verdict = LoadVerdict({0: GroupVerdict(0, 9, positions, samples)})
    assert f"group 0: {said}" in report._differences(verdict)


def test_a_mismatch_s_line_is_bounded(log):
    """Bound the line, whatever a client names and however much differs."""
    spread = list(range(0, 200_000, 2))
    samples = [Difference(p, 2**64 - 1, 2**64 - 2) for p in range(3)]
    verdict = LoadVerdict({g: GroupVerdict(0, 9, spread, samples) for g in range(9)})
    params = dict.fromkeys(
        ("remote_engine_id", "remote_host", "remote_port", "transfer_id"), "x" * 5000
    )
    source = report.remote_engine(params)
    report.Reporter().load("r" * 5000, verdict, source, "request failed")
    (line,) = [x for x in log if "KV checksum mismatch" in x]
    assert len(line) < 2000
