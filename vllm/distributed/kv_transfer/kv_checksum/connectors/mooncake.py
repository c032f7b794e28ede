# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Carry payloads over Mooncake P2P, in the producer's responses.

A response holds payloads by consumer request id. The field is optional, so instances
without it keep working unverified. It is decoded here and not with the response,
because a response that does not decode fails every load in it. Every producer worker
sends the same bytes; the consumer takes the first.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import msgspec

from vllm.distributed.kv_transfer.kv_checksum.payload import (
    KVChecksumCarrier,
    decode_map,
    transfer_params,
)
from vllm.distributed.kv_transfer.kv_checksum.support import sums_blocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorTransferResults,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (  # noqa: E501
        MooncakeXferResponse,
        SendBlockMeta,
    )
    from vllm.v1.request import Request

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_payload_decoder = msgspec.msgpack.Decoder(bytes)
_NIL = _encoder.encode(None)

_DAMAGED = b""
"""Handed on instead of a payload that is none: it does not decode."""


def mooncake_carrier(request: Request, receiving: bool) -> KVChecksumCarrier | None:
    """Return the carrier of a request's payload; None if Mooncake does not move its KV.

    A producer sends nothing for a request without ``transfer_id``.

    Args:
        request: the request that is sent or loaded.
        receiving: whether this instance loads the request's KV.

    """
    if not receiving and not transfer_params(request).get("transfer_id"):
        return None
    return KVChecksumCarrier.CONNECTOR.of_request(request, receiving)


def _payloads(field: msgspec.Raw, ok_reqs: Iterable[str]) -> dict[str, bytes]:
    """Decode a response's field into payloads by request id.

    A payload that does not decode becomes `_DAMAGED`, and so does that of every
    request in `ok_reqs` if the field as a whole does not decode.
    """
    data = bytes(field)
    if data in (b"", _NIL):
        return {}
    try:
        raw = decode_map(_decoder, data)
    except ValueError:
        return dict.fromkeys(ok_reqs, _DAMAGED)
    return {req_id: _payload(one) for req_id, one in raw.items()}


def _payload(one: msgspec.Raw) -> bytes:
    try:
        return _payload_decoder.decode(one)
    except msgspec.MsgspecError:
        return _DAMAGED


class MooncakeChecksums:
    """Moves payloads through a Mooncake worker.

    The receiver's loop queues them, the engine's thread takes them.
    """

    def __init__(self) -> None:
        self._received: SimpleQueue[tuple[str, bytes]] = SimpleQueue()

    @staticmethod
    def add_sent(
        response: MooncakeXferResponse, sent: Iterable[tuple[str, SendBlockMeta]]
    ) -> None:
        """Add to a response the payloads of requests whose KV was sent, if any.

        Args:
            response: the ``MooncakeXferResponse``.
            sent: consumer request ids and the producer's ``SendBlockMeta``.

        """
        found = {req_id: meta.kv_checksums for req_id, meta in sent}
        found = {r: data for r, data in found.items() if data is not None}
        if found:
            response.kv_checksums = msgspec.Raw(_encoder.encode(found))

    def receive(
        self,
        field: msgspec.Raw,
        ok_reqs: Sequence[str],
        awaited: Container[str],
    ) -> None:
        """Queue a response's payloads of awaited requests that it reports as sent.

        Call this on the receiver's loop, in the synchronous step that then marks the
        loads finished: once a load is seen finished, its payload is in the queue.

        Args:
            field: the response's field, which may be malformed.
            ok_reqs: consumer request ids that the response reports as sent.
            awaited: consumer request ids whose loads are in progress.

        """
        payloads = _payloads(field, ok_reqs)
        for req_id in ok_reqs:
            if req_id in payloads and req_id in awaited:
                self._received.put((req_id, payloads[req_id]))

    def finish(self, results: KVConnectorTransferResults) -> None:
        """Add the received payloads to results, which must have been taken before."""
        while True:
            try:
                req_id, payload = self._received.get_nowait()
            except Empty:
                return
            if not results.kv_checksums.get(req_id):
                results.kv_checksums[req_id] = payload


def create_mooncake_checksums(vllm_config: VllmConfig) -> MooncakeChecksums | None:
    """Create a Mooncake worker's `MooncakeChecksums`; None if checksums are off."""
    return MooncakeChecksums() if sums_blocks(vllm_config) else None
