# SPDX-License-Identifier: Apache-2.0
"""Payloads: as bytes that a connector brought, and under a request's parameters."""

import base64
import json
from collections import Counter
from typing import Any

import msgspec
import numpy as np

from vllm.distributed.kv_transfer.kv_checksum import KV_TRANSFER_PARAMS_KEY
from vllm.distributed.kv_transfer.kv_checksum import payload as wire
from vllm.distributed.kv_transfer.kv_checksum.verdict import Unverified

from .base import Target
from .loads import (
    CASES,
    FULL,
    LONG,
    LONG_CASE,
    STATE,
    TOKENS,
    WINDOW,
    Load,
    assert_right,
    block_sums,
    right_payload,
)
from .untyped import read

HYBRID = (FULL, WINDOW, STATE)
RIGHT = {
    case: wire.encode(right_payload(case.num_tokens, case.groups))
    for case in (*CASES, LONG_CASE)
}


def assert_decodes(data: bytes) -> None:
    """`decode` keeps its word on one input."""
    try:
        payload = wire.decode(data)
    except ValueError:
        return
    assert 0 < payload.num_tokens < 2**40 and 0 < payload.tp_size < 2**20
    assert len(payload.groups) <= 4096 and all(0 <= g < 4096 for g in payload.groups)
    for group in payload.groups.values():
        assert 0 <= group.fingerprint < 2**64 and 0 < group.block_size < 2**31
        assert group.values.dtype == np.uint64 and group.values.ndim == 1
        stop = group.start + len(group.values)
        assert 0 <= group.start < 2**40
        assert stop <= -(-payload.num_tokens // group.block_size)
    _, (*_, groups) = read(data)
    assert len(groups.pairs) == len(payload.groups), "one of two groups was dropped"
    data = wire.encode(payload)
    assert wire.encode(wire.decode(data)) == data


def decodes(data: bytes | None) -> bool:
    try:
        wire.decode(data or b"")
    except ValueError:
        return False
    return True


class Payloads(Target):
    """Bytes that came through a connector."""

    name = "payload"
    max_len = 100_000
    memory = 2**21  # for as many groups as a payload may have
    share = 4
    by_params = False

    def __init__(self) -> None:
        self.loads = [Load(case, self.by_params) for case in (*CASES, LONG_CASE)]

    def run(self, data: bytes) -> str:
        assert_decodes(data)
        outcomes = Counter(self.on_every_load({}, data, data))
        return "+".join(sorted(outcomes)) if outcomes else "nothing"

    def on_every_load(
        self, params: Any, received: bytes | None, data: bytes | None
    ) -> list[str]:
        """Outcomes of every load, each checked.

        Args:
            data: the bytes of the payload, or None if there are none.
        """
        outcomes = []
        # One that does not decode is the same to all loads; so only each policy's.
        for load in self.loads if decodes(data) else self.loads[:3]:
            if load.case is LONG_CASE and len(data or b"") < 8192:
                continue
            verdict = load.run(params, received)
            if verdict is None:
                continue
            if data is None:
                assert verdict.outcome == "unverified"
            else:
                assert_right(load, verdict, data)
                from_decode = verdict.unverified is Unverified.FROM_DECODE
                if data == RIGHT[load.case] and not from_decode:
                    assert verdict.outcome == "verified", verdict
            outcomes.append(verdict.outcome)
        return outcomes

    def seeds(self) -> dict[str, bytes]:
        encode = msgspec.msgpack.encode
        found = {
            "one-group": RIGHT[CASES[0]],
            "hybrid": RIGHT[CASES[4]],
            "other-version": encode((9, 9)),
            "other-version-right-body": b"\x92\x02" + RIGHT[CASES[0]][2:],
            "empty": b"",
            "nested": b"\x92\x01" + b"\x91" * 3000,
            "promises-4-GB": b"\x92\x01\xdd\xff\xff\xff\xff",
            "promises-groups": b"\x92\x01\x93\x64\x01\xdf\xff\xff\xff\xff",
            "promises-bytes": b"\x92\x01\x93\x64\x01\x81\x00\x94\x01\x10\x00\xc6\xff\xff\xff\xf8",
            "extension": b"\x92\x01\xc9\xff\xff\xff\xff\x00",
            "group-twice": _twice(),
            "group-twice-in-two-forms": _twice(b"\xcc\x00"),
            "group-twice-equal-to-none": b"\x92\x01\x93\x64\x01\x82\x00\x94\x01\x10\x00\xc4\x00"
            b"\xd3\0\0\0\0\0\0\0\0\x94\x01\x10\x00\xc4\x00",
            "map-of-16-bits": _longer_count(b"\xde\x00\x01"),
            "map-of-32-bits": _longer_count(b"\xdf\x00\x00\x00\x01"),
            "group-twice-text-first": b"\x92\x01\x93\x64\x01\x82\x00\xa0"
            + RIGHT[CASES[0]][6:],
        }
        for name, change in CHANGES.items():
            payload = right_payload(TOKENS, (FULL,))
            fields = [payload.num_tokens, payload.tp_size]
            group = payload.groups[FULL]
            wired = [group.fingerprint, group.block_size, group.start]
            wired.append(group.values.tobytes())
            body = change(fields, wired)
            found[name] = encode((1, body))
        return found

    def repair(self, tree: Any) -> None:
        """Cut values to as many blocks as the tokens fill."""
        try:
            _, (num_tokens, _, groups) = tree
            for group in groups.values():
                _, block_size, start, values = group
                blocks = -(-num_tokens // block_size) - start
                group[3] = values[: max(0, blocks) * 8]
        except (AttributeError, TypeError, ValueError, ZeroDivisionError):
            pass  # of another form

    def long_seeds(self) -> dict[str, bytes]:
        groups = {g: (1, 16, 0, b"") for g in range(9000)}
        return {
            "128k-tokens": RIGHT[LONG_CASE],
            "many-groups": msgspec.msgpack.encode((1, (16, 1, groups))),
        }


def _twice(again: bytes = b"\x00") -> bytes:
    """The same group id two times in one map, the second time as `again`."""
    data = RIGHT[CASES[0]]
    group = data[data.index(b"\x81\x00") + 2 :]
    return data.replace(b"\x81\x00", b"\x82\x00", 1) + again + group


def _longer_count(head: bytes) -> bytes:
    """A right payload whose map says its size in more bytes."""
    return RIGHT[CASES[0]].replace(b"\x81\x00", head + b"\x00", 1)


def _sums(block_size: int) -> bytes:
    return block_sums(FULL, block_size, TOKENS).tobytes()


def _set(at: int, value: Any) -> Any:
    def change(fields: list[Any], group: list[Any]) -> Any:
        group[at] = value(group[at]) if callable(value) else value
        return [*fields, {FULL: group}]

    return change


CHANGES = {
    "more-tokens": lambda f, g: [200, 1, {FULL: g}],
    "fewer-tokens": lambda f, g: [99, 1, {FULL: g}],
    "tokens-2-63": lambda f, g: [2**63, 1, {FULL: g}],
    "tokens-2-40": lambda f, g: [2**40, 1, {FULL: g}],
    "no-tokens": lambda f, g: [0, 1, {FULL: g[:3] + [b""]}],
    "ranks-2-20": lambda f, g: [100, 2**20, {FULL: g}],
    "no-ranks": lambda f, g: [100, 0, {FULL: g}],
    "other-ranks": lambda f, g: [100, 2, {FULL: g}],
    "group-4096": lambda f, g: [100, 1, {4096: g}],
    "group-negative": lambda f, g: [100, 1, {-1: g}],
    "other-group": lambda f, g: [100, 1, {1: g}],
    "no-groups": lambda f, g: [100, 1, {}],
    "two-groups": lambda f, g: [100, 1, {0: g, 1: g}],
    "group-of-5": lambda f, g: [100, 1, {FULL: [*g, 0]}],
    "body-of-4": lambda f, g: [100, 1, {FULL: g}, 0],
    "fingerprint-other": _set(0, 3),
    "fingerprint-negative": _set(0, -1),
    "block-size-0": _set(1, 0),
    "block-size-negative": _set(1, -16),
    "block-size-2-31": lambda f, g: [2**39, 1, {FULL: [g[0], 2**31, 0, g[3]]}],
    "block-size-24": lambda f, g: [100, 1, {FULL: [g[0], 24, 0, g[3][:40]]}],
    "block-size-32": lambda f, g: [100, 1, {FULL: [g[0], 32, 0, g[3][:32]]}],
    "block-size-32-right": lambda f, g: [100, 1, {FULL: [g[0], 32, 0, _sums(32)]}],
    "block-size-8-right": lambda f, g: [100, 1, {FULL: [g[0], 8, 0, _sums(8)]}],
    "block-size-8-cut": lambda f, g: [100, 1, {FULL: [g[0], 8, 0, _sums(8)[:-16]]}],
    "block-size-1": lambda f, g: [100, 1, {FULL: [g[0], 1, 0, g[3]]}],
    "block-size-2-30": lambda f, g: [100, 1, {FULL: [g[0], 2**30, 0, g[3][:8]]}],
    "start-negative": _set(2, -1),
    "start-too-late": _set(2, 1),
    "start-2-40": lambda f, g: [2**40 - 1, 1, {FULL: [g[0], 1, 2**40, b""]}],
    "start-1": lambda f, g: [100, 1, {FULL: [g[0], 16, 1, g[3][8:]]}],
    "start-1-of-32": lambda f, g: [100, 1, {FULL: [g[0], 32, 1, g[3][:24]]}],
    "value-too-many": _set(3, lambda data: data + bytes(8)),
    "value-cut": _set(3, lambda data: data[:-1]),
    "no-values": _set(3, b""),
    "values-text": _set(3, "x" * 8),
    "value-flipped": _set(3, lambda data: bytes([data[0] ^ 1]) + data[1:]),
    "values-swapped": _set(3, lambda data: data[8:16] + data[:8] + data[16:]),
    "value-last-missing": _set(3, lambda data: data[:-8]),
    "last-value-flipped": _set(3, lambda data: data[:-1] + bytes([data[-1] ^ 128])),
}


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
            wire.decode_text(text)
        except ValueError:
            data = None
        else:
            data = base64.b64decode(text, validate=True)
            assert (
                wire.encode_text(wire.decode_text(text))
                == base64.b64encode(wire.encode(wire.decode(data))).decode()
            )
        return self.on_every_load(params, None, data)

    def seeds(self) -> dict[str, bytes]:
        right = wire.encode_text(right_payload(TOKENS, (FULL,)))
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
            "hybrid": {**other, key: wire.encode_text(right_payload(TOKENS, HYBRID))},
            "bad-fields": {**dict.fromkeys(other, [{}]), **load, key: "x"},
            "mooncake": {"remote_bootstrap_addr": "u", "transfer_id": "t", key: 5},
            "long-fields": {**dict.fromkeys(other, "\u0007\n" + "x" * 2000), **load},
            "long-fields-mismatch": {
                **dict.fromkeys(other, "\u0007\n" + "x" * 2000),
                **load,
                key: base64.b64encode(RIGHT[CASES[0]][:-1] + b"x").decode(),
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
        text = wire.encode_text(right_payload(LONG, (FULL,)))
        return {"128k-tokens": json.dumps({KV_TRANSFER_PARAMS_KEY: text}).encode()}

    def parse(self, data: bytes) -> Any:
        """The payload's own tree stands in place of its text."""
        params = json.loads(data)
        if isinstance(params, dict) and isinstance(
            text := params.get(KV_TRANSFER_PARAMS_KEY), str
        ):
            params[KV_TRANSFER_PARAMS_KEY] = super().parse(base64.b64decode(text))
        return params

    def repair(self, tree: Any) -> None:
        if isinstance(tree, dict):
            super().repair(tree.get(KV_TRANSFER_PARAMS_KEY))

    def unparse(self, tree: Any) -> bytes:
        if isinstance(tree, dict):
            value = tree.get(KV_TRANSFER_PARAMS_KEY)
            if isinstance(value, list):
                text = base64.b64encode(super().unparse(value)).decode()
                tree = {**tree, KV_TRANSFER_PARAMS_KEY: text}
        return json.dumps(tree, default=str).encode()
