# SPDX-License-Identifier: Apache-2.0
"""A request's life in the scheduler, as producer and as consumer.

Producer: the step that finishes a prompt's KV asks the workers to sum it
(`add_send`); when the request ends, the parts become a payload
(`request_finished`). Consumer: the step that starts a load asks the workers to
sum it once it arrives (`add_recv`); when every worker reports it finished, the
sums are compared with the payload (`verify`), or with checksums that came back from
an offload tier (`StoredLoads`).
"""

import time
from collections import Counter
from collections.abc import Iterable
from itertools import chain, count
from typing import Any

from vllm.logger import init_logger
from vllm.outputs import RequestError
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.request import RequestStatus

from . import payload as wire
from .blocks import (
    TransferredBlocks,
    blocks_given_up,
    summed_block_size,
    transferred_blocks,
)
from .checksum import (
    KVChecksumRecord,
    KVChecksumScheduled,
    Skipped,
    replica_checks,
)
from .offload import why_whole_blocks_differ
from .payload import (
    KV_TRANSFER_PARAMS_KEY,
    GroupChecksums,
    KVChecksumCarrier,
    KVChecksumPayload,
)
from .pending import NotComparable, Pending, PendingLoad
from .report import Reporter, client_error, remote_engine, request_name
from .stored_loads import StoredLoads, stores_checksums
from .verdict import LeftOut, LoadVerdict, LocalGroup, Unverified, judge

__all__ = ["KV_TRANSFER_PARAMS_KEY", "KVChecksumScheduler"]

logger = init_logger(__name__)

_SENT_STATUSES = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class KVChecksumScheduler:
    """The scheduler's part.

    Args:
        vllm_config: vLLM's configuration.
        connector: the scheduler-side KV connector.
        kv_cache_manager: where a request's blocks are looked up.
        kv_cache_config: the KV cache groups.
    """

    def __init__(
        self,
        vllm_config: Any,
        connector: Any,
        kv_cache_manager: Any,
        kv_cache_config: Any,
    ) -> None:
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        self.fail_closed: bool = transfer.kv_checksum_fail_closed
        self.recompute: bool = transfer.kv_load_failure_policy == "recompute"
        self.tp_size: int = parallel.tensor_parallel_size
        self.num_workers: int = self.tp_size * parallel.pipeline_parallel_size
        self.connector = connector
        self.kv_cache_manager = kv_cache_manager
        self.kv_cache_config = kv_cache_config
        groups = kv_cache_config.kv_cache_groups
        self._keeps_prefix = (
            self.recompute
            and len(groups) == 1
            and why_whole_blocks_differ(groups) is None
        )
        # Not from 1: no record of a scheduler before this one has such a number.
        self._seqs = count(time.time_ns())
        self._scheduled = KVChecksumScheduled()
        self._sends: dict[str, Pending] = {}
        self._recvs: dict[str, PendingLoad] = {}
        self._stats: Counter[str] = Counter()
        self._reporter = Reporter()
        self._skipped_groups: dict[int, str] = {}
        self._errors: dict[str, str] = {}
        self._stored: StoredLoads | None = None
        if stores_checksums(connector):
            _, hash_block_size = resolve_kv_cache_block_sizes(
                kv_cache_config, vllm_config
            )
            self._stored = StoredLoads(connector, kv_cache_config, hash_block_size)

    def _transferred(
        self, req_id: str, first_token: int, num_tokens: int
    ) -> TransferredBlocks:
        found = transferred_blocks(
            self.kv_cache_config,
            self.kv_cache_manager.get_block_ids(req_id),
            first_token,
            num_tokens,
        )
        for group_id in found.left_out:
            self._leave_out(req_id, group_id, LeftOut.MISSING_BLOCKS)
        return found

    def _leave_out(self, req_id: str, group_id: int, reason: LeftOut) -> None:
        self._stats[f"left_out:{reason.value}"] += 1
        self._reporter.warn_once(
            f"left_out:{reason.value}:{group_id}",
            "KV checksums leave out %sKV cache group %d: %s (first for request %s)",
            "a part of " if reason is LeftOut.PARTIAL_BLOCKS else "",
            group_id,
            reason.value,
            request_name(req_id),
        )

    # ---- schedule()

    def add_recv(self, request: Any, num_local_tokens: int, num_tokens: int) -> None:
        """An asynchronous load of tokens ``[num_local_tokens, num_tokens)`` starts."""
        carrier = self.connector.kv_checksum_carrier(request, True)
        if carrier is None and self._stored is not None:
            if self._stored.covers(request, num_tokens - num_local_tokens):
                carrier = KVChecksumCarrier.STORED
        if carrier is None:
            return
        req_id = request.request_id
        found = self._transferred(req_id, num_local_tokens, num_tokens)
        found.blocks.seq = next(self._seqs)
        if carrier is KVChecksumCarrier.STORED:
            found.blocks.stored = True
            self._scheduled.reqs_to_load[req_id] = found.blocks
        else:
            self._scheduled.reqs_to_recv[req_id] = found.blocks
        self._recvs[req_id] = PendingLoad(
            req_id,
            found.blocks,
            carrier,
            unaligned=found.unaligned,
            params=wire.transfer_params(request),
        )

    def add_send(self, request: Any) -> None:
        """The step being scheduled finishes the KV of `request`'s prompt."""
        carrier = self.connector.kv_checksum_carrier(request, False)
        if carrier is None:
            return
        req_id = request.request_id
        blocks = self._transferred(req_id, 0, request.num_prompt_tokens).blocks
        blocks.seq = next(self._seqs)
        self._scheduled.reqs_to_send[req_id] = blocks
        self._sends[req_id] = Pending(req_id, blocks, carrier)

    def after_schedule(self, output: Any, requests: dict[str, Any]) -> None:
        """Find the prompts that this step finishes and fill in the step's request.

        A request that was preempted while it decoded may resume behind its prompt, on
        other blocks of the same prefix, with the KV of another computation.
        """
        starting = {r.req_id for r in output.scheduled_new_reqs}
        for req_id, scheduled in output.num_scheduled_tokens.items():
            request = requests[req_id]
            computed = request.num_computed_tokens
            before = 0 if req_id in starting else computed - scheduled
            if before < request.num_prompt_tokens <= computed:
                self.add_send(request)
        output.kv_checksum_scheduled = self.build_checksum_meta()

    def build_checksum_meta(self) -> KVChecksumScheduled | None:
        """What the step asks of workers, or None for nothing; starts anew."""
        scheduled, self._scheduled = self._scheduled, KVChecksumScheduled()
        return scheduled or None

    # ---- update_from_output()

    def collect(self, output: Any) -> None:
        """Take the workers' records out of a `KVConnectorOutput` (None: no step)."""
        self._reporter.tick()
        if output is None or output.kv_checksums is None:
            return
        for record in output.kv_checksums.finalize():
            if not record.skipped_groups.keys() <= self._skipped_groups.keys():
                self._note_skipped(record)
            for req_id in record.checksums:
                for table in (self._sends, self._recvs):
                    pending = table.get(req_id)
                    if pending is not None:
                        pending.take(record)
            for req_id, data in record.received.items():
                load = self._recvs.get(req_id)
                # A copy that came through takes the place of one that did not.
                if load is not None and not load.received:
                    load.received = data

    def _note_skipped(self, record: KVChecksumRecord) -> None:
        self._skipped_groups = {**record.skipped_groups, **self._skipped_groups}
        kinds = Counter(map(Skipped.of, self._skipped_groups.values()))
        for kind, number in kinds.items():
            self._stats[f"skipped_groups:{kind.value}"] = number

    def verify(
        self,
        output: Any,
        requests: dict[str, Any],
        known_failed: Iterable[str] = (),
    ) -> dict[str, int]:
        """Judge the loads that finished; those that must fail.

        Args:
            output: the step's aggregated `KVConnectorOutput`, or None.
            requests: the scheduler's requests by id.
            known_failed: ids whose load is already known to have failed.

        Returns:
            By request id, how many of its first tokens need no recompute.
        """
        bad: dict[str, int] = {}
        if output is None or not self._recvs:
            return bad
        known_failed = {*known_failed, *(output.failed_recving or ())}
        for req_id in known_failed:
            load = self._recvs.pop(req_id, None)
            if load is not None and load.blocks.stored and req_id in requests:
                assert self._stored is not None
                self._stored.give_up(requests[req_id])
        for req_id in output.finished_recving or ():
            load = self._recvs.pop(req_id, None)
            request = requests.get(req_id)
            if (
                load is None
                or request is None
                or request.status != RequestStatus.WAITING_FOR_REMOTE_KVS
            ):
                continue
            verdict = self._judge(request, load)
            self._count(verdict, load)
            if verdict.outcome == "verified":
                continue
            source = remote_engine(load.params)
            if load.blocks.stored:
                source = f"store of {type(self.connector).__name__}"
            kept = self._kept_tokens(load, verdict)
            self._reporter.load(req_id, verdict, source, self._action(kept))
            if self.fail_closed:
                bad[req_id] = kept
                if not self.recompute:
                    self._errors[req_id] = client_error(verdict)
                if load.blocks.stored:
                    self._drop_stored(request, verdict)
        return bad

    def keep_verified(self, bad: dict[str, int], requests: dict[str, Any]) -> None:
        """Leave out of a recompute what `verify` found good.

        To be called once the scheduler has marked the loads as failed. It then
        caches a failed load's computed tokens alone, and computes on from there.
        """
        for req_id, kept in bad.items():
            if kept:
                requests[req_id].num_computed_tokens = kept

    def _kept_tokens(self, load: PendingLoad, verdict: LoadVerdict) -> int:
        """Tokens before the first bad block, where they may be kept, else 0."""
        if not self._keeps_prefix or verdict.reason is not None:
            return 0
        start, _ = load.blocks.groups[0]
        return verdict.good_blocks(0, start) * self._block_size(0)

    def _drop_stored(self, request: Any, verdict: LoadVerdict) -> None:
        # Not for loads that are served all the same: their blocks may be stored
        # again, and a bad block would then count as good.
        assert self._stored is not None
        dropped = self._stored.drop_mismatched(request, verdict)
        self._stats["stored_blocks_dropped"] += dropped
        self._stored.give_up(request)

    def name_errors(self, outputs: Any) -> None:
        """Give the outputs of requests that fail in this step their reason.

        Args:
            outputs: lists of `EngineCoreOutput`. In vLLM 0.32 they have no place for
                a reason; clients get a general error there.
        """
        errors, self._errors = self._errors, {}
        for output in chain.from_iterable(outputs) if errors else ():
            text = errors.get(output.request_id)
            if text is not None and hasattr(output, "error"):
                output.error = RequestError(code="kv_checksum", message=text)

    def request_finished(
        self, request: Any, params: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        """`request` ended: drop what is held for it, hand its payload to its carrier.

        Args:
            params: the ``kv_transfer_params`` of its answer, or None.

        Returns:
            `params`, with the payload where they carry it.
        """
        self._recvs.pop(request.request_id, None)
        send = self._sends.pop(request.request_id, None)
        if send is None or request.status not in _SENT_STATUSES:
            return params
        by_connector = send.carrier is KVChecksumCarrier.CONNECTOR
        if params is None and not by_connector:
            return params
        try:
            payload = self._payload(send)
        except NotComparable as error:
            self._reporter.warn_once(
                f"sent:{error.reason.value}",
                "KV checksums not sent: %s (first for request %s)",
                error.reason.value,
                request_name(request.request_id),
            )
            return params
        if by_connector:
            data = wire.encode(payload)
            self._stats["payload_bytes"] += len(data)
            self.connector.send_kv_checksums(request, data)
            return params
        text = wire.encode_text(payload)
        self._stats["payload_bytes"] += len(text)
        return {**(params or {}), KV_TRANSFER_PARAMS_KEY: text}

    # ---- adding up

    def _block_size(self, group_id: int) -> int:
        return summed_block_size(self.kv_cache_config, group_id)

    def _payload(self, send: Pending) -> KVChecksumPayload:
        send.check_reports(self.num_workers)
        skipped = send.skipped()
        given_up = blocks_given_up(
            self.kv_cache_config,
            lambda: self.kv_cache_manager.get_block_ids(send.req_id),
            send.blocks,
        )
        groups = {}
        for group_id, (start, _) in send.blocks.groups.items():
            if group_id in skipped:
                continue
            parts = send.parts(group_id)
            try:
                # Check 0 adds copy 0 of every layer.
                values = replica_checks(parts)[0]
            except ValueError:
                raise NotComparable(Unverified.REPLICA_MISSING) from None
            gone = given_up.get(group_id, 0)
            groups[group_id] = GroupChecksums(
                send.fingerprint(group_id),
                self._block_size(group_id),
                start + gone,
                values[gone:],
            )
        return KVChecksumPayload(send.blocks.num_tokens, self.tp_size, groups)

    def _local_group(self, load: PendingLoad, group_id: int) -> LocalGroup | Unverified:
        if group_id in load.unaligned:
            return Unverified.UNALIGNED_START
        try:
            checks = replica_checks(load.parts(group_id))
        except NotComparable as error:
            return error.reason
        except ValueError:
            return Unverified.REPLICA_MISSING
        return LocalGroup(
            load.fingerprint(group_id),
            self._block_size(group_id),
            load.blocks.groups[group_id][0],
            checks,
        )

    def _judge(self, request: Any, load: PendingLoad) -> LoadVerdict:
        req_id = request.request_id
        if self._stored is not None and load.blocks.stored:
            return self._judge_stored(request, load)
        try:
            payload = load.payload()
        except wire.PayloadVersionError:
            return LoadVerdict(unverified=Unverified.PAYLOAD_VERSION)
        except ValueError as error:
            name = request_name(req_id)
            logger.debug("KV checksum payload of request %s: %s", name, error)
            return LoadVerdict(unverified=Unverified.BAD_PAYLOAD)
        if payload is None:
            return LoadVerdict(unverified=Unverified.NO_PAYLOAD)
        try:
            load.check_reports(self.num_workers)
        except NotComparable as error:
            return LoadVerdict(unverified=error.reason)
        skipped = load.skipped()
        if payload.tp_size != self.tp_size:
            for group_id in load.equal_tp_groups() - skipped:
                self._leave_out(req_id, group_id, LeftOut.TP_SIZES)
                payload.groups.pop(group_id, None)
                skipped.add(group_id)
        local: dict[int, LocalGroup | Unverified | None] = {
            group_id: self._local_group(load, group_id)
            for group_id in load.blocks.groups
            if group_id not in skipped
        }
        verdict = judge(payload, local, load.blocks.num_tokens)
        for group_id, group in verdict.groups.items():
            if group.compared and group.compared < len(load.blocks.groups[group_id][1]):
                self._leave_out(req_id, group_id, LeftOut.PARTIAL_BLOCKS)
        return verdict

    def _judge_stored(self, request: Any, load: PendingLoad) -> LoadVerdict:
        assert self._stored is not None
        if load.unaligned:
            return LoadVerdict(unverified=Unverified.UNALIGNED_START)
        try:
            load.check_reports(self.num_workers)
        except NotComparable as error:
            return LoadVerdict(unverified=error.reason)
        records = list(load.records.values())
        return self._stored.judge(request, load.blocks, records)

    # ---- what is seen from outside

    def take_stats(self) -> dict[str, int] | None:
        """Counts since the last call, by `metrics` key, or None."""
        stats, self._stats = self._stats, Counter()
        return dict(stats) or None

    def _count(self, verdict: LoadVerdict, load: PendingLoad) -> None:
        outcome = verdict.outcome
        self._stats[f"loads:{outcome}:{load.carrier.value}"] += 1
        if outcome == "unverified" and verdict.reason is not None:
            self._stats[f"unverified:{verdict.reason.value}"] += 1
        self._stats["blocks_compared"] += verdict.num_compared
        self._stats["blocks_mismatched"] += verdict.num_mismatched
        if outcome != "verified" and self.fail_closed:
            self._stats["recomputed" if self.recompute else "failed"] += 1

    def _action(self, kept: int) -> str:
        if not self.fail_closed:
            return "served as loaded"
        return f"recomputing from token {kept}" if self.recompute else "request failed"
