# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Follow requests through the scheduler, as producer and as consumer.

Producer: the step that finishes a prompt's KV asks the workers to sum it; when the
request ends, the parts become a payload (`Sends`). Consumer: the step that starts a
load asks the workers to sum it once it arrives (`add_recv`); when every worker reports
it finished, the sums are compared (`Judging`) with the payload, with checksums that
came back from an offload tier (`StoredLoads`), or with those of what was computed here
(`LedgerLoads`).

Every load that starts ends as one of: verified, mismatch, unverified, failed by its
connector, aborted. The counters of these add up to that of loads started.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping
from itertools import count
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_checksum import metrics
from vllm.distributed.kv_transfer.kv_checksum import payload as wire
from vllm.distributed.kv_transfer.kv_checksum.checksum import (
    KVChecksumBlocks,
    KVChecksumScheduled,
    Skipped,
)
from vllm.distributed.kv_transfer.kv_checksum.payload import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_checksum.scheduler.admission import Admission
from vllm.distributed.kv_transfer.kv_checksum.scheduler.blocks import (
    holds_running_states,
    holds_states,
    loaded_blocks,
    tier_blocks,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.comparison import Comparison
from vllm.distributed.kv_transfer.kv_checksum.scheduler.consequences import (
    Consequences,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.evidence import Evidence
from vllm.distributed.kv_transfer.kv_checksum.scheduler.judging import Judging
from vllm.distributed.kv_transfer.kv_checksum.scheduler.ledger_loads import (
    FULL_BLOCKS,
    LedgerLoads,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.left_out import LeftOutGroups
from vllm.distributed.kv_transfer.kv_checksum.scheduler.local_hits import LocalHits
from vllm.distributed.kv_transfer.kv_checksum.scheduler.peers import Peers
from vllm.distributed.kv_transfer.kv_checksum.scheduler.pending import PendingLoad
from vllm.distributed.kv_transfer.kv_checksum.scheduler.quarantine import Quarantine
from vllm.distributed.kv_transfer.kv_checksum.scheduler.report import Reporter
from vllm.distributed.kv_transfer.kv_checksum.scheduler.sends import Sends
from vllm.distributed.kv_transfer.kv_checksum.scheduler.stored_loads import StoredLoads
from vllm.distributed.kv_transfer.kv_checksum.scheduler.traces import LoadTraces
from vllm.distributed.kv_transfer.kv_checksum.support import (
    declares,
    num_reporting_workers,
    serving_connector,
    transfer_config,
)
from vllm.distributed.kv_transfer.kv_checksum.verdict import LeftOut, Unverified

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_TIERS = (KVChecksumCarrier.STORED, KVChecksumCarrier.LEDGER)
"""What loads from cache tiers are compared with."""


class KVChecksumScheduler:
    """Asks workers for sums, makes payloads of them, and judges loads.

    Args:
        vllm_config: vLLM's configuration.
        connector: the scheduler-side KV connector.
        kv_cache_manager: the manager that knows a request's blocks.
        kv_cache_config: the KV cache groups.
        ledger: judges loads that bring no checksums; None if nobody does.

    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        connector: KVConnectorBase_V1,
        kv_cache_manager: KVCacheManager,
        kv_cache_config: KVCacheConfig,
        ledger: LedgerLoads | None = None,
    ) -> None:
        transfer, parallel = transfer_config(vllm_config), vllm_config.parallel_config
        self.fail_closed: bool = transfer.kv_checksum_fail_closed
        self.recompute: bool = transfer.kv_load_failure_policy == "recompute"
        tp_size: int = parallel.tensor_parallel_size
        comparison = Comparison(
            kv_cache_config, tp_size, num_reporting_workers(parallel)
        )
        self.connector = connector
        self.kv_cache_manager = kv_cache_manager
        self.kv_cache_config = kv_cache_config
        # Not from 1, so that no record of an earlier scheduler has such a number.
        self._seqs = count(time.time_ns())
        self._scheduled = KVChecksumScheduled()
        self._started: list[PendingLoad] = []
        self._recvs: dict[str, PendingLoad] = {}
        # Synchronous loads in flight whose request was preempted and loads again.
        self._replaced: list[PendingLoad] = []
        self._local_hits: LocalHits | None = None
        if ledger is not None and transfer.kv_checksum_scrub:
            self._local_hits = LocalHits(kv_cache_config, transfer.kv_checksum_scrub)
        # What is drawn of local hits, by the name under which workers report it.
        self._drawn: dict[str, PendingLoad] = {}
        self._stats: Counter[str] = Counter()
        self._reporter = Reporter()
        tracing = vllm_config.observability_config.otlp_traces_endpoint is not None
        self._traces = LoadTraces() if tracing else None
        self._left_out = LeftOutGroups(self._stats, self._reporter)
        self._skipped_groups: dict[int, str] = {}
        if kv_cache_config.kv_checksum_skipped:
            self._note_skipped(kv_cache_config.kv_checksum_skipped)
        hash_block_size: int = kv_cache_manager.block_pool.hash_block_size
        self._stored = StoredLoads(connector, kv_cache_config, hash_block_size)
        self.ledger = ledger
        self._consequences = Consequences(
            kv_cache_config,
            kv_cache_manager,
            self.fail_closed,
            self.recompute,
            self._stored,
            ledger,
            self._reporter,
            self._stats,
            self._seqs,
        )
        quarantine = None
        if transfer.kv_checksum_quarantine:
            quarantine = Quarantine(
                transfer.kv_checksum_quarantine,
                transfer.kv_checksum_quarantine_from_requests,
                self._stats,
            )
        self._quarantine = quarantine
        self._admission = Admission(connector, self._consequences, quarantine)
        self._judging = Judging(
            comparison,
            self._consequences,
            self._left_out,
            Peers(self._stats),
            Evidence(transfer.kv_checksum_evidence_dir),
            self._traces,
            quarantine,
        )
        self._sends = Sends(
            connector,
            kv_cache_manager,
            kv_cache_config,
            comparison,
            self._left_out,
            self._reporter,
            self._stats,
            self._seqs,
        )

    # ---- schedule()

    def admit(
        self,
        request: Request,
        num_local_tokens: int,
        num_tokens: int | None,
        is_async: bool,
    ) -> tuple[int | None, bool]:
        """Return how many of the tokens that its connector offers a request may load.

        Fail-closed, a load that takes effect before any check could end is declined:
        the request computes these tokens instead. So it does where a load of its was
        bad, from the first block on that was found bad before, and where it would come
        from a quarantined engine.

        Args:
            request: the request that is scheduled.
            num_local_tokens: tokens that it has already.
            num_tokens: tokens that the connector offers; None if it does not know yet.
            is_async: whether they are loaded before the step that uses them.

        Returns:
            The number of tokens and whether they are loaded asynchronously.

        """
        return self._admission.admit(request, num_local_tokens, num_tokens, is_async)

    def add_recv(
        self,
        request: Request,
        num_local_tokens: int,
        num_tokens: int,
        is_async: bool = True,
    ) -> None:
        """Start to follow a load of tokens ``[num_local_tokens, num_tokens)``.

        Call this when the load's blocks are allocated, before the connector is told.
        """
        req_id = request.request_id
        connector = serving_connector(self.connector, request)
        number = num_tokens - num_local_tokens
        carrier, unverified = self._carrier(request, connector, number, is_async)
        load = PendingLoad(
            req_id,
            KVChecksumBlocks(num_tokens, {}),
            carrier=carrier,
            params=wire.transfer_params(request),
            connector=type(connector).__name__,
            unverified=unverified,
            is_sync=not is_async,
            num_tokens=num_tokens,
            request=None if is_async else request,
        )
        if unverified is None:
            blocks = self.kv_cache_manager.get_blocks(req_id)
            from_tier = carrier in _TIERS
            if from_tier:
                found = tier_blocks(
                    self.kv_cache_config,
                    blocks,
                    num_local_tokens,
                    num_tokens,
                    not is_async,
                )
            else:
                found = loaded_blocks(self.kv_cache_config, blocks, num_tokens)
            for group_id in found.left_out:
                is_state = from_tier and holds_states(self.kv_cache_config, group_id)
                reason = LeftOut.STATES if is_state else LeftOut.MISSING_BLOCKS
                self._left_out.add(req_id, group_id, reason)
            load.blocks, load.empty = found.blocks, found.empty
            # A state is computed from all of its tokens; none of them can be left out.
            load.computes_last = num_tokens == request.num_tokens and not any(
                holds_running_states(self.kv_cache_config, i)
                for i in found.blocks.groups
            )
        load.blocks.seq = next(self._seqs)
        self._stats[metrics.LOADS_STARTED] += 1
        replaced = self._recvs.get(req_id)
        if replaced is not None and replaced.is_sync and self.ledger is not None:
            self._replaced.append(replaced)
        elif replaced is not None:
            self._stats[metrics.LOADS_ABORTED] += 1
        self._recvs[req_id] = load
        self._started.append(load)
        if self.ledger is not None:
            load.block_hashes = list(request.block_hashes)
            self.ledger.set_loaded(req_id, num_tokens, not is_async)

    def add_local_hit(self, request: Request, num_tokens: int) -> None:
        """Draw blocks of a request's local hit that this step sums again.

        Call this when its blocks are allocated; it draws none by default.
        """
        if self._local_hits is None:
            return
        req_id = request.request_id
        blocks, seq = self.kv_cache_manager.get_blocks(req_id), next(self._seqs)
        hit = self._local_hits.choose(req_id, blocks, num_tokens, seq)
        if hit is not None:
            hit.block_hashes = list(request.block_hashes)
            self._drawn[hit.req_id] = hit
            self._scheduled.full_blocks[hit.req_id] = hit.blocks

    def _carrier(
        self,
        request: Request,
        connector: KVConnectorBase_V1,
        num_tokens: int,
        is_async: bool,
    ) -> tuple[KVChecksumCarrier | None, Unverified | None]:
        """Return what a load that starts is compared with, or why it is not."""
        if is_async:
            carrier = connector.kv_checksum_carrier(request, receiving=True)
            if carrier is not None:
                return carrier, None
            if self._stored.covers(request, num_tokens):
                return KVChecksumCarrier.STORED, None
            if declares(type(connector), "kv_checksum_carrier"):
                return None, Unverified.FROM_DECODE
        if self.ledger is not None:
            return KVChecksumCarrier.LEDGER, None
        return None, Unverified.NO_CARRIER if is_async else Unverified.SYNC_LOAD

    def add_send(self, request: Request) -> None:
        """Ask for the sums of a prompt whose KV the step being scheduled finishes."""
        self._sends.add(request, self._scheduled)

    def after_schedule(
        self, output: SchedulerOutput, requests: Mapping[str, Request]
    ) -> None:
        """Find the prompts that this step finishes, and attach what workers must sum.

        Only requests that start in this step are looked at, and those that are to be
        sent and still prefill. A request that was preempted while it decoded starts
        again, on other blocks of the same prefix, with the KV of another computation.

        Args:
            output: the step, whose `kv_checksum_scheduled` is set.
            requests: the scheduler's requests by id.

        """
        for new in output.scheduled_new_reqs:
            request = requests[new.req_id]
            wire.take_text(request)  # still there if the whole prompt was found locally
            self._sends.note_started(request)
        if self._sends.unsummed:
            self._sends.ask_for_finished(output, requests, self._scheduled)
        if self.ledger is not None:
            self._ask_for_full_blocks(self.ledger, output, requests)
        output.kv_checksum_scheduled = self.build_checksum_meta()

    def _ask_for_full_blocks(
        self,
        ledger: LedgerLoads,
        output: SchedulerOutput,
        requests: Mapping[str, Request],
    ) -> None:
        """Have workers sum what becomes full in this step, and what it loads."""
        loads = {load.req_id: load for load in self._started}
        for req_id in (output.preempted_req_ids or set()) - loads.keys():
            ledger.forget(req_id)
        for load in loads.values():
            if load.is_sync and load.carrier is KVChecksumCarrier.LEDGER:
                # All slots that the step fills count, so that blocks are whole.
                request = requests[load.req_id]
                tokens = min(request.num_computed_tokens, request.num_tokens)
                load.blocks.num_tokens = max(tokens, load.num_tokens)
        for req_id in (
            self._judging.rewrites.keys() & output.num_scheduled_tokens.keys()
        ):
            rows = self.kv_cache_manager.get_blocks(req_id).blocks
            tokens = self._judging.rewrites.pop(req_id)
            ledger.note_rewritten(requests[req_id], rows, tokens)
        full = ledger.take_full_blocks(output.num_scheduled_tokens, next(self._seqs))
        if full is not None:
            self._scheduled.full_blocks[FULL_BLOCKS] = full

    def build_checksum_meta(self) -> KVChecksumScheduled | None:
        """Return the blocks that the step asks workers to sum, and start anew.

        Return None if there are none.
        """
        for load in self._started:
            load.take_sent()
            if load.is_sync:
                self._scheduled.sync_loads[load.req_id] = load.blocks
            elif load.carrier is KVChecksumCarrier.STORED:
                load.blocks.stored = True
                self._scheduled.reqs_to_load[load.req_id] = load.blocks
            elif load.carrier is not None:
                self._scheduled.reqs_to_recv[load.req_id] = load.blocks
        self._started.clear()
        scheduled = self._scheduled
        if not scheduled:
            return None
        self._scheduled = KVChecksumScheduled()
        return scheduled

    # ---- update_from_output()

    def collect(self, output: KVConnectorOutput | None) -> None:
        """Take over the workers' records of a step; None for a step without output."""
        self._reporter.tick()
        if self._quarantine is not None:
            self._quarantine.tick()
        if output is None or output.kv_checksums is None:
            return
        pending = self.ledger.pending() if self.ledger is not None else ()
        for record in output.kv_checksums.finalize():
            for full in pending:
                full.take(record)
            if not record.skipped_groups.keys() <= self._skipped_groups.keys():
                self._note_skipped(record.skipped_groups)
            for req_id in record.checksums:
                for table in (
                    self._sends.pending,
                    self._recvs,
                    self._drawn,
                    self._sends.answers.by_name,
                ):
                    asked = table.get(req_id)
                    if asked is not None:
                        asked.take(record)
            for replaced in self._replaced:
                replaced.take(record)
            for req_id, data in record.received.items():
                load = self._recvs.get(req_id)
                # An intact copy takes the place of a damaged one, which is empty.
                if load is not None and not load.received:
                    load.received = data

    def _note_skipped(self, reasons: Mapping[int, str]) -> None:
        self._skipped_groups = {**reasons, **self._skipped_groups}
        kinds = Counter(map(Skipped.of, self._skipped_groups.values()))
        for kind, number in kinds.items():
            self._stats[metrics.skipped_groups_key(kind)] = number

    def verify(
        self,
        output: KVConnectorOutput | None,
        requests: Mapping[str, Request],
        known_failed: Iterable[str] = (),
        scheduled: KVChecksumScheduled | None = None,
    ) -> dict[str, int]:
        """Judge the loads that finished, and return those that must fail.

        Args:
            output: the step's aggregated output of the connectors, or None.
            requests: the scheduler's requests by id.
            known_failed: ids whose load is already known to have failed.
            scheduled: the result of `build_checksum_meta` for the step.

        Returns:
            Per request whose load must fail, the number of its first tokens that need
            no recompute.

        """
        bad: dict[str, int] = {}
        if self._recvs or self._replaced:
            self._judge_ended(output, requests, known_failed, scheduled, bad)
        if self._drawn and scheduled is not None:
            self._judge_drawn(requests, scheduled, bad)
        if self._sends.answers.by_name:
            self._sends.add_payloads_to_answers(scheduled)
        if self.ledger is not None:
            # Behind the verdicts, because some of it may rest on bad loads.
            self.ledger.enter_reported()
        return bad

    def _judge_ended(
        self,
        output: KVConnectorOutput | None,
        requests: Mapping[str, Request],
        known_failed: Iterable[str],
        scheduled: KVChecksumScheduled | None,
        bad: dict[str, int],
    ) -> None:
        """Judge the loads that end with a step; what must fail is added to `bad`."""
        failed = {*known_failed, *(getattr(output, "failed_recving", None) or ())}
        for req_id in failed & self._recvs.keys():
            self._judging.give_up(self._recvs.pop(req_id), requests, bad)
        for req_id in getattr(output, "finished_recving", None) or ():
            load = self._recvs.get(req_id)
            if load is not None and not load.is_sync:
                self._judging.end(self._recvs.pop(req_id), requests, bad)
        for req_id, blocks in scheduled.sync_loads.items() if scheduled else ():
            load = self._recvs.get(req_id)
            if load is not None and load.blocks.seq == blocks.seq:
                self._judging.end(self._recvs.pop(req_id), requests, bad)
            for load in [x for x in self._replaced if x.blocks.seq == blocks.seq]:
                self._replaced.remove(load)
                self._judging.end(load, requests, bad)

    def _judge_drawn(
        self,
        requests: Mapping[str, Request],
        scheduled: KVChecksumScheduled,
        bad: dict[str, int],
    ) -> None:
        """Judge what a step has summed of local hits; see `Judging.end_drawn`."""
        for name in self._drawn.keys() & scheduled.full_blocks.keys():
            if self._drawn[name].blocks.seq == scheduled.full_blocks[name].seq:
                # else drawn anew in a step that has not ended
                self._judging.end_drawn(self._drawn.pop(name), requests, bad)

    def keep_verified(self, bad: dict[str, int], requests: dict[str, Request]) -> None:
        """Keep the tokens that `verify` found good from being recomputed.

        Call this once the scheduler has marked the loads as failed. It then caches
        only the computed tokens of a failed load, and computes on from there.

        Args:
            bad: the result of `verify`.
            requests: the scheduler's requests by id.

        """
        for req_id, kept in bad.items():
            if kept:
                requests[req_id].num_computed_tokens = kept

    def stop_users(self, scheduler: Scheduler) -> set[str]:
        """Stop running requests whose KV is bad: see `Consequences.stop_users`."""
        return self._consequences.stop_users(scheduler)

    def take_failed(self) -> set[str]:
        """Return the running requests that must end with an error."""
        return self._consequences.take_failed()

    def attach_errors(self, outputs: Iterable[Iterable[EngineCoreOutput]]) -> None:
        """Attach the reason to the outputs of requests that fail in this step.

        Args:
            outputs: the step's outputs, by client.

        """
        self._consequences.client_errors.attach(outputs)

    def attach_traces(self, outputs: Iterable[Iterable[EngineCoreOutput]]) -> None:
        """Attach what came of their loads to the outputs of requests that end.

        Args:
            outputs: the step's outputs, by client.

        """
        if self._traces is not None:
            self._traces.attach(outputs)

    def request_finished(
        self, request: Request, params: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        """Drop all state of a request that ended, and give its payload to its carrier.

        Args:
            request: the request that ended.
            params: the ``kv_transfer_params`` of its answer, or None.

        Returns:
            `params`, with the payload where they carry it.

        """
        req_id = request.request_id
        load = self._recvs.get(req_id)
        if load is not None and not (load.is_sync and self.ledger is not None):
            del self._recvs[req_id]
            self._stats[metrics.LOADS_ABORTED] += 1
        self._admission.declined.discard(req_id)
        self._consequences.computes.discard(req_id)
        self._judging.rewrites.pop(req_id, None)
        if self._traces is not None:
            self._traces.end(req_id)
        if self.ledger is not None:
            self.ledger.forget(req_id)
        return self._sends.finish(request, params, self._scheduled)

    def exchange_answers(
        self, outputs: MutableMapping[int, list[EngineCoreOutput]]
    ) -> None:
        """Hold back answers that are not summed yet: see `PendingAnswers.exchange`.

        Call this when all outputs of a step are there.
        """
        self._sends.answers.exchange(outputs)

    # ---- counters and log lines

    def take_stats(self) -> dict[str, int] | None:
        """Return the counts since the last call by key of `metrics`; None for none."""
        if self.ledger is not None:
            self._stats.update(self.ledger.take_stats())
        stats = dict(self._stats)
        self._stats.clear()
        return stats or None
