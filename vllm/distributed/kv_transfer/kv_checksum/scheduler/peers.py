# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tell the engines apart from which loads come, and count bad loads by engine.

A client names the engine in its ``kv_transfer_params``, so it can invent names without
end. Only loads that ended with a transfer count, and only those that were not verified;
of these, a fixed number of peers has a name of its own in the metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from vllm.distributed.kv_transfer.kv_checksum import metrics
from vllm.distributed.kv_transfer.kv_checksum.naming import shortened
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_checksum.scheduler.pending import PendingLoad
    from vllm.distributed.kv_transfer.kv_checksum.verdict import LoadVerdict

logger = init_logger(__name__)

MAX_PEERS = 64
"""Peers that the metrics name; all further ones share one name."""

_UNKNOWN = "unknown"

_MAX_URL_CHARS = 1024
"""Of a longer address only these are read: ``urlsplit`` keeps what it was given."""


class Peer(NamedTuple):
    """An engine that sends KV, as a load's parameters name it: short, printable."""

    engine: str
    host: str


OTHER = Peer("other", "other")
"""Stands in the metrics for all peers behind the first `MAX_PEERS`."""


def peer_of_params(params: Mapping[str, Any]) -> Peer:
    """Return the peer that ``kv_transfer_params`` name."""
    engine = params.get("remote_engine_id")
    host = _host(params)
    return Peer(
        _UNKNOWN if engine is None else shortened(engine),
        _UNKNOWN if host is None else shortened(host),
    )


def peer_of(load: PendingLoad) -> Peer | None:
    """Return the peer that a load came from; None if it came from no other engine."""
    return peer_of_params(load.params) if load.is_from_peer else None


def _host(params: Mapping[str, Any]) -> object:
    """Return the host of NIXL's parameters, or that of Mooncake's URL."""
    address = params.get("remote_bootstrap_addr")
    if not isinstance(address, str):
        return params.get("remote_host") if address is None else address
    try:
        return urlsplit(address[:_MAX_URL_CHARS]).hostname or address
    except ValueError:
        return address


class Peers:
    """Counts loads that were not verified by the peer that they came from.

    Args:
        stats: counts by key of `metrics`.
        limit: the number of peers that are told apart.

    """

    def __init__(self, stats: Counter[str], limit: int = MAX_PEERS) -> None:
        self._stats = stats
        self._limit = limit
        self._named: set[Peer] = set()
        self._is_full = False

    def count(self, load: PendingLoad, verdict: LoadVerdict) -> None:
        """Count a load that ended with a transfer and was not verified."""
        peer = peer_of(load)
        if peer is None:
            return
        outcome = metrics.OTHER_PROMPT if verdict.other_prompt else verdict.outcome
        self._stats[metrics.peer_loads_key(outcome, *self.named(peer))] += 1

    def named(self, peer: Peer) -> Peer:
        """Return the peer as the metrics name it; it may take the last free name."""
        if peer in self._named:
            return peer
        if len(self._named) < self._limit:
            self._named.add(peer)
            return peer
        if not self._is_full:
            self._is_full = True
            logger.warning(
                "KV checksums: %d peers sent loads that were not verified; /metrics "
                "counts those of further ones together, as 'other'",
                self._limit,
            )
        return OTHER
