# SPDX-License-Identifier: Apache-2.0
"""Fuzz payloads: as bytes that a connector brought, and under a request's parameters."""

import base64
import json
import struct
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec
import numpy as np

from vllm.distributed.kv_transfer.kv_checksum import KV_TRANSFER_PARAMS_KEY
from vllm.distributed.kv_transfer.kv_checksum import payload as wire
from vllm.distributed.kv_transfer.kv_checksum.verdict import LoadVerdict, Unverified

from .base import Target
from .loads import (
    CASES,
    FINGERPRINTS,
    FULL,
    LONG,
    LONG_CASE,
    MASK,
    STATE,
    TOKENS,
    WINDOW,
    Load,
    right_payload,
    unit_sums,
)
from .oracle import assert_refused, assert_right
from .untyped import read

RIGHT = {case: wire.encode(right_payload(case)) for case in (*CASES, LONG_CASE)}
FEWER = {
    case: wire.encode(right_payload(case, case.num_tokens - 1))
    for case in CASES
    if case.computes_last
}
"""Payloads of the same prompts without their last token."""

NUM_TOKENS, RANKS, PROMPT, BEGINNING, INPUTS, GROUPS = range(6)
FINGERPRINT, SIZE, START, VALUES, COPIES = range(5)


def assert_group(group: wire.GroupChecksums, num_tokens: int) -> None:
    """Check that all of a decoded group is in its range."""
    assert 0 <= group.fingerprint < 2**64 and 0 < group.unit_size < 2**31
    assert group.values.dtype == np.uint64 and group.values.ndim == 1
    stop = group.start + len(group.values)
    assert 0 <= group.start < 2**40 and stop <= -(-num_tokens // group.unit_size)
    if group.copies is not None:
        entries = list(zip(*(x.tolist() for x in group.copies[:2]), strict=True))
        assert entries and entries == sorted(set(entries))
        assert all(0 <= at < len(group.values) for _, at in entries)
        assert group.copies.values.dtype == np.uint64
        assert group.copies.values.shape == (len(entries),)


def assert_decodes(data: bytes) -> bool:
    """Check what `decode` promises on one input, and return whether it takes it."""
    try:
        payload = wire.decode(data)
    except ValueError:
        return False
    assert 0 < payload.num_tokens < 2**40 and 0 < payload.tp_size < 2**20
    assert all(0 <= digest < 2**64 for digest in (*payload.prompt, payload.inputs))
    assert len(payload.groups) <= 4096 and all(0 <= g < 4096 for g in payload.groups)
    for group in payload.groups.values():
        assert_group(group, payload.num_tokens)
    again, number = wire.encode(payload), len(payload.groups)
    del payload
    _, (*_, groups) = read(data)
    assert len(groups.pairs) == number, "one of two groups was dropped"
    del groups
    assert wire.encode(wire.decode(again)) == again
    return True


class Payloads(Target):
    """Bytes that came through a connector."""

    name = "payload"
    max_len = 100_000
    memory = 2**22  # for as many groups, with copies, as a payload may have
    share = 4
    by_params = False

    def __init__(self) -> None:
        self.loads = [Load(case, self.by_params) for case in (*CASES, LONG_CASE)]

    def run(self, data: bytes) -> str:
        outcomes = Counter(self.on_every_load({}, data, data))
        return "+".join(sorted(outcomes)) if outcomes else "nothing"

    def on_every_load(
        self, params: Any, received: bytes | None, data: bytes | None
    ) -> list[str]:
        """Return the outcomes of every load, each checked.

        Args:
            data: the bytes of the payload, or None if there are none.

        """
        outcomes = []
        taken = data is not None and assert_decodes(data)
        # One that does not decode is the same to all loads; so only each policy's.
        for load in self.loads if taken else self.loads[:3]:
            if load.case is LONG_CASE and len(data or b"") < 8192:
                continue
            verdict = load.run(params, received)
            if verdict is None:
                continue
            outcomes.append(verdict.outcome)
            if verdict.unverified is Unverified.FROM_DECODE:
                assert verdict == LoadVerdict(unverified=Unverified.FROM_DECODE)
            elif data is None:
                assert verdict.outcome == "unverified" and not verdict.groups
            elif taken:
                assert_right(load, verdict, data)
            else:
                assert_refused(verdict, data)
        return outcomes

    def seeds(self) -> dict[str, bytes]:
        encode = msgspec.msgpack.encode
        found = {
            "one-group": RIGHT[CASES[0]],
            "one-token-fewer": FEWER[CASES[0]],
            "window": RIGHT[CASES[2]],
            "hybrid": RIGHT[CASES[4]],
            "hybrid-copies": RIGHT[CASES[5]],
            "hybrid-one-token-fewer": wire.encode(right_payload(CASES[4], 99)),
            "window-one-token-fewer": FEWER[CASES[2]],
            "embeddings": RIGHT[CASES[7]],
            "other-inputs": RIGHT[CASES[8]],
            "other-inputs-of-40-tokens": wire.encode(right_payload(CASES[8], 40)),
            "other-version": encode((9, 9)),
            "other-version-right-body": b"\x92\x03" + RIGHT[CASES[0]][2:],
            "version-1-right-body": b"\x92\x01" + RIGHT[CASES[0]][2:],
            "version-of-9-bytes": b"\x92\xcf\0\0\0\0\0\0\0\2" + RIGHT[CASES[0]][2:],
            "empty": b"",
            "nested": b"\x92\x02" + b"\x91" * 3000,
            "promises-4-GB": b"\x92\x02\xdd\xff\xff\xff\xff",
            "promises-groups": HEAD + b"\xdf\xff\xff\xff\xff",
            "promises-bytes": HEAD + b"\x81\x00\x95\x01\x10\x00\xc6\xff\xff\xff\xf8",
            "promises-copies": HEAD
            + b"\x81\x00\x95\x01\x10\x00\xc4\x00\xc6\xff\xff\xff\xf2",
            "extension": b"\x92\x02\xc9\xff\xff\xff\xff\x00",
            "group-twice": _twice(),
            "group-twice-in-two-forms": _twice(b"\xcc\x00"),
            "group-twice-equal-to-none": HEAD
            + b"\x82\x00\x95\x01\x10\x00\xc4\x00\xc4\x00"
            + b"\xd3\0\0\0\0\0\0\0\0\x95\x01\x10\x00\xc4\x00\xc4\x00",
            "map-of-16-bits": _longer_count(b"\xde\x00\x01"),
            "map-of-32-bits": _longer_count(b"\xdf\x00\x00\x00\x01"),
            "group-twice-text-first": _twice(first=b"\xa0"),
        }
        for name, change in CHANGES.items():
            tree = msgspec.msgpack.decode(RIGHT[CASES[0]])
            found[name] = encode((2, change(tree[1])))
        return found

    def repair(self, tree: Any) -> None:
        """Cut values and copies to what the tokens fill, and name the right prompt."""
        try:
            _, body = tree
            num_tokens, _, prompt, _, _, groups = body
            if prompt:
                body[PROMPT:INPUTS] = _digests(num_tokens)
            for group in groups.values():
                units = -(-num_tokens // group[SIZE]) - group[START]
                group[VALUES] = group[VALUES][: max(0, units) * 8]
                entries = {
                    (copy, at): value
                    for copy, at, value in _entries(group[COPIES])
                    if at < len(group[VALUES]) // 8
                }
                group[COPIES] = _copies(
                    *((*place, value) for place, value in sorted(entries.items()))
                )
        except (AttributeError, IndexError, TypeError, ValueError, ZeroDivisionError):
            pass  # of another form

    def invent(self, random: Random) -> bytes | None:
        """Return a load's payload, with few wrong values and copies that may make up for them.

        Cut at times, or of other units or tokens.
        """
        case = random.choice(CASES)
        num_tokens = case.num_tokens - _mostly(random, 0, 1, 4, 36, -60)
        groups = {g: _invented(g, num_tokens, random) for g in case.groups}
        digests = *case.prompt_digests(num_tokens), case.inputs_digest(num_tokens)
        tp_size = random.choice((1, case.tp_size))
        encoded: bytes = msgspec.msgpack.encode(
            (2, (num_tokens, tp_size, *digests, groups))
        )
        return encoded

    def long_seeds(self) -> dict[str, bytes]:
        encode = msgspec.msgpack.encode
        start = [16, 1, *_digests(16), 0]
        no_values = {g: (1, 1, 0, b"", b"") for g in range(9000)}
        most = dict(list(no_values.items())[:4096])
        one = {g: (1, 16, 0, bytes(8), _copies((0, 0, g))) for g in range(1000)}
        copies = {
            "many-copies": [(c, at, 5) for c in range(200) for at in range(10)],
            "a-copy": [(0, at, at) for at in range(0, 8192, 4)],
        }
        return {
            "128k-tokens": RIGHT[LONG_CASE],
            **{f"128k-tokens-{n}": _long(_copies(*c)) for n, c in copies.items()},
            "too-many-groups": encode((2, (*start, no_values))),
            "many-groups": encode((2, (*start, most))),
            "many-groups-with-copies": encode((2, (*start, one))),
        }


class Longest(Payloads):
    """Payloads as long as they may be, on the longest load and without the oracle."""

    name = "longest"

    def run(self, data: bytes) -> str:
        verdict = self.loads[-1].run({}, data)
        assert verdict is not None
        return verdict.outcome

    def seeds(self) -> dict[str, bytes]:
        def group(unit_size: int, copies: int, units: int) -> tuple[Any, ...]:
            entries = np.zeros(
                (copies, units), [("c", "<u2"), ("at", "<u4"), ("v", "<u8")]
            )
            entries["c"], entries["at"] = np.arange(copies)[:, None], np.arange(units)
            values = unit_sums(FULL, unit_size, LONG).tobytes()
            return FINGERPRINTS[FULL], unit_size, 0, values, entries.tobytes()

        *head, _ = msgspec.msgpack.decode(RIGHT[LONG_CASE])[1]
        small, smallest = (
            (1, 16, 0, bytes(8 * units), group(16, copies, units)[COPIES])
            for copies, units in ((17, 4), (1, 1))
        )
        found = {
            "all-units": {FULL: group(16, 35, 8192)},
            "all-copies": {FULL: group(16, 65536, 4)},
            "small-units": {FULL: group(1, 1, LONG)},
            "one-unit": {FULL: group(2**30, 65536, 1)},
            "groups": dict.fromkeys(range(4096), small),
            "small-groups": dict.fromkeys(range(4096), smallest),
        }
        return {
            name: msgspec.msgpack.encode((2, [*head, groups]))
            for name, groups in found.items()
        }


HEAD = b"\x92\x02\x96\x64\x01\x00\x00\x00"
"""What stands before the groups of a payload of 100 tokens and no prompt."""


def _digest(num_tokens: int) -> int:
    """Return the right digest of a prompt's first tokens."""
    limit = LONG if 1024 < num_tokens <= LONG else TOKENS
    return LONG_CASE.prompt_digest(max(0, min(num_tokens, limit)))


def _digests(num_tokens: int) -> tuple[int, int]:
    return _digest(num_tokens), _digest(num_tokens // 16 * 16)


def _long(copies: bytes) -> bytes:
    """Return the right payload of the longest load, but for copies."""
    tree = msgspec.msgpack.decode(RIGHT[LONG_CASE])
    tree[1][GROUPS][FULL][COPIES] = copies
    encoded: bytes = msgspec.msgpack.encode(tree)
    return encoded


def _mostly(random: Random, usual: Any, *others: Any) -> Any:
    return usual if random.random() < 0.7 else random.choice(others)


def _invented(group_id: int, num_tokens: int, random: Random) -> tuple[Any, ...]:
    """Return a group of `Payloads.invent`."""
    size = 1 if group_id == STATE else _mostly(random, 16, 1, 8, 32, 48, 64)
    right, other = (unit_sums(group_id, size, num_tokens, c).tolist() for c in (0, 1))
    values, places = list(right), range(len(right))
    for at in random.sample(places, min(len(right), random.choice((0, 0, 1, 2, 3)))):
        values[at] ^= 1 << random.randrange(64)
    wrong = [at for at in places if values[at] != right[at]]
    first = max(0, len(right) - 4) if group_id == WINDOW else 0
    start = _mostly(random, first, random.choice(places))
    stop = _mostly(random, len(right), random.choice(places))
    copies = {}
    for _ in range(random.choice((0, 0, 1, 2, 4, 8))):
        at, of = (_mostly(random, random.choice(wrong or places), start) for _ in "ab")
        value = random.choice((right[at], other[at], right[of], random.getrandbits(64)))
        # What would make another value right.
        value = _mostly(random, value, values[at] + right[of] - values[of] & MASK)
        if start <= at < stop:
            copies[_mostly(random, 0, 1, 2, 65535), at - start] = value
    entries = ((*place, value) for place, value in sorted(copies.items()))
    sent = np.array(values[start:stop], "<u8").tobytes()
    return FINGERPRINTS[group_id], size, start, sent, _copies(*entries)


def _entries(copies: bytes) -> Iterator[tuple[int, int, int]]:
    """Return entries of copies: copy, index, value; what is left over is dropped."""
    return struct.iter_unpack("<HIQ", copies[: len(copies) // 14 * 14])


def _copies(*entries: tuple[int, int, int]) -> bytes:
    return b"".join(struct.pack("<HIQ", *entry) for entry in entries)


def _twice(again: bytes = b"\x00", first: bytes = b"\x00") -> bytes:
    """Return a map that has the same group id twice, in two forms."""
    head, group = RIGHT[CASES[0]].split(b"\x81\x00", 1)
    return head + b"\x82" + first + group + again + group


def _longer_count(head: bytes) -> bytes:
    """Return a right payload whose map says its size in more bytes."""
    return RIGHT[CASES[0]].replace(b"\x81\x00", head + b"\x00", 1)


def _sums(size: int, num_tokens: int = TOKENS) -> bytes:
    return unit_sums(FULL, size, num_tokens).tobytes()


def _set(group: dict[int, Any], fields: dict[int, Any] | None = None) -> Any:
    """Change parts of the group, and of what stands before the groups.

    The digests are those of as many tokens as are named, unless they are changed too.
    """

    def change(body: list[Any]) -> Any:
        fields_ = fields or {}
        for parts, changes in ((body, fields_), (body[GROUPS][FULL], group)):
            for at, value in changes.items():
                parts[at] = value(parts[at]) if callable(value) else value
        if NUM_TOKENS in fields_ and PROMPT not in fields_:
            body[PROMPT:INPUTS] = _digests(body[NUM_TOKENS])
        return body

    return change


def _fields(*changes: tuple[int, Any]) -> Any:
    return _set({}, dict(changes))


def _units_of_8(*entries: tuple[int, int, int]) -> Any:
    """Return right values of units of 8 tokens, but for the second, and copies."""
    sums = _sums(8)
    values = sums[:8] + bytes([sums[8] ^ 1]) + sums[9:]
    return _set({SIZE: 8, VALUES: values, COPIES: _copies(*entries)})


def _value(size: int, at: int) -> int:
    return int(unit_sums(FULL, size, TOKENS)[at])


def _wrong(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def _error(at: int) -> int:
    """Return what is missing from a unit's value after `_wrong`."""
    right = _value(16, at)
    return right - (right ^ 1)


CHANGES = {
    "more-tokens": _fields((NUM_TOKENS, 200)),
    "fewer-tokens": _fields((NUM_TOKENS, 99)),
    "96-tokens": _set({VALUES: _sums(16, 96)}, {NUM_TOKENS: 96}),
    "tokens-2-63": _fields((NUM_TOKENS, 2**63)),
    "tokens-2-40": _fields((NUM_TOKENS, 2**40)),
    "no-tokens": _set({VALUES: b""}, {NUM_TOKENS: 0}),
    "ranks-2-20": _fields((RANKS, 2**20)),
    "no-ranks": _fields((RANKS, 0)),
    "other-ranks": _fields((RANKS, 2)),
    "digest-other": _fields((PROMPT, 3)),
    "digest-0": _fields((PROMPT, 0)),
    "digest-negative": _fields((PROMPT, -1)),
    "digest-2-64-1": _fields((PROMPT, 2**64 - 1)),
    "digest-of-9-bytes": _fields((PROMPT, bytes(8) + b"\1")),
    "digest-of-99-tokens": _fields((PROMPT, _digest(99))),
    "digest-of-101-tokens": _fields((PROMPT, LONG_CASE.prompt_digest(101))),
    "digest-of-99-tokens-99-tokens": _fields((NUM_TOKENS, 99), (PROMPT, _digest(99))),
    "digest-of-100-tokens-99-tokens": _fields((NUM_TOKENS, 99), (PROMPT, _digest(100))),
    "digest-float": _fields((PROMPT, 1.0)),
    "beginning-other": _fields((BEGINNING, 3)),
    "beginning-negative": _fields((BEGINNING, -1)),
    "beginning-2-64": _fields((BEGINNING, 2**64 - 1)),
    "beginning-nil": _fields((BEGINNING, None)),
    # More tokens than the prompt of 100 has, in its last unit and behind that.
    "103-tokens": _fields((NUM_TOKENS, 103), (PROMPT, 7), (BEGINNING, _digest(96))),
    "103-tokens-of-another": _fields((NUM_TOKENS, 103), (PROMPT, 7), (BEGINNING, 7)),
    "112-tokens": _fields((NUM_TOKENS, 112), (PROMPT, 7), (BEGINNING, _digest(96))),
    "inputs-other": _fields((INPUTS, 1)),
    "inputs-negative": _fields((INPUTS, -1)),
    "inputs-2-64-1": _fields((INPUTS, 2**64 - 1)),
    "inputs-nil": _fields((INPUTS, None)),
    "inputs-the-prompt-s": _fields((INPUTS, _digest(TOKENS))),
    "no-digests": lambda body: [*body[:PROMPT], body[GROUPS]],
    "body-of-7": lambda body: [*body, 0],
    "group-4096": lambda body: [*body[:GROUPS], {4096: body[GROUPS][FULL]}],
    "group-negative": lambda body: [*body[:GROUPS], {-1: body[GROUPS][FULL]}],
    "other-group": lambda body: [*body[:GROUPS], {1: body[GROUPS][FULL]}],
    "no-groups": lambda body: [*body[:GROUPS], {}],
    "two-groups": lambda body: [*body[:GROUPS], dict.fromkeys((0, 1), body[5][FULL])],
    "group-of-4": lambda body: [*body[:GROUPS], {FULL: body[GROUPS][FULL][:COPIES]}],
    "group-of-6": lambda body: [*body[:GROUPS], {FULL: [*body[GROUPS][FULL], 0]}],
    "fingerprint-other": _set({FINGERPRINT: 3}),
    "fingerprint-negative": _set({FINGERPRINT: -1}),
    "unit-size-0": _set({SIZE: 0}),
    "unit-size-negative": _set({SIZE: -16}),
    "unit-size-2-31": _set({SIZE: 2**31}, {NUM_TOKENS: 2**39}),
    "unit-size-2-30": _set({SIZE: 2**30, VALUES: _sums(LONG)}),
    "unit-size-2-30-more-tokens": _set({SIZE: 2**30}, {NUM_TOKENS: 2**39}),
    "unit-size-24": _set({SIZE: 24, VALUES: _sums(24)}),
    "unit-size-32": _set({SIZE: 32, VALUES: lambda data: data[:32]}),
    "unit-size-32-right": _set({SIZE: 32, VALUES: _sums(32)}),
    "unit-size-48-right": _set({SIZE: 48, VALUES: _sums(48)}),
    "unit-size-64-one-wrong": _set({SIZE: 64, VALUES: _wrong(_sums(64))}),
    "unit-size-8-right": _set({SIZE: 8, VALUES: _sums(8)}),
    "unit-size-8-cut": _set({SIZE: 8, VALUES: _sums(8)[:-16]}),
    "unit-size-1-right": _set({SIZE: 1, VALUES: _sums(1)}),
    "unit-size-1": _set({SIZE: 1}),
    "start-negative": _set({START: -1}),
    "start-too-late": _set({START: 1}),
    "start-2-40": _set({SIZE: 1, START: 2**40, VALUES: b""}, {NUM_TOKENS: 2**40 - 1}),
    "start-1": _set({START: 1, VALUES: lambda data: data[8:]}),
    "start-1-of-32": _set({SIZE: 32, START: 1, VALUES: _sums(32)[8:]}),
    "start-1-of-8": _set({SIZE: 8, START: 1, VALUES: _sums(8)[8:]}),
    "value-too-many": _set({VALUES: lambda data: data + bytes(8)}),
    "value-cut": _set({VALUES: lambda data: data[:-1]}),
    "no-values": _set({VALUES: b""}),
    "values-text": _set({VALUES: "x" * 8}),
    "value-flipped": _set({VALUES: _wrong}),
    "values-swapped": _set({VALUES: lambda data: data[8:16] + data[:8] + data[16:]}),
    "value-last-missing": _set({VALUES: lambda data: data[:-8]}),
    "value-4-wrong-last-missing": _set(
        {VALUES: lambda data: data[:32] + _wrong(data[32:-16])}
    ),
    "last-value-flipped": _set({VALUES: lambda d: d[:-1] + bytes([d[-1] ^ 128])}),
    "copy-equal": _set({COPIES: _copies((0, 2, _value(16, 2)))}),
    "copies-differ": _set({COPIES: _copies((0, 1, 7), (0, 6, 8), (3, 1, 9))}),
    "copy-right-alone": _set({VALUES: _wrong, COPIES: _copies((9, 0, _value(16, 0)))}),
    "copy-of-another-unit": _set(
        {VALUES: _wrong, COPIES: _copies((0, 1, _value(16, 0)))}
    ),
    "copies-swapped": _set(
        {
            VALUES: lambda data: _wrong(data[:8]) + _wrong(data[8:]),
            COPIES: _copies((0, 0, _value(16, 1)), (0, 1, _value(16, 0))),
        }
    ),
    # What they change the sums of other units by would make these right.
    "copy-before-the-load": _set(
        {
            VALUES: lambda data: data[:48] + _wrong(data[48:]),
            COPIES: _copies((0, 1, _value(16, 1) + _error(6) & MASK)),
        }
    ),
    "copy-behind-the-load": _set(
        {VALUES: _wrong, COPIES: _copies((0, 6, _value(16, 6) + _error(0) & MASK))},
        {NUM_TOKENS: 200},
    ),
    "copies-of-8-right": _units_of_8((0, 1, _value(8, 1))),
    "copies-of-8-add-up": _units_of_8((1, 0, _value(16, 0) - 5 & MASK), (1, 1, 5)),
    "copies-of-8-mixed": _units_of_8((0, 0, _value(16, 0) - 5 & MASK), (1, 1, 5)),
    "copy-of-no-unit": _set({COPIES: _copies((0, 7, 7))}),
    "copy-of-unit-2-32-1": _set({COPIES: _copies((0, 2**32 - 1, 7))}),
    "copy-65535": _set({COPIES: _copies((65535, 6, 7))}),
    "copy-twice": _set({COPIES: _copies((0, 1, 7), (0, 1, 7))}),
    "copies-in-disorder": _set({COPIES: _copies((0, 1, 7), (0, 0, 7))}),
    "copies-numbers-in-disorder": _set({COPIES: _copies((1, 0, 7), (0, 1, 7))}),
    "copies-many": _set({COPIES: _copies(*((c, c % 7, c) for c in range(70)))}),
    "copies-of-no-values": _set({VALUES: b"", COPIES: _copies((0, 0, 7))}),
    "copies-cut": _set({COPIES: _copies((0, 1, 7), (0, 2, 7))[:-1]}),
    "copies-text": _set({COPIES: "x" * 14}),
    "copies-nil": _set({COPIES: None}),
}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Params(Payloads):
    """``kv_transfer_params`` as JSON.

    Input that is no JSON stands under the key as text.
    """

    name = "params"
    max_len = 130_000
    share = 3
    by_params = True

    def run(self, data: bytes) -> str:
        try:
            params = json.loads(data)
        except (ValueError, RecursionError):
            params = {KV_TRANSFER_PARAMS_KEY: data.decode("utf-8", "replace")}
        outcomes = self._on(params)
        if not isinstance(params, dict):
            outcomes += self._on({KV_TRANSFER_PARAMS_KEY: params})
        return "+".join(sorted(set(outcomes))) or "not-checked"

    def _on(self, params: Any) -> list[str]:
        text = params.get(KV_TRANSFER_PARAMS_KEY) if isinstance(params, dict) else None
        try:
            data = base64.b64decode(text, validate=True)
        except (TypeError, ValueError):
            data = None
        return self.on_every_load(params, None, data if isinstance(text, str) else None)

    def seeds(self) -> dict[str, bytes]:
        right = wire.encode_text(right_payload(CASES[0]))
        other = {
            "remote_engine_id": "e",
            "remote_host": "h",
            "remote_port": 5,
            "remote_request_id": "p",
            "do_remote_prefill": True,
            "do_remote_decode": False,
        }
        load = {"do_remote_decode": False}
        key = KV_TRANSFER_PARAMS_KEY
        values: dict[str, Any] = {
            "right": {**other, key: right},
            "hybrid": {**other, key: _text(RIGHT[CASES[4]])},
            "hybrid-copies": {**other, key: _text(RIGHT[CASES[5]])},
            "one-token-fewer": {**other, key: _text(FEWER[CASES[0]])},
            "window-one-token-fewer": {**other, key: _text(FEWER[CASES[2]])},
            "embeddings": {**other, key: _text(RIGHT[CASES[7]])},
            "other-inputs": {**other, key: _text(RIGHT[CASES[8]])},
            "other-prompt": {
                **dict.fromkeys(other, "\u0007\n" + "x" * 2000),
                **load,
                key: _text(msgspec.msgpack.encode((2, [100, 1, 5, 0, {}]))),
            },
            "bad-fields": {**dict.fromkeys(other, [{}]), **load, key: "x"},
            "mooncake": {"remote_bootstrap_addr": "u", "transfer_id": "t", key: 5},
            "long-fields": {**dict.fromkeys(other, "\u0007\n" + "x" * 2000), **load},
            "long-fields-mismatch": {
                **dict.fromkeys(other, "\u0007\n" + "x" * 2000),
                **load,
                key: _text(RIGHT[CASES[0]][:-3] + b"x\xc4\x00"),
            },
            "both-flags": {**other, "do_remote_decode": True, key: right},
            "from-decode": {"do_remote_decode": True, key: right},
            "no-payload": other,
            **{f"json-{i}": v for i, v in enumerate((None, 7, "x", [], {}, [1], True))},
            "params-text": "kv_checksums",
            "number-of-4000-digits": {key: 10**4000, "remote_port": 10**4000},
            "surrogate": {key: "\ud800", "remote_host": "\ud800"},
            "not-ascii": {key: "\u00e4" + right},
            "padding": {key: right.rstrip("=")},
            "more-padding": {key: right + "="},
            "white-space": {key: right[:8] + "\n" + right[8:]},
            "url-safe": {key: right.replace("+", "-").replace("/", "_")},
        }
        found = {name: json.dumps(value).encode() for name, value in values.items()}
        return found | {"text": right.encode(), "no-text": b"\xff\xfe"}

    def long_seeds(self) -> dict[str, bytes]:
        text = wire.encode_text(right_payload(LONG_CASE))
        return {"128k-tokens": json.dumps({KV_TRANSFER_PARAMS_KEY: text}).encode()}

    def parse(self, data: bytes) -> Any:
        """Return the payload's own tree in place of its text."""
        params = json.loads(data)
        if isinstance(params, dict) and isinstance(
            text := params.get(KV_TRANSFER_PARAMS_KEY), str
        ):
            params[KV_TRANSFER_PARAMS_KEY] = super().parse(base64.b64decode(text))
        return params

    def repair(self, tree: Any) -> None:
        if isinstance(tree, dict):
            super().repair(tree.get(KV_TRANSFER_PARAMS_KEY))

    def invent(self, random: Random) -> bytes | None:
        text = _text(super().invent(random) or b"")
        return json.dumps({KV_TRANSFER_PARAMS_KEY: text}).encode()

    def unparse(self, tree: Any) -> bytes:
        if isinstance(tree, dict):
            value = tree.get(KV_TRANSFER_PARAMS_KEY)
            if isinstance(value, list):
                text = base64.b64encode(super().unparse(value)).decode()
                tree = {**tree, KV_TRANSFER_PARAMS_KEY: text}
        return json.dumps(tree, default=str).encode()
