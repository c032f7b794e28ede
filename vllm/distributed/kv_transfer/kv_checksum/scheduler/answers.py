# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sum what a decode instance computed, and hold its answers back until it is summed.

With NIXL pull's bidirectional transfer, a decode instance keeps the blocks of a
finished request, and its answer tells the prefill instance to load them in the next
turn, up to the last computed token. Which token is the last is known only when it has
been sampled, so the blocks are summed once: in the first step that is scheduled after
the request has ended. They are pinned, and every step that writes them was scheduled
before. The request's last output waits for that step, so that the payload leaves with
it. If the step never ends (vLLM's fault tolerance drops steps), the output leaves
without one. Steps in which no such request ends or waits do nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_checksum.checksum import (
    KVChecksumBlocks,
    KVChecksumScheduled,
)
from vllm.distributed.kv_transfer.kv_checksum.payload import KV_TRANSFER_PARAMS_KEY
from vllm.distributed.kv_transfer.kv_checksum.scheduler.pending import PendingSend

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.request import Request

MAX_STEPS = 256
"""Steps that may end before the one that sums an answer; far fewer are under way."""

_PREFIX = "\0answer "
"""Begins the names under which workers report the sums; no request id begins so."""


def is_to_be_loaded_back(params: Mapping[str, Any] | None) -> bool:
    """Tell whether the parameters of an answer offer decoded KV to a prefill instance.

    Args:
        params: the ``kv_transfer_params`` of the answer, or None.

    """
    return bool(
        params and params.get("do_remote_decode") and params.get("remote_block_ids")
    )


@dataclass(kw_only=True)
class PendingAnswer(PendingSend):
    """An answer whose KV is being summed.

    Attributes:
        request: the request, which has ended.
        rows: its block ids when it ended, per KV cache group.
        last_step: the number of the step with which it leaves in any case.
        output: its last output, once that is held back.

    """

    request: Request
    rows: Sequence[Sequence[int]]
    last_step: int
    output: EngineCoreOutput | None = None

    def held(self) -> Sequence[Sequence[int]]:
        """Return the blocks that the request held when it ended."""
        return self.rows

    def add_payload(self, text: str) -> None:
        """Add the payload to the ``kv_transfer_params`` of the answer."""
        if self.output is not None:
            params = self.output.kv_transfer_params or {}
            self.output.kv_transfer_params = {**params, KV_TRANSFER_PARAMS_KEY: text}


class PendingAnswers:
    """The answers of an instance that wait for their sums.

    Attributes:
        by_name: those that workers are asked to sum, by the name under which they
            report.

    """

    def __init__(self) -> None:
        self.by_name: dict[str, PendingAnswer] = {}
        # Steps that ended while answers waited.
        self._num_steps = 0
        # Those that ended in the present step: their outputs are still to be held.
        self._ended: dict[str, PendingAnswer] = {}
        # Those whose outputs leave with the present step.
        self._ready: list[PendingAnswer] = []

    def start(
        self,
        request: Request,
        blocks: KVChecksumBlocks,
        rows: Sequence[Sequence[int]],
        scheduled: KVChecksumScheduled,
    ) -> None:
        """Have the next step sum the blocks of a request that has just ended."""
        name = f"{_PREFIX}{blocks.seq} {request.request_id}"
        answer = PendingAnswer(
            name,
            blocks,
            request=request,
            rows=rows,
            last_step=self._num_steps + MAX_STEPS,
        )
        self.by_name[name] = self._ended[request.request_id] = answer
        scheduled.reqs_to_send[name] = blocks

    def take_summed(self, scheduled: KVChecksumScheduled | None) -> list[PendingAnswer]:
        """Return the answers that a step has summed; they leave with its outputs.

        So does the oldest one if the step that was to sum it was dropped. Call this for
        each step that ends while answers wait.

        Args:
            scheduled: what the step was asked to sum; None for nothing.

        """
        asked = scheduled.reqs_to_send.keys() if scheduled is not None else ()
        found = [self.by_name.pop(name) for name in self.by_name.keys() & asked]
        self._num_steps += 1
        oldest = next(iter(self.by_name.values()), None)
        if oldest is not None and oldest.last_step <= self._num_steps:
            found.append(self.by_name.pop(oldest.req_id))
        self._ready += found
        return found

    def exchange(self, outputs: MutableMapping[int, list[EngineCoreOutput]]) -> None:
        """Hold back the last outputs of requests that ended in this step.

        Those of which the sums have come take their places.

        Args:
            outputs: the outputs of the step, by client.

        """
        if not (self._ended or self._ready):
            return
        ended, self._ended = self._ended, {}
        for client in {answer.request.client_index for answer in ended.values()}:
            kept = []
            for output in outputs.pop(client, ()):
                answer = ended.get(output.request_id)
                if answer is None or output.kv_transfer_params is None:
                    kept.append(output)
                else:
                    answer.output = output
            if kept:
                outputs[client] = kept
        ready, self._ready = self._ready, []
        for answer in ready:
            if answer.output is not None:
                outputs.setdefault(answer.request.client_index, []).append(
                    answer.output
                )
