# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ask for the sums of what this instance sends, and make payloads of them.

The step that finishes a prompt's KV asks the workers to sum it. When the request ends,
their parts become a payload, which goes to its carrier. What a decode instance keeps to
be loaded back is summed when its request has ended (`PendingAnswers`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_checksum import metrics
from vllm.distributed.kv_transfer.kv_checksum import payload as wire
from vllm.distributed.kv_transfer.kv_checksum.checksum import (
    KVChecksumBlocks,
    KVChecksumScheduled,
)
from vllm.distributed.kv_transfer.kv_checksum.naming import request_name
from vllm.distributed.kv_transfer.kv_checksum.payload import (
    KV_TRANSFER_PARAMS_KEY,
    KVChecksumCarrier,
    KVChecksumPayload,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.answers import (
    PendingAnswers,
    is_to_be_loaded_back,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.blocks import sent_blocks
from vllm.distributed.kv_transfer.kv_checksum.scheduler.comparison import Comparison
from vllm.distributed.kv_transfer.kv_checksum.scheduler.left_out import LeftOutGroups
from vllm.distributed.kv_transfer.kv_checksum.scheduler.pending import (
    NotComparable,
    PendingSend,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.report import Reporter
from vllm.distributed.kv_transfer.kv_checksum.verdict import LeftOut
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger(__name__)

_SENT_STATUSES = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass
class Sends:
    """Follows what this instance sends until it is handed to its carrier.

    Attributes:
        connector: the scheduler-side KV connector.
        kv_cache_manager: the manager that knows a request's blocks.
        kv_cache_config: the KV cache groups.
        comparison: adds up the workers' sums.
        left_out: counts groups that are left out.
        reporter: logs.
        stats: counts by key of `metrics`.
        seqs: the numbers of sends and loads.
        unsummed: requests to be sent whose prompts are not fully computed yet.
        pending: the sends whose sums are awaited, or that wait for their requests.
        answers: of requests that were decoded here, and that are loaded back.

    """

    connector: KVConnectorBase_V1
    kv_cache_manager: KVCacheManager
    kv_cache_config: KVCacheConfig
    comparison: Comparison
    left_out: LeftOutGroups
    reporter: Reporter
    stats: Counter[str]
    seqs: Iterator[int]
    unsummed: set[str] = field(default_factory=set)
    pending: dict[str, PendingSend] = field(default_factory=dict)
    answers: PendingAnswers = field(default_factory=PendingAnswers)

    def note_started(self, request: Request) -> None:
        """Note a request that starts in the step that is scheduled."""
        if self.connector.kv_checksum_carrier(request, receiving=False) is not None:
            self.unsummed.add(request.request_id)

    def ask_for_finished(
        self,
        output: SchedulerOutput,
        requests: Mapping[str, Request],
        scheduled: KVChecksumScheduled,
    ) -> None:
        """Ask for the sums of the prompts whose KV a step finishes."""
        for req_id in self.unsummed & output.num_scheduled_tokens.keys():
            request = requests[req_id]
            if request.num_prompt_tokens <= request.num_computed_tokens:
                self.unsummed.discard(req_id)
                self.add(request, scheduled)

    def add(self, request: Request, scheduled: KVChecksumScheduled) -> None:
        """Ask for the sums of a prompt whose KV the step being scheduled finishes."""
        req_id = request.request_id
        rows = self.kv_cache_manager.get_block_ids(req_id)
        blocks = self._blocks(request, rows, request.num_prompt_tokens)
        scheduled.reqs_to_send[req_id] = blocks
        self.pending[req_id] = PendingSend(req_id, blocks)

    def _blocks(
        self, request: Request, rows: Sequence[Sequence[int]], num_tokens: int
    ) -> KVChecksumBlocks:
        """Return the blocks of a send, numbered; what is left out is logged."""
        found = sent_blocks(self.kv_cache_config, rows, num_tokens)
        for group_id in found.left_out:
            self.left_out.add(request.request_id, group_id, LeftOut.MISSING_BLOCKS)
        found.blocks.seq = next(self.seqs)
        return found.blocks

    def finish(
        self,
        request: Request,
        params: dict[str, Any] | None,
        scheduled: KVChecksumScheduled,
    ) -> dict[str, Any] | None:
        """Give the payload of a request that ended to its carrier.

        Args:
            request: the request that ended.
            params: the ``kv_transfer_params`` of its answer, or None.
            scheduled: what the next step asks workers to sum.

        Returns:
            `params`, with the payload where they carry it.

        """
        req_id = request.request_id
        self.unsummed.discard(req_id)
        send = self.pending.pop(req_id, None)
        if request.status not in _SENT_STATUSES:
            return params
        if is_to_be_loaded_back(params):
            self._start_answer(request, scheduled)
            return params
        carrier = self.connector.kv_checksum_carrier(request, receiving=False)
        by_connector = carrier is KVChecksumCarrier.CONNECTOR
        if carrier is None or (params is None and not by_connector):
            return params
        payload = self._make_payload(
            request, send, lambda: self.kv_cache_manager.get_block_ids(req_id)
        )
        if payload is None:
            return params
        if by_connector:
            data = wire.encode(payload)
            self.stats[metrics.PAYLOAD_BYTES] += len(data)
            self.connector.send_kv_checksums(request, data)
            return params
        return {**(params or {}), KV_TRANSFER_PARAMS_KEY: self._encode_text(payload)}

    def _start_answer(self, request: Request, scheduled: KVChecksumScheduled) -> None:
        """Have the next step sum what was computed of a request that is loaded back.

        What speculation or asynchronous scheduling has computed behind the request's
        last token is of no token that the next turn knows.
        """
        rows = self.kv_cache_manager.get_block_ids(request.request_id)
        tokens = min(request.num_computed_tokens, request.num_tokens)
        blocks = self._blocks(request, rows, tokens)
        self.answers.start(request, blocks, rows, scheduled)

    def add_payloads_to_answers(self, scheduled: KVChecksumScheduled | None) -> None:
        """Give the answers that a step has summed their payloads."""
        for answer in self.answers.take_summed(scheduled):
            payload = self._make_payload(answer.request, answer, answer.held)
            if payload is not None:
                answer.add_payload(self._encode_text(payload))

    def _encode_text(self, payload: KVChecksumPayload) -> str:
        """Encode a payload for ``kv_transfer_params``, and count its bytes."""
        text = wire.encode_text(payload)
        self.stats[metrics.PAYLOAD_BYTES] += len(text)
        return text

    def _make_payload(
        self,
        request: Request,
        send: PendingSend | None,
        rows: Callable[[], Sequence[Sequence[int]]],
    ) -> KVChecksumPayload | None:
        """Make the payload of a request that ended.

        Return None, counted and logged, if the workers' sums do not add up. The
        arguments are those of `Comparison.make_payload`.
        """
        try:
            payload = self.comparison.make_payload(request, send, rows)
        except NotComparable as error:
            self.stats[metrics.unsent_key(error.reason)] += 1
            logger.debug(
                "KV checksums of request %s not sent: %s (%s)",
                request_name(request.request_id),
                error.reason.value,
                error.detail,
            )
            self.reporter.warn_once(
                f"sent:{error.reason.value}",
                "KV checksums not sent: %s (first for request %s)",
                error.reason.value,
                request_name(request.request_id),
            )
            return None
        self._log_copies_differ(request.request_id, payload)
        return payload

    def _log_copies_differ(self, req_id: str, payload: KVChecksumPayload) -> None:
        """Count and log that TP ranks hold other bits of one KV; each may be right."""
        differ = [i for i, group in payload.groups.items() if group.copies is not None]
        if not differ:
            return
        self.stats[metrics.REPLICAS_DIFFER] += 1
        self.reporter.warn_once(
            "replicas",
            "KV checksums: replicas of KV cache groups %s differ between TP ranks here "
            "(first for request %s); consumers accept each",
            differ,
            request_name(req_id),
        )
