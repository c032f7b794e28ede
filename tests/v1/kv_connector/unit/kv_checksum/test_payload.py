# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test payloads: round trips, and that bad ones raise nothing but ValueError."""

import base64
import struct
import tracemalloc
from contextlib import suppress
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_checksum import payload as wire
from vllm.distributed.kv_transfer.kv_checksum.payload import (
    GroupChecksums,
    KVChecksumPayload,
    OtherCopies,
    decode_map,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.binding import PromptDigests


def make(num_tokens=100, unit_size=16, start=0, groups=2) -> KVChecksumPayload:
    units = -(-num_tokens // unit_size) - start
    rng = np.random.default_rng(num_tokens)
    return KVChecksumPayload(
        num_tokens,
        2,
        {
            g: GroupChecksums(
                2**64 - 1 - g,
                unit_size,
                start,
                rng.integers(0, 2**64, units, dtype=np.uint64),
                None if g % 2 else copies_of(units),
            )
            for g in range(groups)
        },
        PromptDigests(2**64 - 5, 3),
        num_tokens,
    )


def copies_of(units: int) -> OtherCopies:
    """Return two copies: the first differs everywhere, the second in the last unit."""
    at = np.append(np.arange(units), units - 1)
    return OtherCopies(
        at * 0 + (np.arange(units + 1) == units), at, at.astype(np.uint64)
    )


def same(a: KVChecksumPayload, b: KVChecksumPayload) -> bool:
    def plain(payload):
        groups = {
            i: (g.fingerprint, g.unit_size, g.start, g.values.tolist())
            + tuple(x.tolist() for x in g.copies or ())
            for i, g in payload.groups.items()
        }
        digests = payload.prompt, payload.inputs
        return payload.num_tokens, payload.tp_size, digests, groups

    return plain(a) == plain(b)


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 1500, 131_072])
def test_round_trip(num_tokens):
    payload = make(num_tokens)
    assert same(wire.decode(wire.encode(payload)), payload)
    assert same(wire.decode_text(wire.encode_text(payload)), payload)


def test_size_of_a_long_request():
    payload = make(131_072, groups=1)
    payload.groups[0].copies = None
    assert len(wire.encode_text(payload)) < 88_000


def test_another_version_is_told_apart():
    version, body = msgspec.msgpack.decode(wire.encode(make()))
    with pytest.raises(wire.PayloadVersionError):
        wire.decode(msgspec.msgpack.encode((version + 1, body)))
    with pytest.raises(wire.PayloadVersionError):
        wire.decode(msgspec.msgpack.encode((version + 1, "anything")))


VERSION_1 = bytes.fromhex("9201932801810094cd12341000c418") + bytes(24)
"""Of version 1: 40 tokens, TP 1, group 0 with 3 blocks of 16 tokens."""


def test_version_1_is_told_apart():
    with pytest.raises(wire.PayloadVersionError, match="payload version 1"):
        wire.decode(VERSION_1)
    # And that side tells by the same first number.
    outer = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
    assert outer.decode(VERSION_1)[0] == 1 and outer.decode(wire.encode(make()))[0] == 2


_GROUP = msgspec.msgpack.encode((1, 16, 0, b"12345678", b""))


def _outer(groups: bytes) -> bytes:
    """Return a payload of 16 tokens whose groups are written byte by byte."""
    return b"\x92\x02\x96\x10\x01\x00\x00\x00" + groups


def _two_groups(first: bytes, second: bytes, count: bytes = b"\x82") -> bytes:
    return _outer(count + first + _GROUP + second + _GROUP)


@pytest.mark.parametrize("count", [b"\x82", b"\xde\x00\x02", b"\xdf\x00\x00\x00\x02"])
def test_two_groups_in_every_form_of_a_map(count):
    payload = wire.decode(_two_groups(b"\x07", b"\xcc\x08", count))
    assert payload.groups.keys() == {7, 8}


@pytest.mark.parametrize("number", [0, 1, 15, 16, 300, 4096])
def test_as_many_groups_as_there_may_be(number):
    payload = make(16, groups=number)
    assert same(wire.decode(wire.encode(payload)), payload)


def _bad(num_tokens, tp_size, groups, digests=(1, 1, 0)) -> bytes:
    return msgspec.msgpack.encode(
        (wire.PAYLOAD_VERSION, (num_tokens, tp_size, *digests, groups))
    )


def _copies(*entries) -> bytes:
    """Return a payload of 3 values with entries of copies: copy, index, value."""
    data = b"".join(struct.pack("<HIQ", *entry) for entry in entries)
    return _bad(40, 1, {0: (1, 16, 0, bytes(24), data)})


BAD = {
    "empty": b"",
    "no msgpack": b"\xc1",
    "a number": msgspec.msgpack.encode(7),
    "no body": msgspec.msgpack.encode((2,)),
    "body is a map": msgspec.msgpack.encode((2, {})),
    "negative tokens": _bad(-1, 1, {}),
    "no ranks": _bad(1, 0, {}),
    "digest -1": _bad(1, 1, {}, (1, -1, 0)),
    "digest of 9 bytes": b"\x92\x02\x96\x01\x01\x01\x01\xc4\x09123456789\x80",
    "a digest of text": _bad(1, 1, {}, (1, 1, "x")),
    "no digests": msgspec.msgpack.encode((2, (1, 1, {}))),
    "group is text": _bad(1, 1, {0: "x"}),
    "odd values": _bad(16, 1, {0: (1, 16, 0, b"1234567", b"")}),
    "too many units": _bad(16, 1, {0: (1, 16, 0, b"12345678" * 2, b"")}),
    "unit -1": _bad(16, 1, {0: (1, 16, -1, b"12345678" * 2, b"")}),
    "unit size 0": _bad(16, 1, {0: (1, 0, 0, b"", b"")}),
    "fingerprint -1": _bad(16, 1, {0: (-1, 16, 0, b"", b"")}),
    "group -1": _bad(16, 1, {-1: (1, 16, 0, b"", b"")}),
    "no copies": _bad(16, 1, {0: (1, 16, 0, b"")}),
    "odd copies": _bad(16, 1, {0: (1, 16, 0, b"12345678", b"1" * 15)}),
    "a copy of a unit that is not there": _copies((0, 3, 7)),
    "a copy's unit twice": _copies((0, 1, 7), (0, 1, 8)),
    "units in disorder": _copies((0, 1, 7), (0, 0, 8)),
    "copies in disorder": _copies((1, 0, 7), (0, 1, 8)),
    "nested arrays": b"\x91" * 100_000,
    "nested in the body": b"\x92\x02" + b"\x91" * 100_000,
    "8 MB, well-formed": _bad(2**24, 1, {0: (1, 16, 0, bytes(8 * 2**20), b"")}),
    "many groups": _bad(1, 1, {2**20 + g: (1, 1, 0, b"", b"") for g in range(300_000)}),
    "group twice": _two_groups(b"\x00", b"\x00"),
    **{
        f"group twice, {name}": _two_groups(b"\x07", other)
        for name, other in {
            "uint8": b"\xcc\x07",
            "uint16": b"\xcd\x00\x07",
            "uint32": b"\xce\x00\x00\x00\x07",
            "uint64": b"\xcf" + bytes(7) + b"\x07",
            "int8": b"\xd0\x07",
            "int64": b"\xd3" + bytes(7) + b"\x07",
        }.items()
    },
    "group twice, map of 16 bits": _two_groups(b"\x07", b"\x07", b"\xde\x00\x02"),
    "group twice, map of 32 bits": _two_groups(
        b"\x07", b"\x07", b"\xdf\x00\x00\x00\x02"
    ),
    "4,096 times one group": _outer(b"\xde\x10\x00" + (b"\x07" + _GROUP) * 4096),
    "promises 4 GB": b"\x92\x02\xdd\xff\xff\xff\xff",
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_payloads_raise_value_error(name):
    tracemalloc.start()
    with pytest.raises(ValueError):
        wire.decode(BAD[name])
    with pytest.raises(ValueError):
        wire.decode_text(base64.b64encode(BAD[name]).decode())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * len(BAD[name]) + 2**20


@pytest.mark.parametrize("text", [None, 7, b"", [], {}, "ä", "a", "%%%%", "A" * 2**23])
def test_text_that_is_no_base64(text):
    with pytest.raises(ValueError):
        wire.decode_text(text)


@pytest.mark.parametrize("foreign", ["%", " ", "\n", "-", "=", "\0"])
def test_text_with_a_foreign_character_is_no_payload(foreign):
    text = wire.encode_text(make(16, groups=1))
    assert wire.decode_text(text)
    for at in (0, 4, 7):
        with pytest.raises(ValueError, match="no base64"):
            wire.decode_text(text[:at] + foreign + text[at:])


def test_text_that_is_too_long_is_not_decoded():
    text = "A" * 2**25
    tracemalloc.start()
    with pytest.raises(ValueError, match="too long"):
        wire.decode_text(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("params", [None, "text", 7, [1], ("do_remote_decode",), True])
def test_parameters_that_are_no_mapping_are_none(params):
    """Clients can send anything."""
    request = SimpleNamespace(kv_transfer_params=params)
    assert wire.transfer_params(request) == {}
    assert wire.take_text(request) is None
    carrier = wire.KVChecksumCarrier.CONNECTOR
    assert carrier.of_request(request, False) is None


@pytest.mark.parametrize("value", [msgspec.Raw, dict[str, int]])
@pytest.mark.parametrize("data", [b"\x81\xa1r" + b"\x91" * 100_000, b"", b"\x91"])
def test_what_is_no_map_raises_value_error(value, data):
    """Lists in lists too: only C code may look at them, and it gives up in its way."""
    decoder = msgspec.msgpack.Decoder(dict[str, value])
    with pytest.raises(ValueError):
        decode_map(decoder, data)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_change_of_bytes_decodes_or_raises_value_error(data):
    good = bytearray(wire.encode(make(40)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(good) - 1))
        action = data.draw(st.sampled_from(["set", "cut", "insert"]))
        if action == "set":
            good[at] = data.draw(st.integers(0, 255))
        elif action == "cut" and at:
            del good[at:]
        else:
            good[at:at] = data.draw(st.binary(max_size=8))
    with suppress(ValueError):
        wire.decode(bytes(good))


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.binary(max_size=64),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.integers(-1, 5000), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(_json)
def test_any_body_decodes_or_raises_value_error(body):
    with suppress(ValueError):
        wire.decode(msgspec.msgpack.encode((wire.PAYLOAD_VERSION, body)))


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200) | st.binary(max_size=200))
def test_any_text_decodes_or_raises_value_error(text):
    with pytest.raises(ValueError):
        wire.decode_text(text)
