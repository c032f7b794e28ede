# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Load nothing for a while from an engine that sent KV that differed again and again.

A client must not be able to bring a good engine in here. So only loads count whose
payload was made for the request's prompt and whose KV differs from it, and only if the
payload came where no client can write. A client writes ``kv_transfer_params``: it can
alter the sums and keep the digest of the prompt, or send valid ones when the producer
has long given the blocks to another request. What came there counts only if the
operator says that trusted routers alone can set them.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_checksum import metrics
from vllm.distributed.kv_transfer.kv_checksum.payload import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_checksum.scheduler.peers import (
    MAX_PEERS,
    Peer,
    peer_of,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.pending import PendingLoad
from vllm.distributed.kv_transfer.kv_checksum.verdict import LoadVerdict
from vllm.logger import init_logger

logger = init_logger(__name__)

WINDOW_S = 60.0
"""Mismatches within this time count together."""

FIRST_S = 60.0
"""How long a peer's first quarantine lasts; each further one lasts twice as long."""

LONGEST_S = 3600.0

FORGET_S = 3600.0
"""A peer that was out of quarantine for so long begins with `FIRST_S` again."""


@dataclass
class _Record:
    """What is known of a peer.

    Attributes:
        recent: its mismatches in the window: when, and a hash of the remote request.
        length: how long its last quarantine was set to last; 0 if it had none.
        until: when that ends, or ended.
        active: whether it lasts.

    """

    recent: deque[tuple[float, int]] = field(default_factory=deque)
    length: float = 0.0
    until: float = 0.0
    active: bool = False


class Quarantine:
    """Decides from which peers nothing is loaded at present.

    Args:
        threshold: mismatches within the window for which a peer is quarantined.
        from_requests: whether payloads that came in ``kv_transfer_params`` count.
        stats: counts by key of `metrics`.
        clock: returns seconds that only grow.

    """

    def __init__(
        self,
        threshold: int,
        from_requests: bool,
        stats: Counter[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threshold = threshold
        self._carriers = {KVChecksumCarrier.CONNECTOR}
        if from_requests:
            self._carriers.add(KVChecksumCarrier.KV_TRANSFER_PARAMS)
        self._stats = stats
        self._clock = clock
        # In the order of the last mismatch that counted.
        self._records: dict[Peer, _Record] = {}
        self._next_end = float("inf")
        self._set_gauge()

    def __len__(self) -> int:
        return len(self._records)

    def holds(self, peer: Peer) -> bool:
        """Tell whether nothing is loaded from a peer at present."""
        record = self._records.get(peer)
        return record is not None and record.active and self._clock() < record.until

    def note(self, load: PendingLoad, verdict: LoadVerdict) -> None:
        """Note a load that was judged; the peer may be quarantined for it."""
        if load.carrier not in self._carriers or not _differs(verdict):
            return
        peer = peer_of(load)
        if peer is None:
            return
        now = self._clock()
        self.tick()
        record = self._records.pop(peer, None) or _Record()
        self._make_room()
        self._records[peer] = record
        if record.active:
            return  # a load that had started before
        recent = record.recent
        while recent and recent[0][0] <= now - WINDOW_S:
            recent.popleft()
        request = _remote_request(load.params)
        if any(request == known for _, known in recent):
            return
        recent.append((now, request))
        if len(recent) >= self._threshold:
            self._begin(peer, record, now)

    def _begin(self, peer: Peer, record: _Record, now: float) -> None:
        again = record.length and now - record.until < FORGET_S
        record.length = min(2 * record.length, LONGEST_S) if again else FIRST_S
        record.until, record.active = now + record.length, True
        record.recent.clear()
        self._next_end = min(self._next_end, record.until)
        self._set_gauge()
        logger.error(
            "KV checksums: remote engine %s at %s is quarantined: %d loads from it "
            "differed within %d s; for %d s nothing is loaded from it, and its "
            "requests take the path of failed loads; take it out of service, and see "
            "what damages its KV",
            peer.engine,
            peer.host,
            self._threshold,
            WINDOW_S,
            record.length,
        )

    def tick(self) -> None:
        """End what is over. Call this once per step."""
        now = self._clock()
        if now < self._next_end:
            return
        active = {p: r for p, r in self._records.items() if r.active}
        for peer, record in active.items():
            if now >= record.until:
                record.active = False
                logger.warning(
                    "KV checksums: the quarantine of remote engine %s at %s has ended; "
                    "the next one within an hour lasts %d s",
                    peer.engine,
                    peer.host,
                    min(2 * record.length, LONGEST_S),
                )
        lasting = [r.until for r in active.values() if r.active]
        self._next_end = min(lasting, default=float("inf"))
        self._set_gauge()

    def _make_room(self) -> None:
        """Forget a peer if there are too many; the quarantined ones last."""
        if len(self._records) >= MAX_PEERS:
            records = self._records
            oldest = next((p for p, r in records.items() if not r.active), None)
            del records[next(iter(records)) if oldest is None else oldest]

    def _set_gauge(self) -> None:
        active = sum(record.active for record in self._records.values())
        self._stats[metrics.QUARANTINED_PEERS] = active


def _differs(verdict: LoadVerdict) -> bool:
    """Tell whether KV differs that is known to be of the request's own prompt."""
    return verdict.mismatched and not verdict.other_prompt and not verdict.unbound


def _remote_request(params: dict[str, Any]) -> int:
    """Return a number for the request whose KV was loaded, whatever a client sends."""
    for key in ("remote_request_id", "transfer_id"):
        value = params.get(key)
        if isinstance(value, str | int):
            return hash(value)
    return 0
