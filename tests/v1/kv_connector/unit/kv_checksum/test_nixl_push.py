# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test NIXL push: both forms of a completion notif, and what workers hold for them."""

from types import SimpleNamespace

import msgspec
import pytest

from vllm.distributed.kv_transfer.kv_checksum.connectors import nixl_push
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlConnectorMetadata,
    compute_nixl_compatibility_hash,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import (
    NixlPushConnectorWorker,
)

from .rig import instances as rig
from .rig.receivers.nixl_push import PushConsumer

PLAIN = b"cmpl-a:0-1f:2"


def asked() -> dict:
    registration = {"request_id": "d"}
    nixl_push.ask(registration)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(registration))


def finish(side, sending=()):
    results = SimpleNamespace(finished_sending=set(sending), kv_checksums=None)
    side.finish(results)
    return results.kv_checksums


@pytest.mark.parametrize("size", [0, 8, 87_000])
def test_the_long_form_holds_what_the_plain_one_says(size):
    notif = nixl_push.add_payload(PLAIN, b"x" * size)
    assert nixl_push.split_payload(notif) == (PLAIN, b"x" * size)
    with pytest.raises(UnicodeDecodeError):
        notif.decode()  # so no plain notif is taken for it
    consumer = nixl_push.NixlPushChecksums()
    assert consumer.take(notif, {"cmpl-a:0-1f"}) == PLAIN


def test_the_first_copy_of_an_awaited_request_is_kept_for_one_step():
    consumer = nixl_push.NixlPushChecksums()
    awaited = {"r": object()}
    for payload in (b"first", b"second"):
        assert consumer.take(nixl_push.add_payload(b"r:1", payload), awaited) == b"r:1"
    assert consumer.take(nixl_push.add_payload(b"gone:1", b"x"), awaited) == b"gone:1"
    assert consumer.take(b"HB:r", awaited) == b"HB:r"
    assert finish(consumer) == {"r": b"first"}
    assert finish(consumer) == {}


def test_payloads_go_to_consumers_that_asked_only():
    producer = nixl_push.NixlPushChecksums()
    producer.hold({"new": b"sums", "old": b"sums"})
    producer.negotiate("new", asked())
    producer.negotiate("old", {"request_id": "d"})
    for _ in range(2):  # one WRITE per rank
        long = producer.completion_notif("new", b"d:1")
        assert nixl_push.split_payload(long) == (b"d:1", b"sums")
    assert producer.completion_notif("old", b"d:1") == b"d:1"
    assert producer.completion_notif("never held", b"d:1") == b"d:1"


def test_a_send_that_ended_or_expired_carries_nothing_more():
    producer = nixl_push.NixlPushChecksums()
    producer.hold({"r": b"sums", "other": b"sums"})
    assert finish(producer, {"r", "unknown"}) == {}
    producer.negotiate("r", asked())
    assert producer.completion_notif("r", b"d:1") == b"d:1"
    assert producer._outgoing == {"other": b"sums"}


@pytest.mark.parametrize("long", [(1, 1), (1, 0), (0, 1), (0, 0)])
def test_both_forms_take_the_same_completion_accounting(long):
    """Complete after two producer ranks, each with or without a payload."""
    consumer = PushConsumer(["r"])
    for i, with_payload in enumerate(long):
        notif = b"r:2"
        if with_payload:
            notif = nixl_push.add_payload(notif, f"from {i}".encode())
        assert consumer.get(notif) == (["r"] if i else [])
    payload = {(1, 1): b"from 0", (1, 0): b"from 0", (0, 1): b"from 1"}.get(long)
    assert finish(consumer.kv_checksums) == ({"r": payload} if payload else {})


def test_a_notif_of_an_unknown_request_completes_nothing():
    consumer = PushConsumer(["r"])
    unknown = nixl_push.add_payload(b"expired:1", b"sums")
    assert consumer.get(unknown) == []
    assert finish(consumer.kv_checksums) == {}
    assert consumer.get(b"r:1") == ["r"]


def test_payloads_of_requests_with_nothing_to_push_are_dropped(model):
    p = rig.Instance(model, "kv_producer", transport="push")
    p.scheduler.connector.send_kv_checksums(SimpleNamespace(request_id="r"), b"sums")
    assert not any(p.tables().values())


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_the_compatibility_hash_is_the_same_on_and_off(model, mode):
    hashes = {
        compute_nixl_compatibility_hash(
            rig.vllm_config(model, "kv_producer", enable_kv_checksum=on), "CPU", mode
        )
        for on in (True, False)
    }
    assert len(hashes) == 1


@pytest.mark.parametrize("on", [True, False])
def test_only_a_consumer_with_checksums_asks(model, on):
    p = rig.Instance(model, "kv_producer", transport="push")
    d = rig.Instance(model, "kv_consumer", transport="push", enable_kv_checksum=on)
    d.add("r", rig.tokens(50), rig.prefill(p, "p", rig.tokens(50)))
    meta = d.scheduler.schedule().kv_connector_metadata
    registration = meta.push_registrations["r"]
    producer = nixl_push.NixlPushChecksums()
    producer.hold({"p": b"sums"})
    producer.negotiate("p", registration)
    assert bool(producer._outgoing) == on
    # Nothing else of it differs from what a stock consumer sends.
    nixl_push.ask(stock := {})
    assert set(registration) - set(stock) == {
        *("request_id", "decode_engine_id", "decode_host", "decode_port"),
        *("decode_tp_size", "local_block_ids", "remote_engine_id", "remote_host"),
        *("remote_port", "remote_tp_size", "remote_pp_size"),
    }


class Producer:
    """vLLM's own handling of a step's metadata, without an agent."""

    start_load_kv = NixlPushConnectorWorker.start_load_kv

    def __init__(self):
        self.kv_checksums = nixl_push.NixlPushChecksums()
        self.held_at_hand_over: list[dict] = []
        self._finished_blocks_inbox = self
        self._push_writer_wake = SimpleNamespace(set=list)
        self._reqs_to_process, self._reqs_to_send = set(), {}
        self.pcp_rank, self._send_heartbeats = 0, lambda metadata: None

    def put(self, finished):
        # The writer thread may send these blocks from now on.
        self.held_at_hand_over.append(dict(self.kv_checksums._outgoing))


def test_a_payload_is_held_before_its_blocks_are_handed_over():
    meta = NixlConnectorMetadata()
    meta.push_finished_blocks = {"p": ([1],)}
    meta.push_finished_kv_checksums = {"p": b"sums"}
    producer = Producer()
    producer.start_load_kv(meta)
    assert producer.held_at_hand_over == [{"p": b"sums"}]
