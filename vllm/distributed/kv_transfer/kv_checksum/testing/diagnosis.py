# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tell from what was seen of a load what its connector does wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_checksum import metrics
from vllm.distributed.kv_transfer.kv_checksum.payload import (
    KV_TRANSFER_PARAMS_KEY,
    KVChecksumCarrier,
)
from vllm.distributed.kv_transfer.kv_checksum.testing.problems import Fault
from vllm.distributed.kv_transfer.kv_checksum.verdict import Unverified

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_checksum.testing.instance import Instance

Finding = tuple[Fault, str]
"""A fault, and what exactly was seen."""

_NO_CARRIER = (Unverified.NO_CARRIER, Unverified.SYNC_LOAD, Unverified.FROM_DECODE)


@dataclass(frozen=True)
class Load:
    """One load: the consumer's request, and the producer's that it loads.

    Attributes:
        req_id: the consumer's request.
        producer_id: the producer's; None if nothing is sent for a single request.
        p: the instance that computed the prompt.
        d: the instance that loads.

    """

    req_id: str
    producer_id: str | None
    p: Instance
    d: Instance


def look_at_load(load: Load) -> list[Finding]:
    """Return what is wrong with a load's blocks and reports, whatever its verdict."""
    req_id, seen = load.req_id, load.d.seen
    if not seen.loaded.get(req_id):
        return [(Fault.NOTHING_LOADED, f"request {req_id} computed all of its tokens")]
    found = []
    if req_id in seen.failed:
        found.append((Fault.LOAD_FAILED, f"the load of {req_id} was reported failed"))
    reports = seen.reported.get(req_id, [])
    if len(reports) > 1:
        found.append(
            (Fault.REPORTED_TWICE, f"{req_id} was reported in steps {reports}")
        )
    early = seen.wrong_at_report.get(req_id, [])
    wrong = seen.wrong_at_use.get(req_id, [])
    if wrong:
        text = f"blocks at positions {wrong} of {req_id} do not hold its KV"
        found.append((Fault.WRONG_BLOCKS, text))
    elif early:
        text = f"blocks at positions {early} of {req_id} arrived behind the report"
        found.append((Fault.REPORTED_BEFORE_ARRIVAL, text))
    if written := seen.written.get(req_id):
        text = f"the load of {req_id} changed blocks {written}, which are not its own"
        found.append((Fault.OTHER_BLOCKS_WRITTEN, text))
    return found


def look_at_verdict(load: Load, carrier: KVChecksumCarrier) -> list[Finding]:
    """Return what is wrong with the verdict of the one load that was counted."""
    stats, req_id = load.d.stats, load.req_id
    if req_id in load.d.seen.failed:
        return []  # a failed load has none, which is told
    verdicts = {
        (outcome, by)
        for outcome in metrics.VERDICTS
        for by in (*KVChecksumCarrier, None)
        if stats[metrics.loads_key(outcome, by)]
    }
    if not verdicts:
        return [(Fault.VERDICT_LOST, f"the load of {req_id} ended without a verdict")]
    ((outcome, by),) = verdicts
    reason = next((r for r in Unverified if stats[metrics.unverified_key(r)]), None)
    if by is not carrier or reason in _NO_CARRIER:
        compared = "nothing" if by is None else by.value
        text = f"{req_id} was compared with {compared}, not with {carrier.value}"
        return [(Fault.OTHER_CARRIER, text)]
    if outcome == "verified":
        return []
    if load.d.seen.wrong_at_report.get(req_id) or load.d.seen.wrong_at_use.get(req_id):
        return []  # its blocks are wrong, which is told
    if carrier is KVChecksumCarrier.STORED:
        text = f"{req_id} holds its own KV, and was called {outcome} ({reason})"
        return [(Fault.STORED_CHECKSUMS_WRONG, text)]
    if carrier is not KVChecksumCarrier.LEDGER and (
        found := look_at_checksums(load, carrier)
    ):
        return found
    named = outcome if reason is None else reason.value
    return [(Fault.UNVERIFIED, f"{req_id} holds its own KV, and was called {named}")]


def look_at_checksums(load: Load, carrier: KVChecksumCarrier) -> list[Finding]:
    """Return what became of a load's checksums between producer and consumer."""
    p, d, req_id = load.p, load.d, load.req_id
    if carrier is KVChecksumCarrier.KV_TRANSFER_PARAMS:
        answer = p.answers.get(load.producer_id or "")
        if KV_TRANSFER_PARAMS_KEY in (answer or {}):
            text = (
                f"the answer of {load.producer_id} has them, the load of {req_id} not"
            )
            return [(Fault.CHECKSUMS_LOST, text)]
        params = "no kv_transfer_params" if answer is None else f"only {sorted(answer)}"
        text = f"the answer of {load.producer_id} has {params}"
        return [(Fault.CHECKSUMS_NOT_SENT, text)]
    sent = p.sent.get(load.producer_id or "")
    if sent is None:
        text = f"none were asked for the producer's request {load.producer_id}"
        return [(Fault.CHECKSUMS_NOT_SENT, text)]
    got = [(step, data) for step, r, data in d.seen.received if r == req_id]
    if not got:
        return [(Fault.CHECKSUMS_LOST, f"those of {req_id} never arrived")]
    step, data = got[0]
    if data != sent:
        if data in p.sent.values():
            text = f"{req_id} got those of another request"
            return [(Fault.CHECKSUMS_OF_ANOTHER_REQUEST, text)]
        text = f"{len(sent)} bytes were sent for {req_id}, {len(data)} others arrived"
        return [(Fault.CHECKSUMS_CHANGED, text)]
    reported = min(d.seen.reported.get(req_id, [step]))
    if step > reported:
        text = f"{req_id} was reported in step {reported}, its checksums in {step}"
        return [(Fault.CHECKSUMS_LATE, text)]
    return []


def look_for_strangers(d: Instance) -> list[Finding]:
    """Return checksums that came for requests that an instance does not load."""
    others = {r for _, r, _ in d.seen.received} - d.seen.loaded.keys()
    return [
        (Fault.CHECKSUMS_OF_NO_LOAD, f"they came for {r}, which is not loaded here")
        for r in sorted(others)
    ]
