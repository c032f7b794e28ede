# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Carry payloads over NIXL push, in the completion notif of every WRITE of a request.

The form of the notif is negotiated, not versioned. A consumer's registration says which
form it wants (`ask`); only then does the producer send that form. So a consumer that
does not know the long form, knows another one, or has checksums off, gets the notif
that it expects, and a producer that does not know the question ignores it.

Long form: `_PREFIX`, the plain form with its length and CRC-32 before it, the CRC-32
of the payload, the payload as base64. The plain form is UTF-8 text, which never
contains 0xff. Some NIXL back ends cut notifs, or end them at a zero byte: a WRITE
counts as complete if the plain part came through, whether or not the payload did.
"""

from __future__ import annotations

import binascii
from collections.abc import Container
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pybase64 as base64
import regex as re

from vllm.distributed.kv_transfer.kv_checksum.support import sums_blocks
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorTransferResults,
    )

logger = init_logger(__name__)

_ASKED = "kv_checksums"
_FORM = 2
"""The form that a registration asks for. The form before it, msgpack without CRCs, was
asked for by True."""

# 0xff never occurs in UTF-8. There are two, so that damage to one of them does not make
# a long form look like a plain one.
_NO_TEXT = b"\xff"
_PREFIX = _NO_TEXT * 2 + b"kv_checksums:"

# The prefix is followed by the length and CRC-32 of the plain part, the plain part by
# the CRC-32 of the payload.
_PLAIN_HEADER = re.compile(rb"([0-9]{1,6}):([0-9a-f]{8}):")
_PAYLOAD_HEADER = re.compile(rb":([0-9a-f]{8}):")
_PLAIN = re.compile(rb"(.*):0*[1-9][0-9]{0,8}", re.DOTALL)

DAMAGED = b""
"""Handed on instead of a payload that did not come through: it does not decode."""


def ask(registration: dict[str, Any]) -> None:
    """Ask for checksums in a consumer's registration, which is changed in place."""
    registration[_ASKED] = _FORM


def _crc(data: bytes) -> bytes:
    return b"%08x" % crc32(data)


def add_payload(plain: bytes, payload: bytes) -> bytes:
    """Build the long form of a plain completion notif."""
    return b"%b%d:%b:%b:%b:%b" % (
        _PREFIX,
        len(plain),
        _crc(plain),
        plain,
        _crc(payload),
        base64.b64encode(payload),
    )


def may_be_long(notif: bytes) -> bool:
    """Tell whether `notif` was sent in the long form, whatever became of it."""
    return not notif or _NO_TEXT in notif[:2]


def split_payload(notif: bytes) -> tuple[bytes, bytes]:
    """Split a long form into the plain form and the payload, or `DAMAGED`.

    Raises:
        ValueError: the plain form did not come through.

    """
    # The prefix is not compared, because the CRC tells more.
    header = _PLAIN_HEADER.match(notif, len(_PREFIX))
    if header is None:
        raise ValueError("it is cut, or its beginning is damaged")
    end = header.end() + int(header[1])
    plain = notif[header.end() : end]
    if _crc(plain) != header[2] or _PLAIN.fullmatch(plain) is None:
        raise ValueError("its request id is cut or damaged")
    plain.decode()
    header = _PAYLOAD_HEADER.match(notif, end)
    if header is None:
        return plain, DAMAGED
    try:
        payload = base64.b64decode(notif[header.end() :], validate=True)
    except binascii.Error:
        return plain, DAMAGED
    return plain, payload if _crc(payload) == header[1] else DAMAGED


class NixlPushChecksums:
    """Moves payloads through a push worker.

    Two threads share single dictionary operations and one flag: the engine's thread
    adds and drops payloads and reads completion notifs, the writer thread sends
    payloads and registrations.
    """

    def __init__(self) -> None:
        self._outgoing: dict[str, bytes] = {}
        self._received: dict[str, bytes] = {}
        self._plain_only = False

    # ---- producer

    def hold(self, payloads: dict[str, bytes]) -> None:
        """Keep payloads of finished requests, before their blocks are handed over."""
        self._outgoing.update(payloads)

    def negotiate(self, req_id: str, registration: dict[str, Any]) -> None:
        """Drop a request's payload if its consumer registered without asking for it."""
        form = registration.get(_ASKED)
        if type(form) is not int or form != _FORM:
            self._outgoing.pop(req_id, None)

    def completion_notif(self, req_id: str, plain: bytes) -> bytes:
        """Return the notif of one completed WRITE, with the payload if there is any."""
        payload = self._outgoing.get(req_id)
        return plain if payload is None else add_payload(plain, payload)

    # ---- consumer

    def registration(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Return a registration as it is sent.

        It asks for no checksums once a long form did not come through.
        """
        if not self._plain_only:
            return wanted
        return {key: value for key, value in wanted.items() if key != _ASKED}

    def take(self, notif: bytes, awaited: Container[str]) -> bytes:
        """Return a completion notif in its plain form; empty if that was lost.

        The first payload of a request in `awaited` is kept until the next `finish`,
        or `DAMAGED` if no copy of it came through.
        """
        if not may_be_long(notif):
            return notif
        try:
            plain, payload = split_payload(notif)
        except ValueError as error:
            self._lost(notif, error)
            return b""
        req_id = plain.decode().rsplit(":", 1)[0]
        if req_id in awaited and not self._received.get(req_id):
            self._received[req_id] = payload
        return plain

    def _lost(self, notif: bytes, error: ValueError) -> None:
        log = logger.debug if self._plain_only else logger.error
        self._plain_only = True
        log(
            "A NIXL completion notif with KV checksums (%d bytes) did not come through "
            "(%s): the load that it ends never does, and keeps its blocks. This worker "
            "asks for notifs without checksums from now on, so its loads are not "
            "verified. Find out what cuts or damages NIXL notifs (back end, network), "
            "then restart this instance",
            len(notif),
            error,
        )

    # ---- both

    def finish(self, results: KVConnectorTransferResults) -> None:
        """Add the received payloads to a step's results, and drop those of ended sends.

        A send whose lease ran out has ended too: its blocks may be overwritten, so a
        WRITE that still goes out carries no checksums.
        """
        for req_id in results.finished_sending:
            self._outgoing.pop(req_id, None)
        results.kv_checksums, self._received = self._received, {}


def create_nixl_push_checksums(vllm_config: VllmConfig) -> NixlPushChecksums | None:
    """Create a push worker's `NixlPushChecksums`; None if checksums are off."""
    return NixlPushChecksums() if sums_blocks(vllm_config) else None
