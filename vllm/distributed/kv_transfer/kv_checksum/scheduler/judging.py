# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Judge loads that ended: compare, count and log them, and handle the consequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_checksum import metrics
from vllm.distributed.kv_transfer.kv_checksum.naming import request_name
from vllm.distributed.kv_transfer.kv_checksum.payload import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_checksum.scheduler.comparison import Comparison
from vllm.distributed.kv_transfer.kv_checksum.scheduler.consequences import (
    Consequences,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.evidence import Evidence
from vllm.distributed.kv_transfer.kv_checksum.scheduler.left_out import LeftOutGroups
from vllm.distributed.kv_transfer.kv_checksum.scheduler.local_hits import LocalHits
from vllm.distributed.kv_transfer.kv_checksum.scheduler.peers import Peers
from vllm.distributed.kv_transfer.kv_checksum.scheduler.pending import (
    NotComparable,
    PendingLoad,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.quarantine import Quarantine
from vllm.distributed.kv_transfer.kv_checksum.scheduler.traces import LoadTraces
from vllm.distributed.kv_transfer.kv_checksum.scheduler.users import HOLD_BLOCKS
from vllm.distributed.kv_transfer.kv_checksum.verdict import LoadVerdict
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass
class Judging:
    """Gives every load that ended its verdict.

    Attributes:
        comparison: compares loads with payloads.
        consequences: handles loads that are not verified; holds what else judges.
        left_out: counts groups that are left out.
        peers: counts bad loads by the engine that sent them.
        evidence: writes mismatches to files.
        traces: tells requests' spans; None without tracing.
        quarantine: counts mismatches by the engine that sent them; None if it is off.
        rewrites: requests whose last loaded token the next step computes again.

    """

    comparison: Comparison
    consequences: Consequences
    left_out: LeftOutGroups
    peers: Peers
    evidence: Evidence
    traces: LoadTraces | None
    quarantine: Quarantine | None
    rewrites: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stats: Counter[str] = self.consequences.stats
        self._reporter = self.consequences.reporter
        self._ledger = self.consequences.ledger
        self._stored = self.consequences.stored
        self._fail_closed = self.consequences.fail_closed

    def end(
        self, load: PendingLoad, requests: Mapping[str, Request], bad: dict[str, int]
    ) -> None:
        """Judge, count and log a load that finished, and handle the consequences.

        A load that must fail is added to `bad`.
        """
        req_id = load.req_id
        # What a synchronous load brought is in the prefix cache, whatever became of
        # its request.
        request = load.request if load.is_sync else requests.get(req_id)
        if request is None or (
            not load.is_sync and request.status != RequestStatus.WAITING_FOR_REMOTE_KVS
        ):
            self._stats[metrics.LOADS_ABORTED] += 1
            return
        verdict = self.judge(request, load)
        if verdict.unbound:
            self._log_unbound(req_id)
        for group_id, reason in verdict.left_out.items():
            self.left_out.add(req_id, group_id, reason)
        self.count(verdict, load)
        if verdict.outcome != "verified":
            self.peers.count(load, verdict)
            if self.quarantine is not None:
                self.quarantine.note(load, verdict)
            action = self.consequences.see_to(request, load, verdict, bad)
            self.evidence.add(load, verdict, action)
        elif self._ledger is not None:
            self._ledger.enter_load(load)
            if not load.is_sync and load.num_tokens == request.num_tokens:
                self.rewrites[req_id] = load.num_tokens
        if load.is_sync:
            self.consequences.note_users(load, verdict, requests, bad)
        elif req_id not in bad:
            # Last, because blocks are dropped from a store by the request's hashes.
            self.consequences.keep_away(request, load, verdict)

    def end_drawn(
        self, hit: PendingLoad, requests: Mapping[str, Request], bad: dict[str, int]
    ) -> None:
        """Judge what a step has summed of a local hit.

        It counts only if the ledger knows some of it: an old block is no bad one.
        """
        assert self._ledger is not None
        request = requests.get(LocalHits.request_of(hit))
        if request is None or request.status not in HOLD_BLOCKS:
            return
        verdict = self._ledger.judge(hit)
        for group in verdict.groups.values():
            group.unverified = None
        if not verdict.num_compared:
            return
        self._stats[metrics.LOADS_STARTED] += 1
        self.count(verdict, hit)
        if verdict.mismatched:
            action = self.consequences.action(hit, 0)
            self._reporter.load(request.request_id, verdict, hit.connector, action)
            self.evidence.add(hit, verdict, action)
            self.consequences.note_users(hit, verdict, requests, bad)

    def give_up(
        self, load: PendingLoad, requests: Mapping[str, Request], bad: dict[str, int]
    ) -> None:
        """Count a load that its connector reports as failed.

        Nothing of it is compared.
        """
        req_id = load.req_id
        self._stats[metrics.LOADS_FAILED] += 1
        request = requests.get(req_id)
        if request is None:
            return
        if self._ledger is not None:
            self._ledger.set_loaded(req_id, request.num_computed_tokens)
        if load.is_sync:
            return
        if load.blocks.stored or (self._fail_closed and load.may_be_offered_again):
            self._stored.give_up(request)
        if self._fail_closed and self.consequences.recompute:
            # vLLM would keep the tokens before the first block that failed.
            bad[req_id] = 0

    def judge(self, request: Request, load: PendingLoad) -> LoadVerdict:
        """Compare a load with its payload or its stored block checksums."""
        if load.unverified is not None:
            return LoadVerdict(unverified=load.unverified)
        if load.carrier is KVChecksumCarrier.LEDGER:
            assert self._ledger is not None
            return self._ledger.judge(load)
        if not load.blocks.stored:
            return self.comparison.judge(request, load)
        try:
            load.check_reports(self.comparison.num_workers)
        except NotComparable as error:
            return LoadVerdict(unverified=error.reason, detail=error.detail)
        records = list(load.records.values())
        return self._stored.judge(request, load.blocks, records)

    def count(self, verdict: LoadVerdict, load: PendingLoad) -> None:
        """Count a load that was judged, and note it for its request's span."""
        outcome = verdict.outcome
        self._stats[metrics.loads_key(outcome, load.carrier)] += 1
        if outcome == "unverified" and verdict.reason is not None:
            self._stats[metrics.unverified_key(verdict.reason)] += 1
        if verdict.other_prompt:
            self._stats[metrics.OTHER_PROMPTS] += 1
        if verdict.num_unknown:
            self._stats[metrics.LEDGER_MISSES] += verdict.num_unknown
        self._stats[metrics.BLOCKS_COMPARED] += verdict.num_compared
        self._stats[metrics.BLOCKS_MISMATCHED] += verdict.num_mismatched
        ended = load.request is not None and load.request.is_finished()
        if self.traces is not None and not ended:
            label = metrics.carrier_label(load.carrier)
            self.traces.note(LocalHits.request_of(load), verdict, label)
        if outcome != "verified" and self._fail_closed and not ended:
            self.consequences.count_failure(load)

    def _log_unbound(self, req_id: str) -> None:
        """Count a load whose prompt is not known to be the right one; log it once."""
        self._stats[metrics.PROMPTS_NOT_BOUND] += 1
        self._reporter.warn_once(
            "unbound",
            "KV checksums cannot tell of which prompt a load is: it is given as "
            "embeddings (first for request %s)",
            request_name(req_id),
        )
