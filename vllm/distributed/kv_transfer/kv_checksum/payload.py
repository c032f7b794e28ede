# SPDX-License-Identifier: Apache-2.0
"""What a producer tells a consumer: the checksums of one request's blocks.

Wire form: msgpack of ``(version, body)``, the body decoded with its type. Values
are little-endian uint64. Anything malformed raises `ValueError` and nothing
else; memory stays bounded by the input, which is capped at `MAX_PAYLOAD_BYTES`.
"""

import base64
import binascii
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

import msgspec
import numpy as np

from .wire_maps import decode_map

PAYLOAD_VERSION = 1

KV_TRANSFER_PARAMS_KEY = "kv_checksums"
"""Where the payload stands in ``kv_transfer_params``; proxies must forward it."""

MAX_PAYLOAD_BYTES = 4 * 2**20
"""Enough for 512k block checksums (8M tokens at block size 16)."""

_MAX_GROUPS = 4096


class KVChecksumCarrier(Enum):
    """How a connector moves a payload from producer to consumer."""

    KV_TRANSFER_PARAMS = "kv_transfer_params"
    """In the request's ``kv_transfer_params``, which the proxy forwards."""

    CONNECTOR = "connector"
    """Beside the KV: the connector's own messages."""

    STORED = "stored"
    """None is sent: each block's checksum is stored with its KV and loaded back."""

    def of_request(self, request: Any, receiving: bool) -> "KVChecksumCarrier | None":
        """This carrier if a prefill of `request` is sent, or its result loaded.

        None for a request that is neither, and for a load from a decode instance.
        """
        if receiving:
            return None if is_from_decode(request) else self
        return self if transfer_params(request).get("do_remote_decode") else None


def transfer_params(request: Any) -> dict[str, Any]:
    """A request's ``kv_transfer_params``; empty if they are no mapping.

    Clients can send anything there (``vllm_xargs``), and not every connector looks.
    """
    params = request.kv_transfer_params
    return params if isinstance(params, dict) else {}


def is_from_decode(request: Any) -> bool:
    """Whether a load that starts is of KV that a decode instance computed.

    To be asked before the connector is told that the load starts: NIXL honours
    ``do_remote_prefill`` before ``do_remote_decode``, and then clears it.
    """
    params = transfer_params(request)
    decode, prefill = params.get("do_remote_decode"), params.get("do_remote_prefill")
    return bool(decode) and not prefill


def take_text(request: Any) -> object:
    """Take the payload out of a request's ``kv_transfer_params``; None for nothing.

    They go to every worker with the request, and nobody needs it there.
    """
    return transfer_params(request).pop(KV_TRANSFER_PARAMS_KEY, None)


class PayloadVersionError(ValueError):
    """The payload was made by another version of this feature."""


@dataclass
class GroupChecksums:
    """Checksums of one KV cache group.

    Attributes:
        fingerprint: identifies the group's layers (uint64).
        block_size: tokens per block on the producer.
        start: position of the first block.
        values: uint64, shape ``(positions,)``.
    """

    fingerprint: int
    block_size: int
    start: int
    values: np.ndarray


@dataclass
class KVChecksumPayload:
    """Checksums of one request, as its producer's scheduler added them up."""

    num_tokens: int
    tp_size: int
    groups: dict[int, GroupChecksums]


class _WireGroup(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    fingerprint: int
    block_size: int
    start: int
    values: bytes


class _WireBody(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    num_tokens: int
    tp_size: int
    groups: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_outer_decoder = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_body_decoder = msgspec.msgpack.Decoder(_WireBody)
_groups_decoder = msgspec.msgpack.Decoder(
    Annotated[dict[int, _WireGroup], msgspec.Meta(max_length=_MAX_GROUPS)]
)


def encode(payload: KVChecksumPayload) -> bytes:
    """The wire form of `payload`."""
    groups = {
        group_id: _WireGroup(
            g.fingerprint, g.block_size, g.start, g.values.astype("<u8").tobytes()
        )
        for group_id, g in payload.groups.items()
    }
    raw = msgspec.Raw(_encoder.encode(groups))
    body = _encoder.encode(_WireBody(payload.num_tokens, payload.tp_size, raw))
    return _encoder.encode((PAYLOAD_VERSION, msgspec.Raw(body)))


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
    return KVChecksumPayload(
        wire.num_tokens,
        wire.tp_size,
        {gid: _check_group(gid, g, wire.num_tokens) for gid, g in groups.items()},
    )


def _check_group(group_id: int, wire: _WireGroup, num_tokens: int) -> GroupChecksums:
    if not (0 <= group_id < _MAX_GROUPS and 0 <= wire.fingerprint < 2**64):
        raise ValueError("payload has an impossible group id or fingerprint")
    if not (0 < wire.block_size < 2**31 and 0 <= wire.start < 2**40):
        raise ValueError("payload has an impossible block size or start")
    if len(wire.values) % 8:
        raise ValueError("payload values are no whole number of uint64")
    values = np.frombuffer(wire.values, "<u8").astype(np.uint64)
    if wire.start + len(values) > -(-num_tokens // wire.block_size):
        raise ValueError("payload has more blocks than its tokens fill")
    return GroupChecksums(wire.fingerprint, wire.block_size, wire.start, values)


def encode_text(payload: KVChecksumPayload) -> str:
    """The wire form as base64, for JSON."""
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
