# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tell a request's OpenTelemetry span what came of the request's loads.

The scheduler notes each verdict, and the output with which the request ends carries
them to the API server, which makes the span. All of it is off without tracing.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_checksum.verdict import LoadVerdict

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput

VERDICT = "vllm.kv_checksum.verdict"
CARRIER = "vllm.kv_checksum.carrier"
BLOCKS_COMPARED = "vllm.kv_checksum.blocks_compared"
BLOCKS_MISMATCHED = "vllm.kv_checksum.blocks_mismatched"
UNVERIFIED_REASON = "vllm.kv_checksum.unverified_reason"

Attributes = dict[str, str | int]

_WORSE = ("verified", "unverified", "mismatch")


class LoadTraces:
    """Keeps the span attributes of requests until they end."""

    def __init__(self) -> None:
        self._live: dict[str, Attributes] = {}
        self._ended: dict[str, Attributes] = {}

    def __len__(self) -> int:
        return len(self._live) + len(self._ended)

    def note(self, req_id: str, verdict: LoadVerdict, carrier: str) -> None:
        """Add a load that was judged to the attributes of its request.

        Of several loads, blocks add up, and the worst one gives its verdict.
        """
        known = self._live.get(req_id, {})
        outcome = verdict.outcome
        told = known.copy()
        if not known or _WORSE.index(outcome) > _WORSE.index(str(known[VERDICT])):
            told |= {VERDICT: outcome, CARRIER: carrier}
            told.pop(UNVERIFIED_REASON, None)
            if outcome == "unverified" and verdict.reason is not None:
                told[UNVERIFIED_REASON] = verdict.reason.value
        for key, number in (
            (BLOCKS_COMPARED, verdict.num_compared),
            (BLOCKS_MISMATCHED, verdict.num_mismatched),
        ):
            told[key] = int(known.get(key, 0)) + number
        self._live[req_id] = told

    def end(self, req_id: str) -> None:
        """Note that a request has ended; its output may follow in this step."""
        attributes = self._live.pop(req_id, None)
        if attributes is not None:
            self._ended[req_id] = attributes

    def attach(self, outputs: Iterable[Iterable[EngineCoreOutput]]) -> None:
        """Attach the attributes of requests that end in a step to its outputs.

        Args:
            outputs: the step's outputs, by client.

        """
        if not self._ended:
            return
        ended, self._ended = self._ended, {}
        for output in chain.from_iterable(outputs):
            if (attributes := ended.get(output.request_id)) is not None:
                output.kv_checksum_trace = attributes
