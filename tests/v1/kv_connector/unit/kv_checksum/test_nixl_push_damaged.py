# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test that a damaged completion notif of NIXL push never costs another load anything.

What must come out is vLLM's own plain form of the notif, written out here, or nothing.
"""

from contextlib import ExitStack
from itertools import count
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_checksum import payload as wire
from vllm.distributed.kv_transfer.kv_checksum.connectors import nixl_push
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    PUSH_REG_NOTIF_PREFIX,
)
from vllm.v1.engine import FinishReason

from .rig import instances as rig
from .rig import real_workers as real
from .rig.receivers.nixl_push import PushConsumer

PAYLOAD = bytes(range(256)) + b"sums"

# Clients choose request ids: what separates the parts of a long form, and one whole.
IDS = {
    "usual": "cmpl-a:0-1f",
    "colons": ":::1:",
    "digits": "12:00000000:x:3",
    "empty": "",
    "lines": "a\nb\n",
    "not ASCII": "\u00e4\U0001f600\u00ff",
    "a long form's text": nixl_push.add_payload(b"x:1", b"y")[2:].decode(),
}


def long_form(req_id: str, tp_size: int = 2, payload: bytes = PAYLOAD):
    plain = f"{req_id}:{tp_size}".encode()
    producer = nixl_push.NixlPushChecksums()
    producer.hold({"p": payload})
    return plain, producer.completion_notif("p", plain)


def plain_end(notif: bytes, payload: bytes = PAYLOAD) -> int:
    """Return where the plain part ends: before ":", 8 digits, ":" and the base64."""
    return len(notif) - -(-len(payload) // 3) * 4 - 10


def take(notif: bytes, req_id: str):
    """Return what a consumer takes for the plain form and hands on, and if it asks."""
    consumer = nixl_push.NixlPushChecksums()
    plain = consumer.take(notif, {req_id})
    results = SimpleNamespace(finished_sending=set(), kv_checksums=None)
    consumer.finish(results)
    registration = {"request_id": "next"}
    nixl_push.ask(registration)
    asks = consumer.registration(registration) == registration
    return plain, results.kv_checksums, asks


def holds(notif: bytes, req_id: str, plain: bytes) -> bool:
    """Check what must hold either way, and return whether the plain form came out."""
    found, received, asks = take(notif, req_id)
    if not found:
        assert not asks and received == {}
        return False
    assert found == plain and asks and set(received) == {req_id}
    if received[req_id] != PAYLOAD:
        with pytest.raises(ValueError):
            wire.decode(received[req_id])
    return True


@pytest.mark.parametrize("name", IDS)
def test_every_cut(name):
    plain, notif = long_form(IDS[name])
    trusted = [holds(notif[:at], IDS[name], plain) for at in range(len(notif) + 1)]
    # From the plain part's end on.
    end = plain_end(notif)
    assert notif[:end].endswith(plain)
    if name == "usual":
        assert end < 64
    assert trusted == [at >= end for at in range(len(notif) + 1)]


@pytest.mark.parametrize("name", IDS)
def test_every_change_of_a_byte(name):
    plain, notif = long_form(IDS[name], payload=b"sums" * 4)
    lost = 0
    for at in range(len(notif)):
        for value in {0, 1, 9, 32, 48, 58, 65, 127, 128, 255, notif[at] ^ 1} - {
            notif[at]
        }:
            changed = notif[:at] + bytes([value]) + notif[at + 1 :]
            found, received, asks = take(changed, IDS[name])
            assert found in (plain, b"") and asks == bool(found)
            if found and received != {IDS[name]: b"sums" * 4}:
                with pytest.raises(ValueError):
                    wire.decode(received[IDS[name]])
            lost += not found
    assert 0 < lost < 11 * (len(plain) + 20)


def test_a_payload_that_changed_is_not_one_that_differs():
    """Change every byte of it by one bit: none is handed on as a payload."""
    plain, notif = long_form("r")
    for at in range(plain_end(notif), len(notif)):
        changed = notif[:at] + bytes([notif[at] ^ 1]) + notif[at + 1 :]
        assert take(changed, "r") == (plain, {"r": b""}, True)


@pytest.mark.parametrize("name", IDS)
def test_no_byte_of_it_ends_a_text(name):
    _, notif = long_form(IDS[name])
    assert b"\0" not in notif
    assert holds(notif.split(b"\0")[0], IDS[name], long_form(IDS[name])[0])


def test_cut_at_256_bytes():
    for length in range(1, 400):
        plain, notif = long_form("r" * length)
        assert holds(notif[:256], "r" * length, plain) == (length <= 226)


@settings(max_examples=500, deadline=None)
@given(
    req_id=st.text(st.characters(exclude_categories=["Cs"])),
    tp_size=st.integers(1, 99),
    at=st.floats(0, 1),
    run=st.binary(max_size=4),
    cut=st.none() | st.floats(0, 1),
    more=st.binary(max_size=8),
)
def test_bursts_and_cuts(req_id, tp_size, at, run, cut, more):
    plain, notif = long_form(req_id, tp_size)
    # A burst of up to 4 bytes: what CRC-32 always sees within the plain part.
    start = int(at * len(notif))
    end = plain_end(notif)
    run = run[: max(0, end - start)] if start < end else run
    changed = notif[:start] + run + notif[start + len(run) :]
    if cut is not None:
        changed = changed[: int(cut * len(changed))]
    if b"\xff" in changed[:2] or not changed:
        holds(changed + more if cut is None else changed, req_id, plain)


NO_LONG_FORMS = {
    "the form before": b"\xffkv_checksums:\x93\xa1r\x01\xc4\x01x",
    "no TP size": nixl_push.add_payload(b"r", b"x"),
    "TP size 0": nixl_push.add_payload(b"r:0", b"x"),
    "TP size is text": nixl_push.add_payload(b"r:one", b"x"),
    "TP size of 5000 digits": nixl_push.add_payload(b"r:" + b"1" * 5000, b"x"),
    "TP size in other digits": nixl_push.add_payload("r:\u0661".encode(), b"x"),
    "id is no text": nixl_push.add_payload(b"\xfe:1", b"x"),
    "promises 999999 bytes": nixl_push._PREFIX + b"999999:00000000:r:1",
    "empty": b"",
}


@pytest.mark.parametrize("name", NO_LONG_FORMS)
def test_what_no_producer_sends_is_said_once(name, log):
    consumer = PushConsumer(["r", "s"])
    for _ in range(3):
        assert consumer.get(NO_LONG_FORMS[name]) == []
    (line,) = [x for x in log if x.startswith("ERROR")]
    assert "did not come through" in line and "restart this instance" in line
    # Other loads do not suffer, with or without checksums.
    assert consumer.get(b"r:1") == ["r"]
    assert consumer.get(nixl_push.add_payload(b"s:1", PAYLOAD)) == ["r", "s"]


def test_a_notif_that_is_not_of_ours_is_left_to_vllm():
    consumer = PushConsumer(["r"])
    for notif in (b"\xc3:1", b"\xfe\xfe:1", b"ab\xff:1"):
        with pytest.raises(UnicodeDecodeError):
            consumer.get(notif)
    assert consumer.get(b"r:1") == ["r"]


@pytest.mark.parametrize("cut", [None, 300, 60])
def test_damaged_copies_count_as_writes(cut):
    """Damage the second producer rank's notif, then the first one's."""
    plain, notif = long_form("r")
    for first, second in ((notif, notif[:cut]), (notif[:cut], notif)):
        consumer = PushConsumer(["r"])
        assert consumer.get(first) == [] and consumer.get(second) == ["r"]
        results = SimpleNamespace(finished_sending=set(), kv_checksums=None)
        consumer.kv_checksums.finish(results)
        # The copy that came through is the one handed on.
        assert results.kv_checksums == {"r": PAYLOAD}


@pytest.mark.parametrize("damaged", [(0,), (1,), (0, 1)])
def test_ranks_whose_copies_are_damaged(model, damaged):
    """Damage two consumer ranks' copies: one that is intact is enough."""
    p, d = rig.pair(model, transport="push", tp=2)
    for rank in damaged:
        side = d.transport.side(rank)
        take = side.take
        side.take = lambda notif, awaited, take=take: take(notif[:-1], awaited)
    _, out = rig.load(p, d, 100)
    assert out.finish_reason == FinishReason.LENGTH
    outcome = "unverified" if len(damaged) == 2 else "verified"
    assert d.loads(outcome) == 1
    assert d.stats.get("unverified:bad_payload", 0) == (len(damaged) == 2)


# ---- over NIXL, with vLLM's own workers and schedulers


_numbers = count()


@pytest.fixture(scope="module")
def sides(model):
    with ExitStack() as stack:
        yield [
            real.real_instance(
                stack, model, role, "push", enable_kv_checksum=True, num_blocks=400
            )
            for role in ("kv_producer", "kv_consumer")
        ]


@pytest.fixture
def pair(sides, monkeypatch):
    """Yield P and D, and what happens to the notifs on their way."""
    p, d = sides
    d.stats.clear()
    way = SimpleNamespace(damage=lambda notif: notif)
    agent = p.transport.worker.connector_worker.nixl_wrapper
    send = agent.make_prepped_xfer
    monkeypatch.setattr(
        agent,
        "make_prepped_xfer",
        lambda *args, notif_msg: send(*args, notif_msg=way.damage(notif_msg)),
    )
    yield p, d, way
    d.transport.worker.connector_worker.kv_checksums._plain_only = False


def start(p, d):
    number = next(_numbers)
    prompt = rig.tokens(100, 4000 + number)
    p_id, d_id = f"cmpl-{number}-0-aaaaaaaa", f"cmpl-{number}-0-bbbbbbbb"
    return d.add(d_id, prompt, rig.prefill(p, p_id, prompt), max_tokens=2)


def ends(p, d, request):
    real.run(p, d, request.is_finished)
    out = d.results[request.request_id][-1]
    assert out.finish_reason == FinishReason.LENGTH
    return sorted(k for k in d.stats if k.startswith(("loads:", "unverified")))


@pytest.mark.parametrize(
    "damage",
    [
        lambda n: n[:-1],
        lambda n: n[:100],
        lambda n: n[:-20] + b"\0" + n[-19:],
        lambda n: n + b"\0",
        lambda n: n[:-9] + bytes([n[-9] ^ 1]) + n[-8:],
    ],
    ids=["last byte", "100 bytes", "zero byte", "ended by zero", "one bit"],
)
def test_a_load_whose_payload_is_damaged_ends_unverified(pair, damage):
    p, d, way = pair
    way.damage = damage
    assert ends(p, d, start(p, d)) == [
        "loads:unverified:connector",
        "unverified:bad_payload",
    ]
    assert d.stats["unverified:bad_payload"] == 1
    way.damage = lambda notif: notif
    d.stats.clear()
    assert ends(p, d, start(p, d)) == ["loads:verified:connector"]


def test_after_a_lost_notif_the_plain_form_is_asked_for(pair, log, monkeypatch):
    p, d, way = pair
    way.damage = lambda notif: notif[:20] if notif[0] == 0xFF else notif
    sent = []
    agent = d.transport.worker.connector_worker.nixl_wrapper
    send = agent.send_notif
    monkeypatch.setattr(
        agent,
        "send_notif",
        lambda *args, notif_msg: sent.append(notif_msg) or send(*args, notif_msg),
    )
    lost = start(p, d)
    said = "A NIXL completion notif with KV checksums"
    real.run(p, d, lambda: any(said in line for line in log))
    assert not lost.is_finished()
    for _ in range(2):
        found = ends(p, d, start(p, d))
        assert found == ["loads:unverified:connector", "unverified:no_payload"]
    assert len([x for x in log if said in x]) == 1
    size = len(PUSH_REG_NOTIF_PREFIX)
    registrations = [
        msgspec.msgpack.decode(n[size:])
        for n in sent
        if n.startswith(PUSH_REG_NOTIF_PREFIX)
    ]
    keys = [set(r) for r in registrations]
    # Nothing else is missing from the later ones.
    assert keys[0] - keys[1] == {"kv_checksums"} and keys[1] == keys[2]
    assert not keys[1] - keys[0]
    worker = d.transport.worker.connector_worker
    worker._pending_completion_notifs.put(f"{lost.request_id}:1".encode())
    real.run(p, d, lost.is_finished)


# ---- registrations: other versions of this feature on the other side


@pytest.mark.parametrize("value", [True, 1, 1.0, 2.0, "2", 3, None, [2], {"2": 2}])
def test_a_consumer_that_asks_for_another_form_gets_the_plain_one(value):
    producer = nixl_push.NixlPushChecksums()
    producer.hold({"p": b"sums"})
    producer.negotiate("p", {"request_id": "r", "kv_checksums": value})
    assert producer.completion_notif("p", b"r:1") == b"r:1"


def test_a_producer_of_the_form_before_is_not_asked():
    """It sends its form to whoever says True."""
    registration = {}
    nixl_push.ask(registration)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(registration))
    assert sent["kv_checksums"] is not True
