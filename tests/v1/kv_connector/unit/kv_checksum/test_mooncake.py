# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test what Mooncake P2P's responses carry, and the order in which it is taken."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from vllm.distributed.kv_transfer.kv_checksum import payload as wire
from vllm.distributed.kv_transfer.kv_checksum.connectors.mooncake import (
    MooncakeChecksums,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnector,
    MooncakeConnectorMetadata,
    MooncakeConnectorWorker,
    MooncakeXferResponse,
    MooncakeXferResponseStatus,
    SendBlockMeta,
)

from .rig import instances as rig
from .rig.receivers.mooncake import MooncakeReceiver, pull
from .rig.versions import without


def sent(payload):
    return SendBlockMeta("p", "t", [[1]], ready=None, kv_checksums=payload)


class StockResponse(msgspec.Struct, omit_defaults=True):
    """The response as an instance without checksums knows it."""

    status: MooncakeXferResponseStatus
    ok_reqs: list[str] | None = None
    err_reqs: list[str] | None = None


def raw(payloads) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(payloads))


def response(payloads, ok_reqs):
    encoded = msgspec.msgpack.encode(
        {
            "status": MooncakeXferResponseStatus.FINISH,
            "ok_reqs": ok_reqs,
            "kv_checksums": payloads,
        }
    )
    return msgspec.msgpack.decode(encoded, type=MooncakeXferResponse)


def answer(*sent_payloads) -> dict:
    """Return what a producer's response says, read without a type."""
    found = MooncakeXferResponse(MooncakeXferResponseStatus.FINISH, ["a", "b"])
    MooncakeChecksums.add_sent(found, zip("ab", map(sent, sent_payloads), strict=True))
    return msgspec.msgpack.decode(msgspec.msgpack.encode(found))


def test_a_response_carries_what_there_is():
    assert answer(b"1", None)["kv_checksums"] == {"a": b"1"}
    assert answer(b"1", b"2")["kv_checksums"] == {"a": b"1", "b": b"2"}
    assert "kv_checksums" not in answer(None, None)


def test_both_versions_read_each_others_responses():
    new = msgspec.msgpack.encode(response({"a": b"1"}, ["a"]))
    assert msgspec.msgpack.decode(new, type=StockResponse).ok_reqs == ["a"]
    old = StockResponse(MooncakeXferResponseStatus.FINISH, ok_reqs=["a"])
    old = msgspec.msgpack.encode(old)
    assert taken(msgspec.msgpack.decode(old, type=MooncakeXferResponse)) == [{}]
    assert taken(response(None, ["a"])) == [{}]


def taken(response, *awaited):
    """Return what a consumer finds when each of its loads is marked finished."""
    receiver = MooncakeReceiver()
    receiver.process_pulling_result(response, pull(*(awaited or ("a",))))
    return receiver.seen_when_finished


MALFORMED = {
    "text": "x",
    "number": 1,
    "list": [b"x"],
    "number keys": {1: b"1"},
    "no keys": {("a", "b"): b"1"},
    "huge": b"x" * 5_000_000,
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_field_loses_no_load(name):
    """Its payloads do not decode, which is not the same as none."""
    assert taken(response(MALFORMED[name], ["a"])) == [{"a": b""}]
    with pytest.raises(ValueError):
        wire.decode(b"")


@pytest.mark.parametrize("payload", [None, "text", 1, [b"1"], {"b": b"1"}, 1.5])
def test_a_malformed_payload_costs_no_other_request_its_own(payload):
    found = taken(response({"a": payload, "b": b"2"}, ["a", "b"]), "a", "b")
    assert found == [{"a": b"", "b": b"2"}, {}]


def test_a_payload_that_stands_twice_is_none():
    twice = msgspec.Raw(b"\x82\xa1a\xc4\x011\xd9\x01a\xc4\x012")
    assert msgspec.msgpack.decode(twice) == {"a": b"2"}
    assert taken(response(twice, ["a"])) == [{"a": b""}]


def test_a_payload_is_queued_before_its_load_is_marked_finished():
    receiver = MooncakeReceiver()
    receiver.process_pulling_result(
        response({"a": b"1", "b": b"2"}, ["a"]), pull("a", "b")
    )
    assert receiver.seen_when_finished == [{"a": b"1"}]


@pytest.mark.skipif(
    not hasattr(MooncakeConnectorWorker, "_complete_pull_task"),
    reason=without("check that an answer is for a request it asked for"),
)
def test_payloads_of_others_and_failures_are_left():
    receiver = MooncakeReceiver()
    pulled = pull("a")
    receiver.process_pulling_result(response({"x": b"1"}, ["x", "a"]), pulled)
    assert pulled == {} and receiver.seen_when_finished == [{}]


def test_the_first_copy_wins_and_nothing_stays():
    checksums = MooncakeChecksums()
    for payload in ("damaged", b"first", b"second", "damaged"):
        checksums.receive(raw({"a": payload}), ["a"], {"a"})
    results = KVConnectorTransferResults()
    checksums.finish(results)
    assert results.kv_checksums == {"a": b"first"}
    again = KVConnectorTransferResults()
    checksums.finish(again)
    assert again.kv_checksums == {}


@pytest.mark.parametrize("transfer_id", [None, "", "t"])
def test_only_requests_that_mooncake_sends_are_summed(model, transfer_id):
    """Sum as many as Mooncake's own scheduler announces to its workers."""
    p = rig.Instance(model, "kv_producer", transport="mooncake")
    params = dict(do_remote_decode=True, do_remote_prefill=False)
    if transfer_id is not None:
        params["transfer_id"] = transfer_id
    request = p.add("r", rig.tokens(50), params)
    summed, announced, schedule = set(), set(), p.schedule

    def look():
        output = schedule()
        announced.update(output.kv_connector_metadata.reqs_to_send)
        if output.kv_checksum_scheduled is not None:
            summed.update(output.kv_checksum_scheduled.reqs_to_send)
        return output

    p.schedule = look
    p.run(request)
    p.step()
    assert summed == announced == ({"r"} if transfer_id else set())
    assert bool(p.stats.get("payload_bytes")) == bool(transfer_id)


@pytest.mark.parametrize("blocks", [None, [], [[1]]])
def test_only_requests_that_wait_to_be_sent_keep_a_payload(model, blocks):
    """Try unknown or aborted requests (None), and announced ones (no blocks)."""
    p = rig.Instance(model, "kv_producer", transport="mooncake")
    request = SimpleNamespace(request_id="r", kv_transfer_params={"transfer_id": "t"})
    if blocks is not None:
        side = p.scheduler.connector.connector_scheduler
        side._reqs_need_send["r"] = (request, blocks)
    p.scheduler.connector.send_kv_checksums(request, b"sums")
    meta = p.scheduler.schedule().kv_connector_metadata
    assert meta.kv_checksums == ({"r": b"sums"} if blocks else {})
    assert not any(p.tables().values())


def test_a_payload_is_stored_before_its_send_is_ready():
    stored = []
    send = sent(None)
    send.ready = SimpleNamespace(set=lambda: stored.append(send.kv_checksums))
    meta = MooncakeConnectorMetadata()
    meta.reqs_to_send = {"p": ("t", [[1]])}
    meta.kv_checksums = {"p": b"sums"}
    sender = SimpleNamespace(reqs_need_send={"t": send}, kv_checksums=object())
    asyncio.run(MooncakeConnectorWorker.record_send_reqs(sender, meta))
    assert stored == [b"sums"]


def test_finished_loads_are_taken_before_the_queue_is_drained():
    """What arrives while they are taken comes along."""
    checksums = MooncakeChecksums()

    def take():
        checksums.receive(raw({"a": b"1"}), ["a"], {"a"})
        return KVConnectorTransferResults(finished_recving={"a"})

    connector = MooncakeConnector.__new__(MooncakeConnector)
    connector.connector_worker = SimpleNamespace(
        kv_checksums=checksums,
        get_transfer_results=take,
        # vLLM 0.30.0 asks for this.
        get_finished=lambda: (None, take().finished_recving),
    )
    results = connector.get_transfer_results(set())
    assert results.kv_checksums == {"a": b"1"}
