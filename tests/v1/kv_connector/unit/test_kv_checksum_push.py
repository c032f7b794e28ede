# SPDX-License-Identifier: Apache-2.0
"""NIXL push: the two forms of a completion notif, and what a worker holds for them."""

from types import SimpleNamespace

import msgspec
import pytest

from vllm.distributed.kv_transfer.kv_checksum import nixl_push

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
    assert nixl_push.split_payload(notif) == ("cmpl-a:0-1f", 2, b"x" * size)
    with pytest.raises(UnicodeDecodeError):
        notif.decode()  # so no plain notif is taken for it
    consumer = nixl_push.NixlPushChecksums()
    assert consumer.take(notif, {"cmpl-a:0-1f"}) == PLAIN


def wire(*fields):
    return nixl_push._PREFIX + msgspec.msgpack.encode(fields)


BAD = {
    "empty": nixl_push._PREFIX,
    "no msgpack": nixl_push._PREFIX + b"\xc1",
    "nested": nixl_push._PREFIX + b"\x91" * 100_000,
    "two fields": wire("r", 1),
    "text": wire("r", 1, "text"),
    "TP size 0": wire("r", 0, b""),
    "TP size is text": wire("r", "1", b""),
    "id is a number": wire(1, 1, b""),
    "bad id": nixl_push._PREFIX + b"\x93\xa1\xff\x01\xc4\x00",
}


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_notif_is_said_and_dropped(name, log):
    with pytest.raises(ValueError):
        nixl_push.split_payload(BAD[name])
    consumer = nixl_push.NixlPushChecksums()
    assert consumer.take(BAD[name], {"r"}) == b""
    assert log[-1].startswith("ERROR") and "does not decode" in log[-1]
    assert finish(consumer) == {}


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
        assert nixl_push.split_payload(long) == ("d", 1, b"sums")
    assert producer.completion_notif("old", b"d:1") == b"d:1"
    assert producer.completion_notif("never held", b"d:1") == b"d:1"


def test_a_send_that_ended_or_expired_carries_nothing_more():
    producer = nixl_push.NixlPushChecksums()
    producer.hold({"r": b"sums", "other": b"sums"})
    assert finish(producer, {"r", "unknown"}) == {}
    producer.negotiate("r", asked())
    assert producer.completion_notif("r", b"d:1") == b"d:1"
    assert producer._outgoing == {"other": b"sums"}
