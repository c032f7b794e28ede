# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Encode and decode payloads: what a producer tells a consumer about one request.

Wire form: msgpack of ``(version, body)``, the body decoded with its type. Values
are little-endian uint64. Version 1 had sums of whole blocks, of another definition, and
was bound to no prompt. Anything malformed raises `ValueError` and nothing
else; memory stays bounded by the input, which is capped at `MAX_PAYLOAD_BYTES`.
"""

import binascii
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import pybase64 as base64

if TYPE_CHECKING:
    from vllm.v1.request import Request

PAYLOAD_VERSION = 2

KV_TRANSFER_PARAMS_KEY = "kv_checksums"
"""Where the payload stands in ``kv_transfer_params``; proxies must forward it."""

MAX_PAYLOAD_BYTES = 4 * 2**20
"""Enough for 512k units (8M tokens of one group)."""

_MAX_GROUPS = 4096

_Map = TypeVar("_Map", bound=dict[Any, Any])


class KVChecksumCarrier(Enum):
    """The ways in which a connector moves a payload from producer to consumer."""

    KV_TRANSFER_PARAMS = "kv_transfer_params"
    """In the request's ``kv_transfer_params``, which the proxy forwards."""

    CONNECTOR = "connector"
    """Beside the KV: the connector's own messages."""

    STORED = "stored"
    """None is sent: each block's checksum is stored with its KV and loaded back."""

    LEDGER = "ledger"
    """None is sent: the scheduler remembers what it computed."""

    LOCAL = "local"
    """None is sent, and nothing loaded: blocks of the prefix cache, by the ledger."""

    def of_request(
        self, request: "Request", receiving: bool
    ) -> "KVChecksumCarrier | None":
        """Return this carrier if a prefill of `request` is sent, or its result loaded.

        Return None for a request that is neither. What a decode instance computed is
        carried in its answer's ``kv_transfer_params`` alone: for a load of it, other
        carriers return None, too.

        Args:
            request: the request that is sent or loaded.
            receiving: whether this instance loads the request's KV.

        """
        if receiving:
            carries_back = self is KVChecksumCarrier.KV_TRANSFER_PARAMS
            return self if carries_back or not is_from_decode(request) else None
        return self if transfer_params(request).get("do_remote_decode") else None


def transfer_params(request: "Request") -> dict[str, Any]:
    """Return a request's ``kv_transfer_params``, or an empty mapping if they are none.

    Clients can send anything there (``vllm_xargs``), and not every connector looks.
    """
    params = request.kv_transfer_params
    return params if isinstance(params, dict) else {}


def is_from_decode(request: "Request") -> bool:
    """Tell whether a load that starts is of KV that a decode instance computed.

    Call this before the connector is told that the load starts: NIXL honours
    ``do_remote_prefill`` before ``do_remote_decode``, and then clears it.
    """
    params = transfer_params(request)
    decode, prefill = params.get("do_remote_decode"), params.get("do_remote_prefill")
    return bool(decode) and not prefill


def take_text(request: "Request") -> object:
    """Remove the payload from a request's ``kv_transfer_params`` and return it.

    They go to every worker with the request, and nobody needs it there. Return None
    if there is no payload.
    """
    return transfer_params(request).pop(KV_TRANSFER_PARAMS_KEY, None)


class PayloadVersionError(ValueError):
    """Raised for a payload that another version of this feature made."""


class PromptDigests(NamedTuple):
    """Digests of a prompt's first tokens, 64 bits each; 0: not bound to a prompt.

    Attributes:
        whole: of all of them.
        beginning: of those that fill units, for a consumer whose prompt is shorter.

    """

    whole: int
    beginning: int


class OtherCopies(NamedTuple):
    """The units in which other copies of a group's KV differ from the first one.

    They are copies on the producer, which several TP ranks hold.

    Attributes:
        copy: which copy, shape ``(n,)``.
        at: indices into the group's `values`, ascending per copy, shape ``(n,)``.
        values: uint64, the copies' own, shape ``(n,)``.

    """

    copy: np.ndarray
    at: np.ndarray
    values: np.ndarray


@dataclass
class GroupChecksums:
    """Whole-model sums of one KV cache group, as a producer sends them.

    Attributes:
        fingerprint: identifies the group's layers (uint64).
        unit_size: tokens per unit on the producer.
        start: number of the first unit.
        values: uint64, shape ``(units,)``.
        copies: the producer's other replicas, where they are not equal to the first.

    """

    fingerprint: int
    unit_size: int
    start: int
    values: np.ndarray
    copies: OtherCopies | None = None


@dataclass
class KVChecksumPayload:
    """Checksums of one request, as its producer's scheduler added them up.

    `prompt` and `inputs` are digests of what the KV was computed from.
    """

    num_tokens: int
    tp_size: int
    groups: dict[int, GroupChecksums]
    prompt: PromptDigests = PromptDigests(0, 0)
    inputs: int = 0


_WIRE_COPY: np.dtype = np.dtype([("copy", "<u2"), ("at", "<u4"), ("value", "<u8")])


class _WireGroup(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    fingerprint: int
    unit_size: int
    start: int
    values: bytes
    copies: bytes


class _WireBody(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    num_tokens: int
    tp_size: int
    prompt: int
    beginning: int
    inputs: int
    groups: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_outer_decoder = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_body_decoder = msgspec.msgpack.Decoder(_WireBody)
_groups_decoder = msgspec.msgpack.Decoder(
    Annotated[dict[int, _WireGroup], msgspec.Meta(max_length=_MAX_GROUPS)]
)


def encode(payload: KVChecksumPayload) -> bytes:
    """Encode `payload` in its wire form."""
    groups = {
        group_id: _WireGroup(
            g.fingerprint,
            g.unit_size,
            g.start,
            g.values.astype("<u8").tobytes(),
            _encode_copies(g.copies),
        )
        for group_id, g in payload.groups.items()
    }
    raw = msgspec.Raw(_encoder.encode(groups))
    body = _encoder.encode(
        _WireBody(
            payload.num_tokens, payload.tp_size, *payload.prompt, payload.inputs, raw
        )
    )
    return _encoder.encode((PAYLOAD_VERSION, msgspec.Raw(body)))


def _encode_copies(copies: OtherCopies | None) -> bytes:
    if copies is None:
        return b""
    wire: np.ndarray = np.empty(len(copies.at), _WIRE_COPY)
    wire["copy"], wire["at"], wire["value"] = copies
    return wire.tobytes()


def decode(data: bytes) -> KVChecksumPayload:
    """Parse the wire form.

    Raises:
        PayloadVersionError: another version.
        ValueError: malformed in any other way.

    """
    if len(data) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"payload of {len(data)} bytes is too long")
    try:
        version, body = _outer_decoder.decode(data)
        if version != PAYLOAD_VERSION:
            raise PayloadVersionError(f"payload version {version}")
        wire = _body_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, OverflowError) as error:
        raise ValueError(f"malformed payload: {error}") from None
    groups = decode_map(_groups_decoder, memoryview(wire.groups))
    if not (0 < wire.num_tokens < 2**40 and 0 < wire.tp_size < 2**20):
        raise ValueError("payload has an impossible number of tokens or ranks")
    prompt = PromptDigests(wire.prompt, wire.beginning)
    if not all(0 <= digest < 2**64 for digest in (*prompt, wire.inputs)):
        raise ValueError("payload has an impossible digest")
    return KVChecksumPayload(
        wire.num_tokens,
        wire.tp_size,
        {gid: _check_group(gid, g, wire.num_tokens) for gid, g in groups.items()},
        prompt,
        wire.inputs,
    )


def _check_group(group_id: int, wire: _WireGroup, num_tokens: int) -> GroupChecksums:
    if not (0 <= group_id < _MAX_GROUPS and 0 <= wire.fingerprint < 2**64):
        raise ValueError("payload has an impossible group id or fingerprint")
    if not (0 < wire.unit_size < 2**31 and 0 <= wire.start < 2**40):
        raise ValueError("payload has an impossible unit size or start")
    if len(wire.values) % 8:
        raise ValueError("payload values are no whole number of uint64")
    values = np.frombuffer(wire.values, "<u8").astype(np.uint64)
    if wire.start + len(values) > -(-num_tokens // wire.unit_size):
        raise ValueError("payload has more units than its tokens fill")
    copies = _decode_copies(wire.copies, len(values))
    return GroupChecksums(wire.fingerprint, wire.unit_size, wire.start, values, copies)


def _decode_copies(data: bytes, num_values: int) -> OtherCopies | None:
    if not data:
        return None
    if len(data) % _WIRE_COPY.itemsize:
        raise ValueError("payload copies are no whole number of entries")
    wire = np.frombuffer(data, _WIRE_COPY)
    copy, at = wire["copy"].astype(np.int64), wire["at"].astype(np.int64)
    if (at >= num_values).any() or (np.diff(copy * num_values + at) < 1).any():
        raise ValueError("payload has copies of no units, or in disorder")
    return OtherCopies(copy, at, wire["value"].astype(np.uint64))


def encode_text(payload: KVChecksumPayload) -> str:
    """Encode `payload` in its wire form, as base64 for JSON."""
    return base64.b64encode(encode(payload)).decode("ascii")


def decode_text(text: object) -> KVChecksumPayload:
    """Parse `encode_text`'s output.

    Raises:
        ValueError: as `decode`, or `text` is no base64 string.

    """
    if not isinstance(text, str):
        raise ValueError(f"payload is a {type(text).__name__}, not text")
    if len(text) > MAX_PAYLOAD_BYTES // 3 * 4 + 4:
        raise ValueError(f"payload of {len(text)} characters is too long")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("payload is no base64 text") from None
    return decode(data)


def decode_map(
    decoder: "msgspec.msgpack.Decoder[_Map]", data: bytes | memoryview
) -> _Map:
    """Decode one msgpack map.

    Raises:
        ValueError: malformed, or it holds a key more than once, be it in different
            encodings of one number.

    """
    try:
        found: _Map = decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from None
    if len(found) != _num_pairs(data):
        raise ValueError("a map holds a key twice")
    return found


def _num_pairs(data: bytes | memoryview) -> int:
    """Return how many pairs the msgpack map at the start of `data` claims to have."""
    first = data[0]
    if first < 0x90:
        return first & 0x0F
    return int.from_bytes(data[1 : 3 if first == 0xDE else 5], "big")
