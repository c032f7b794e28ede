# SPDX-License-Identifier: Apache-2.0
"""Mooncake P2P: what a response carries, and the order in which a consumer takes it."""

import asyncio
from types import SimpleNamespace

import kv_checksum_instances as rig
import msgspec
import pytest
from kv_checksum_receivers import MooncakeReceiver, pull
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

from vllm.distributed.kv_transfer.kv_checksum.mooncake import MooncakeChecksums


def sent(payload):
    return SendBlockMeta("p", "t", [[1]], ready=None, kv_checksums=payload)


class StockResponse(msgspec.Struct, omit_defaults=True):
    """The response as an instance without checksums knows it."""

    status: MooncakeXferResponseStatus
    ok_reqs: list[str] | None = None
    err_reqs: list[str] | None = None


def response(payloads, ok_reqs, **fields):
    encoded = msgspec.msgpack.encode(
        MooncakeXferResponse(
            MooncakeXferResponseStatus.FINISH,
            ok_reqs=ok_reqs,
            kv_checksums=payloads,
            **fields,
        )
    )
    return msgspec.msgpack.decode(encoded, type=MooncakeXferResponse)


def test_a_response_carries_what_there_is():
    found = MooncakeChecksums.of_sent([("a", sent(b"1")), ("b", sent(None))])
    assert found == {"a": b"1"}
    assert response(found, ["a", "b"]).kv_checksums == {"a": b"1"}
    assert MooncakeChecksums.of_sent([("b", sent(None))]) is None


def test_both_versions_read_each_others_responses():
    new = msgspec.msgpack.encode(response({"a": b"1"}, ["a"]))
    assert msgspec.msgpack.decode(new, type=StockResponse).ok_reqs == ["a"]
    old = StockResponse(MooncakeXferResponseStatus.FINISH, ok_reqs=["a"])
    old = msgspec.msgpack.encode(old)
    assert msgspec.msgpack.decode(old, type=MooncakeXferResponse).kv_checksums is None
    nothing = msgspec.msgpack.encode(response(None, ["a"]))
    assert b"kv_checksums" not in nothing


def test_a_payload_is_queued_before_its_load_is_marked_finished():
    receiver = MooncakeReceiver()
    receiver.process_pulling_result(
        response({"a": b"1", "b": b"2"}, ["a"]), pull("a", "b")
    )
    assert receiver.seen_when_finished == [{"a": b"1"}]


@pytest.mark.skipif(
    not hasattr(MooncakeConnectorWorker, "_complete_pull_task"),
    reason="vLLM 0.32.0 itself fails on an answer for a request not asked for",
)
def test_payloads_of_others_and_failures_are_left():
    receiver = MooncakeReceiver()
    pulled = pull("a")
    receiver.process_pulling_result(response({"x": b"1"}, ["x", "a"]), pulled)
    assert pulled == {} and receiver.seen_when_finished == [{}]


def test_the_first_copy_wins_and_nothing_stays():
    checksums = MooncakeChecksums()
    for payload in (b"first", b"second"):
        checksums.receive({"a": payload}, ["a"], {"a"})
    results = KVConnectorTransferResults()
    checksums.finish(results)
    assert results.kv_checksums == {"a": b"first"}
    again = KVConnectorTransferResults()
    checksums.finish(again)
    assert again.kv_checksums == {}


@pytest.mark.parametrize("blocks", [None, [], [[1]]])
def test_only_requests_that_wait_to_be_sent_keep_a_payload(model, blocks):
    """None: unknown or aborted; no blocks: announced, and not finished."""
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
    sender = SimpleNamespace(reqs_need_send={"t": send})
    asyncio.run(MooncakeConnectorWorker.record_send_reqs(sender, meta))
    assert stored == [b"sums"]


def test_finished_loads_are_taken_before_the_queue_is_drained():
    """What arrives while they are taken comes along."""
    checksums = MooncakeChecksums()

    def take():
        checksums.receive({"a": b"1"}, ["a"], {"a"})
        return KVConnectorTransferResults(finished_recving={"a"})

    worker = SimpleNamespace(kv_checksums=checksums, get_transfer_results=take)
    connector = SimpleNamespace(connector_worker=worker)
    results = MooncakeConnector.get_transfer_results(connector, set())
    assert results.kv_checksums == {"a": b"1"}
