# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Mooncake P2P: payloads ride the producer's responses, by consumer request id.

The response's field is optional, so instances without it keep working unverified. It is
decoded here and not with the response, whose decoding fails every load in it.
Every producer worker sends the same bytes; who awaits them takes the first.
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
    """How a request's payload travels; None: Mooncake does not move its KV.

    A producer sends nothing for a request without ``transfer_id``.
    """
    if not receiving and not transfer_params(request).get("transfer_id"):
        return None
    return KVChecksumCarrier.CONNECTOR.of_request(request, receiving)


def _payloads(field: msgspec.Raw, ok_reqs: Iterable[str]) -> dict[str, bytes]:
    """The payloads in a response's field, by request id.

    What does not decode stands as `_DAMAGED`: one payload alone, or that of every
    request if the field as a whole does not.
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
    """Payloads on their way through a Mooncake worker."""

    def __init__(self) -> None:
        self._received: SimpleQueue[tuple[str, bytes]] = SimpleQueue()

    @staticmethod
    def add_sent(
        response: MooncakeXferResponse, sent: Iterable[tuple[str, SendBlockMeta]]
    ) -> None:
        """Add the payloads of requests whose KV was sent to a response, if any.

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

        Called on the receiver's loop in the same synchronous step that then marks
        the loads finished, and before it: whoever sees a load finished finds its
        payload in the queue.
        """
        payloads = _payloads(field, ok_reqs)
        for req_id in ok_reqs:
            if req_id in payloads and req_id in awaited:
                self._received.put((req_id, payloads[req_id]))

    def finish(self, results: KVConnectorTransferResults) -> None:
        """Add what was received to `KVConnectorTransferResults` taken before."""
        while True:
            try:
                req_id, payload = self._received.get_nowait()
            except Empty:
                return
            if not results.kv_checksums.get(req_id):
                results.kv_checksums[req_id] = payload


def create_mooncake_checksums(vllm_config: VllmConfig) -> MooncakeChecksums | None:
    """A Mooncake worker's payloads, or None if checksums are off."""
    return MooncakeChecksums() if sums_blocks(vllm_config) else None
