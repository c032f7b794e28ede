# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Name what a connector can do wrong, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Fault(str, Enum):
    """What a connector does wrong (fixed set)."""

    RAISED = "raised"
    NOT_COVERED = "not_covered"
    NOTHING_LOADED = "nothing_loaded"
    NEVER_FINISHED = "never_finished"
    LOAD_FAILED = "load_failed"
    REPORTED_TWICE = "reported_twice"
    REPORTED_BEFORE_ARRIVAL = "reported_before_arrival"
    WRONG_BLOCKS = "wrong_blocks"
    OTHER_BLOCKS_WRITTEN = "other_blocks_written"
    VERDICT_LOST = "verdict_lost"
    OTHER_CARRIER = "other_carrier"
    CHECKSUMS_NOT_SENT = "checksums_not_sent"
    CHECKSUMS_LOST = "checksums_lost"
    CHECKSUMS_LATE = "checksums_late"
    CHECKSUMS_CHANGED = "checksums_changed"
    CHECKSUMS_OF_ANOTHER_REQUEST = "checksums_of_another_request"
    CHECKSUMS_OF_NO_LOAD = "checksums_of_no_load"
    STORED_CHECKSUMS_WRONG = "stored_checksums_wrong"
    DAMAGE_NOT_SEEN = "damage_not_seen"
    BAD_VALUES_KEPT = "bad_values_kept"
    LIMIT_IGNORED = "limit_ignored"
    NEEDS_BOTH_SIDES = "needs_both_sides"
    UNVERIFIED = "unverified"


ADVICE = {
    Fault.RAISED: "The connector, or vLLM behind it, must not raise here.",
    Fault.NOT_COVERED: (
        "Nobody checks its loads: override kv_checksum_carrier (P/D) or "
        "get_kv_checksum_sources (stored checksums), or let the ledger check them "
        "(kv_checksum_ledger_blocks, prefix caching)."
    ),
    Fault.NOTHING_LOADED: (
        "No token was loaded, so nothing can be said: look at "
        "get_num_new_matched_tokens, and at the factory's producer_params, "
        "consumer_params and wait_until_stored."
    ),
    Fault.NEVER_FINISHED: (
        "The worker side must name the request in finished_recving of "
        "get_transfer_results once its KV has arrived."
    ),
    Fault.LOAD_FAILED: "A load that nothing disturbs must not be reported as failed.",
    Fault.REPORTED_TWICE: (
        "Name a request in finished_recving once per load: vLLM does not expect it "
        "again."
    ),
    Fault.REPORTED_BEFORE_ARRIVAL: (
        "Name a request in finished_recving only when all of its KV lies in the cache: "
        "blocks are summed in the step that reports it."
    ),
    Fault.WRONG_BLOCKS: (
        "Map block to block by position: the consumer's blocks are those of "
        "update_state_after_alloc behind the tokens that it has already, the "
        "producer's those of request_finished, and the last one may be partly full."
    ),
    Fault.OTHER_BLOCKS_WRITTEN: (
        "Write to the blocks of the load alone: others belong to other requests."
    ),
    Fault.VERDICT_LOST: (
        "Report a load in finished_recving of the worker side, not from the scheduler "
        "side (update_connector_output): only workers can sum its blocks."
    ),
    Fault.OTHER_CARRIER: (
        "Loads are not compared by what the factory names as carrier: look at "
        "kv_checksum_carrier(request, receiving=True) or get_kv_checksum_sources."
    ),
    Fault.CHECKSUMS_NOT_SENT: (
        "The producer makes checksums if kv_checksum_carrier(request, receiving=False) "
        "names a carrier and the request ends normally. KV_TRANSFER_PARAMS also needs "
        "kv_transfer_params returned by request_finished."
    ),
    Fault.CHECKSUMS_LOST: (
        "The bytes of send_kv_checksums must come out of get_transfer_results on the "
        "consumer, under its own request id. With KV_TRANSFER_PARAMS, leave the "
        "request's kv_transfer_params as they are, keys that you do not know included."
    ),
    Fault.CHECKSUMS_LATE: (
        "Return checksums in the results that name the request in finished_recving, or "
        "before: once the load is reported, it is judged without them."
    ),
    Fault.CHECKSUMS_CHANGED: (
        "Checksums are opaque bytes of any length and value: they must arrive as they "
        "were sent. Zero bytes do not end them."
    ),
    Fault.CHECKSUMS_OF_ANOTHER_REQUEST: (
        "Keep checksums by the request (or transfer) that they are of, not by order."
    ),
    Fault.CHECKSUMS_OF_NO_LOAD: (
        "Return checksums only under ids of requests that this instance loads."
    ),
    Fault.STORED_CHECKSUMS_WRONG: (
        "The KV is right and its stored checksum is not. Call save_block_checksums "
        "behind the forward pass and before the blocks are read, move each entry of "
        "init_block_checksums with its block, and write it back before the load is "
        "reported."
    ),
    Fault.DAMAGE_NOT_SEEN: (
        "Damaged KV was verified: load the checksums that were made with the KV. Do "
        "not make them anew from what was stored or loaded."
    ),
    Fault.BAD_VALUES_KEPT: (
        "on_kv_checksum_failure names blocks by group and position: drop them, on "
        "every rank, before they are offered again."
    ),
    Fault.LIMIT_IGNORED: (
        "limit_matched_tokens must offer no more than max_num_new_tokens: what is "
        "behind was found bad."
    ),
    Fault.NEEDS_BOTH_SIDES: (
        "A side whose peer has KV checksums off must go on loading: make what carries "
        "checksums optional in your messages."
    ),
    Fault.UNVERIFIED: "The load could not be compared; the guide explains the reason.",
}
"""What to do about each."""


@dataclass
class Problem:
    """One thing that a connector does wrong.

    Attributes:
        fault: which, of a fixed set.
        detail: what exactly was seen, the first time.
        cases: the cases of the suite in which it was seen.

    """

    fault: Fault
    detail: str
    cases: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.fault.value

    def __str__(self) -> str:
        first, *others = self.cases
        more = f" and {len(others)} more cases" if others else ""
        return f"{self.name} ({first}{more}): {self.detail}. {ADVICE[self.fault]}"
