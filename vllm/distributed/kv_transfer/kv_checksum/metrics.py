# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Define the counters, their keys, and the Prometheus metrics made of them.

The scheduler counts into a flat ``dict[str, int]`` (keys such as
``loads:verified:kv_transfer_params``), which travels with vLLM's scheduler
statistics; `KVChecksumProm` turns it into metrics in the API server. Label values come
from fixed sets, but for the names of peers, of which the scheduler tells only a fixed
number (`Peers`). The keys are made here alone, and need no Prometheus.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_checksum.checksum import Skipped
from vllm.distributed.kv_transfer.kv_checksum.payload import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_checksum.verdict import LeftOut, Unverified

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge

VERDICTS = ("verified", "mismatch", "unverified")

OTHER_PROMPT = "other_prompt"
"""The verdict of a peer's load that held the KV of another prompt: a mismatch, of which
the host that sent it is not the cause."""

_PEER_LOADS = "peer_loads"
_SEPARATOR = "\t"
"""Stands in keys between label values that are not from a fixed set; none holds it."""

_NO_CARRIER = "none"
"""The carrier's label value for loads that bring no checksums."""

LOADS_STARTED = "loads_started"
LOADS_FAILED = "loads_failed"
LOADS_ABORTED = "loads_aborted"
BLOCKS_COMPARED = "blocks_compared"
BLOCKS_MISMATCHED = "blocks_mismatched"
OTHER_PROMPTS = "other_prompts"
PROMPTS_NOT_BOUND = "prompts_not_bound"
REPLICAS_DIFFER = "replicas_differ"
FAILED = "failed"
RECOMPUTED = "recomputed"
STORED_BLOCKS_DROPPED = "stored_blocks_dropped"
PAYLOAD_BYTES = "payload_bytes"
LEDGER_MISSES = "ledger_misses"
LEDGER_ENTRIES = "ledger_entries"
LEDGER_BYTES = "ledger_bytes"
QUARANTINED_PEERS = "quarantined_peers"

_PLAIN = {
    LOADS_STARTED: "KV loads started.",
    LOADS_FAILED: "KV loads that their connector reported as failed.",
    LOADS_ABORTED: "KV loads whose request ended before they were judged.",
    BLOCKS_COMPARED: "KV blocks compared with their producer's checksums.",
    BLOCKS_MISMATCHED: "KV blocks that differed from their producer's checksums.",
    OTHER_PROMPTS: "KV loads that held the KV of another prompt.",
    PROMPTS_NOT_BOUND: "KV loads compared of which it is not known of what prompt.",
    REPLICAS_DIFFER: "Finished prefills whose KV differs between TP ranks.",
    FAILED: "Requests failed because of KV checksums.",
    RECOMPUTED: "Requests recomputed because of KV checksums.",
    STORED_BLOCKS_DROPPED: "Stored KV blocks dropped because they differ.",
    PAYLOAD_BYTES: "Bytes of KV checksum payloads sent.",
    LEDGER_MISSES: "Loaded KV blocks whose sums were not in the ledger.",
}
"""Counters without labels of their own: their documentation by key. The metric is
called ``vllm:kv_checksum_`` and the key."""


_PLAIN_GAUGES = {
    LEDGER_ENTRIES: "Sums of KV blocks that the ledger holds.",
    LEDGER_BYTES: "Bytes of host memory that the ledger takes.",
    QUARANTINED_PEERS: "Engines from which no KV is loaded at present, as it differed.",
}
"""Gauges without labels of their own: their documentation by key."""


def loads_key(verdict: str, carrier: KVChecksumCarrier | None) -> str:
    """Return the key that counts loads of a verdict (one of `VERDICTS`).

    Args:
        verdict: how the loads were judged.
        carrier: the carrier of their checksums; None if they bring none.

    """
    return f"loads:{verdict}:{carrier_label(carrier)}"


def unverified_key(reason: Unverified) -> str:
    """Return the key that counts loads not verified for `reason`."""
    return f"unverified:{reason.value}"


def unsent_key(reason: Unverified) -> str:
    """Return the key that counts finished requests not sent for `reason`."""
    return f"unsent:{reason.value}"


def left_out_key(reason: LeftOut) -> str:
    """Return the key that counts groups left out of a request for `reason`."""
    return f"left_out:{reason.value}"


def skipped_groups_key(category: Skipped) -> str:
    """Return the key of the number of groups skipped for a category of reasons."""
    return f"skipped_groups:{category.value}"


def peer_loads_key(verdict: str, engine: str, host: str) -> str:
    """Return the key that counts loads of a verdict that came from a peer.

    Args:
        verdict: "mismatch", "unverified" or `OTHER_PROMPT`.
        engine: the peer's engine id, printable.
        host: its host, printable.

    """
    return _SEPARATOR.join((_PEER_LOADS, verdict, engine, host))


def carrier_label(carrier: KVChecksumCarrier | None) -> str:
    """Return the label of a carrier; None stands for loads that bring no checksums."""
    return _NO_CARRIER if carrier is None else carrier.value


class KVChecksumProm:
    """The metrics of one API server: adds up the counts of its engines.

    Args:
        counter_cls, gauge_cls: the Prometheus classes of the logger.
        labelnames: the logger's label names.
        per_engine_labelvalues: label values by engine index.

    """

    def __init__(
        self,
        counter_cls: type[Counter],
        gauge_cls: type[Gauge],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        loads = counter_cls(
            name="vllm:kv_checksum_loads",
            documentation="KV loads by checksum verdict and carrier.",
            labelnames=[*labelnames, "verdict", "carrier"],
        )
        unverified = counter_cls(
            name="vllm:kv_checksum_unverified_loads",
            documentation="KV loads whose checksums could not be compared, by reason.",
            labelnames=[*labelnames, "reason"],
        )
        unsent = counter_cls(
            name="vllm:kv_checksum_unsent",
            documentation="Finished prefills whose checksums were not sent, by reason.",
            labelnames=[*labelnames, "reason"],
        )
        left_out = counter_cls(
            name="vllm:kv_checksum_groups_left_out",
            documentation=(
                "KV cache groups left out of a request's checksums, by reason."
            ),
            labelnames=[*labelnames, "reason"],
        )
        skipped = gauge_cls(
            name="vllm:kv_checksum_skipped_groups",
            documentation="KV cache groups that this engine does not checksum, by "
            "reason.",
            multiprocess_mode="mostrecent",
            labelnames=[*labelnames, "reason"],
        )
        plain = {
            key: counter_cls(
                name=f"vllm:kv_checksum_{key}",
                documentation=text,
                labelnames=labelnames,
            )
            for key, text in _PLAIN.items()
        }
        plain_gauges = {
            key: gauge_cls(
                name=f"vllm:kv_checksum_{key}",
                documentation=text,
                multiprocess_mode="mostrecent",
                labelnames=labelnames,
            )
            for key, text in _PLAIN_GAUGES.items()
        }
        self._peer_loads = counter_cls(
            name="vllm:kv_checksum_peer_loads",
            documentation="KV loads that were not verified, by the engine that sent "
            "them.",
            labelnames=[*labelnames, "verdict", "peer_engine", "peer_host"],
        )
        self._labelvalues = per_engine_labelvalues
        self._counters: dict[tuple[int, str], Counter] = {}
        self._gauges: dict[tuple[int, str], Gauge] = {}
        for index, values in per_engine_labelvalues.items():
            for verdict in VERDICTS:
                for carrier in (*KVChecksumCarrier, None):
                    self._counters[index, loads_key(verdict, carrier)] = loads.labels(
                        *values, verdict, carrier_label(carrier)
                    )
            for reason in Unverified:
                self._counters[index, unverified_key(reason)] = unverified.labels(
                    *values, reason.value
                )
                self._counters[index, unsent_key(reason)] = unsent.labels(
                    *values, reason.value
                )
            for why in LeftOut:
                self._counters[index, left_out_key(why)] = left_out.labels(
                    *values, why.value
                )
            for category in Skipped:
                gauge = self._gauges[index, skipped_groups_key(category)] = (
                    skipped.labels(*values, category.value)
                )
                gauge.set(0)
            for key, counter in plain.items():
                self._counters[index, key] = counter.labels(*values)
            for key, one in plain_gauges.items():
                self._gauges[index, key] = one.labels(*values)
                self._gauges[index, key].set(0)

    def observe(self, stats: dict[str, int], engine_index: int) -> None:
        """Add the counts of one step; a gauge is set to its number.

        Args:
            stats: counts by key.
            engine_index: the engine that counted them.

        """
        for key, number in stats.items():
            gauge = self._gauges.get((engine_index, key))
            if gauge is not None:
                gauge.set(number)
            else:
                self._counter(engine_index, key).inc(number)

    def _counter(self, engine_index: int, key: str) -> Counter:
        """Return the counter of a key; that of a new peer is made now."""
        counter = self._counters.get((engine_index, key))
        if counter is None:
            _, *labels = key.split(_SEPARATOR)
            counter = self._peer_loads.labels(*self._labelvalues[engine_index], *labels)
            self._counters[engine_index, key] = counter
        return counter
