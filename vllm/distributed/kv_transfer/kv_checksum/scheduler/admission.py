# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Decide what a request may load of what its connector offers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_checksum import metrics
from vllm.distributed.kv_transfer.kv_checksum import payload as wire
from vllm.distributed.kv_transfer.kv_checksum.scheduler.consequences import (
    Consequences,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.peers import peer_of_params
from vllm.distributed.kv_transfer.kv_checksum.scheduler.pending import FROM_PEERS
from vllm.distributed.kv_transfer.kv_checksum.scheduler.quarantine import Quarantine
from vllm.distributed.kv_transfer.kv_checksum.scheduler.report import remote_engine
from vllm.distributed.kv_transfer.kv_checksum.support import serving_connector
from vllm.distributed.kv_transfer.kv_checksum.verdict import LoadVerdict, Unverified

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.request import Request


@dataclass
class Admission:
    """Declines loads that no check could stop in time, or that are not wanted.

    Attributes:
        connector: the scheduler-side KV connector.
        consequences: handles bad loads; holds the ledger.
        quarantine: knows from which engines nothing is loaded; None if it is off.
        declined: requests that load nothing; each was counted once.

    """

    connector: KVConnectorBase_V1
    consequences: Consequences
    quarantine: Quarantine | None
    declined: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._stats: Counter[str] = self.consequences.stats
        self._reporter = self.consequences.reporter

    def admit(
        self,
        request: Request,
        num_local_tokens: int,
        num_tokens: int | None,
        is_async: bool,
    ) -> tuple[int | None, bool]:
        """Tell how many tokens a request may load: see `KVChecksumScheduler.admit`."""
        if not num_tokens:
            return num_tokens, is_async
        # vLLM 0.30.0 has connectors load for requests that shall read no cache.
        denied = request.request_id in self.consequences.computes
        if denied or request.skip_reading_prefix_cache:
            return 0, False
        if self.quarantine is not None and self._is_quarantined(request):
            return 0, False
        ledger = self.consequences.ledger
        if ledger is None:
            if is_async or not self.consequences.fail_closed:
                return num_tokens, is_async
            self._decline_sync(request)
            return 0, False
        connector = serving_connector(self.connector, request)
        if connector.kv_checksum_carrier(request, receiving=True) is not None:
            return num_tokens, is_async
        allowed = ledger.num_allowed(request, num_local_tokens, num_tokens)
        if allowed == num_tokens:
            return num_tokens, is_async
        if not allowed:
            return 0, False
        return self.connector.limit_matched_tokens(request, num_local_tokens, allowed)

    def _is_quarantined(self, request: Request) -> bool:
        """Tell whether a load would come from a quarantined peer; it then fails now.

        The request computes the KV itself, or ends with an error; also when the
        quarantine ends before the request does.
        """
        assert self.quarantine is not None
        req_id = request.request_id
        if req_id in self.declined:
            return True
        connector = serving_connector(self.connector, request)
        params = wire.transfer_params(request)
        if connector.kv_checksum_carrier(
            request, receiving=True
        ) not in FROM_PEERS or not self.quarantine.holds(peer_of_params(params)):
            return False
        verdict = LoadVerdict(unverified=Unverified.QUARANTINED)
        if self.consequences.recompute:
            self._decline(req_id, verdict, remote_engine(params), metrics.RECOMPUTED)
        else:
            self._decline(req_id, verdict, remote_engine(params), metrics.FAILED)
            self.consequences.fail(req_id, verdict)
        return True

    def _decline_sync(self, request: Request) -> None:
        """Decline a load that takes effect before any check could end."""
        if request.request_id not in self.declined:
            name = type(serving_connector(self.connector, request)).__name__
            verdict = LoadVerdict(unverified=Unverified.SYNC_LOAD)
            self._decline(request.request_id, verdict, name, metrics.RECOMPUTED)

    def _decline(
        self, req_id: str, verdict: LoadVerdict, source: str, consequence: str
    ) -> None:
        """Count and log, once per request, a load that does not take place."""
        self.declined.add(req_id)
        assert verdict.unverified is not None
        self._stats[metrics.LOADS_STARTED] += 1
        self._stats[metrics.loads_key(verdict.outcome, None)] += 1
        self._stats[metrics.unverified_key(verdict.unverified)] += 1
        self._stats[consequence] += 1
        action = (
            "request failed"
            if consequence == metrics.FAILED
            else "computed instead of loaded"
        )
        self._reporter.load(req_id, verdict, source, action)
