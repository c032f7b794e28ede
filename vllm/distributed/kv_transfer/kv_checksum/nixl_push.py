# SPDX-License-Identifier: Apache-2.0
"""NIXL push: a payload rides the completion notif of every WRITE of its request.

Negotiated, not versioned. A consumer's registration says that it wants checksums
(`ask`); only then does the producer send the long form of the notif. So a consumer
that knows nothing of it, or has checksums off, gets the notif it expects, and a
producer that knows nothing of it ignores the question.

Long form: `_PREFIX`, then msgpack of the consumer's request id, the producer's TP size
and the payload. The plain form is UTF-8 text, which 0xff never starts.
"""

from collections.abc import Container
from typing import Any

import msgspec
from vllm.logger import init_logger

logger = init_logger(__name__)

_ASKED = "kv_checksums"
_PREFIX = b"\xffkv_checksums:"

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[str, int, bytes])


def ask(registration: dict[str, Any]) -> None:
    """Say in a consumer's registration that it wants checksums."""
    registration[_ASKED] = True


def add_payload(notif: bytes, payload: bytes) -> bytes:
    """The long form of a plain completion notif."""
    req_id, tp_size = notif.decode().rsplit(":", 1)
    return _PREFIX + _encoder.encode((req_id, int(tp_size), payload))


def split_payload(notif: bytes) -> tuple[str, int, bytes]:
    """Request id, TP size and payload of a completion notif in its long form.

    Raises:
        ValueError: malformed.
    """
    try:
        req_id, tp_size, payload = _decoder.decode(notif[len(_PREFIX) :])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if tp_size < 1:
        raise ValueError(f"TP size {tp_size}")
    return req_id, tp_size, payload


class NixlPushChecksums:
    """Payloads on their way through a push worker.

    Single dictionary operations are all that two threads share: the engine's thread
    adds and drops payloads, the writer thread takes them along.
    """

    def __init__(self) -> None:
        self._outgoing: dict[str, bytes] = {}
        self._received: dict[str, bytes] = {}

    # ---- producer

    def hold(self, payloads: dict[str, bytes]) -> None:
        """Payloads of requests that finished, before their blocks are handed over."""
        self._outgoing.update(payloads)

    def negotiate(self, req_id: str, registration: dict[str, Any]) -> None:
        """The request's consumer registered: drop the payload if it wants none."""
        if registration.get(_ASKED) is not True:
            self._outgoing.pop(req_id, None)

    def completion_notif(self, req_id: str, plain: bytes) -> bytes:
        """The completion notif of one WRITE of the request, its payload added."""
        payload = self._outgoing.get(req_id)
        return plain if payload is None else add_payload(plain, payload)

    # ---- consumer

    def take(self, notif: bytes, awaited: Container[str]) -> bytes:
        """A completion notif in its plain form; empty if it does not decode.

        The first payload of a request in `awaited` is kept until the next `finish`.
        """
        if not notif.startswith(_PREFIX):
            return notif
        try:
            req_id, tp_size, payload = split_payload(notif)
        except ValueError as error:
            logger.error(
                "Dropped a NIXL completion notif with KV checksums that does not "
                "decode: %s",
                error,
            )
            return b""
        if req_id in awaited:
            self._received.setdefault(req_id, payload)
        return f"{req_id}:{tp_size}".encode()

    # ---- both

    def finish(self, results: Any) -> None:
        """End a step: add received payloads to its `KVConnectorTransferResults`.

        Payloads of sends that ended are dropped. One whose lease ran out is among
        them: its blocks may be overwritten, so a WRITE that still goes out carries
        no checksums.
        """
        for req_id in results.finished_sending:
            self._outgoing.pop(req_id, None)
        results.kv_checksums, self._received = self._received, {}


def create_nixl_push_checksums(vllm_config: Any) -> NixlPushChecksums | None:
    """A push worker's payloads, or None if checksums are off."""
    if not vllm_config.kv_transfer_config.enable_kv_checksum:
        return None
    return NixlPushChecksums()
