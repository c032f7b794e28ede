# SPDX-License-Identifier: Apache-2.0
"""Mooncake P2P: payloads ride the producer's responses, by consumer request id.

The response's field is optional, so instances without it keep working unverified.
Every producer worker sends the same bytes; who awaits them takes the first.
"""

from collections.abc import Container, Iterable
from queue import Empty, SimpleQueue
from typing import Any


class MooncakeChecksums:
    """Payloads on their way through a Mooncake worker."""

    def __init__(self) -> None:
        self._received: SimpleQueue[tuple[str, bytes]] = SimpleQueue()

    @staticmethod
    def of_sent(sent: Iterable[tuple[str, Any]]) -> dict[str, bytes] | None:
        """Payloads of requests whose KV was sent, for the response, or None.

        Args:
            sent: consumer request ids and the producer's ``SendBlockMeta``.
        """
        found = {req_id: meta.kv_checksums for req_id, meta in sent}
        return {r: data for r, data in found.items() if data is not None} or None

    def receive(
        self,
        payloads: dict[str, bytes] | None,
        ok_reqs: Iterable[str],
        awaited: Container[str],
    ) -> None:
        """Queue a response's payloads of awaited requests that it reports as sent.

        Called on the receiver's loop in the same synchronous step that then marks
        the loads finished, and before it: whoever sees a load finished finds its
        payload in the queue.
        """
        for req_id in ok_reqs:
            if payloads and req_id in payloads and req_id in awaited:
                self._received.put((req_id, payloads[req_id]))

    def finish(self, results: Any) -> None:
        """Add what was received to `KVConnectorTransferResults` taken before."""
        while True:
            try:
                req_id, payload = self._received.get_nowait()
            except Empty:
                return
            results.kv_checksums.setdefault(req_id, payload)


def create_mooncake_checksums(vllm_config: Any) -> MooncakeChecksums | None:
    """A Mooncake worker's payloads, or None if checksums are off."""
    if not vllm_config.kv_transfer_config.enable_kv_checksum:
        return None
    return MooncakeChecksums()
