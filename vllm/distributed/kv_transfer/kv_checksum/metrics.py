# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Prometheus metrics. Label values come from fixed sets.

The scheduler counts into a flat ``dict[str, int]`` (keys such as
``loads:verified:kv_transfer_params``), which travels with vLLM's scheduler
statistics; this module turns it into metrics in the API server.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_checksum.checksum import Skipped
from vllm.distributed.kv_transfer.kv_checksum.payload import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_checksum.verdict import LeftOut, Unverified

VERDICTS = ("verified", "mismatch", "unverified")

NO_CARRIER = "none"
"""In place of the carrier of loads that bring no checksums."""

_CARRIERS = (*(carrier.value for carrier in KVChecksumCarrier), NO_CARRIER)

_PLAIN = {
    "loads_started": "KV loads started.",
    "loads_failed": "KV loads that their connector reported as failed.",
    "loads_aborted": "KV loads whose request ended before they were judged.",
    "blocks_compared": "KV blocks compared with their producer's checksums.",
    "blocks_mismatched": "KV blocks that differed from their producer's checksums.",
    "other_prompts": "KV loads that held the KV of another prompt.",
    "prompts_not_bound": "KV loads compared of which it is not known of what prompt.",
    "replicas_differ": "Finished prefills whose KV differs between TP ranks.",
    "failed": "Requests failed because of KV checksums.",
    "recomputed": "Requests recomputed because of KV checksums.",
    "stored_blocks_dropped": "Stored KV blocks dropped because they differ.",
    "payload_bytes": "Bytes of KV checksum payloads sent.",
}


class KVChecksumProm:
    """The metrics of one API server.

    Args:
        counter_cls, gauge_cls: the Prometheus classes of the logger.
        labelnames: the logger's label names.
        per_engine_labelvalues: label values by engine index.

    """

    def __init__(
        self,
        counter_cls: Any,
        gauge_cls: Any,
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
        self._counters: dict[tuple[int, str], Any] = {}
        self._gauges: dict[tuple[int, str], Any] = {}
        for index, values in per_engine_labelvalues.items():
            for verdict in VERDICTS:
                for carrier in _CARRIERS:
                    self._counters[index, f"loads:{verdict}:{carrier}"] = loads.labels(
                        *values, verdict, carrier
                    )
            for reason in Unverified:
                self._counters[index, f"unverified:{reason.value}"] = unverified.labels(
                    *values, reason.value
                )
                self._counters[index, f"unsent:{reason.value}"] = unsent.labels(
                    *values, reason.value
                )
            for why in LeftOut:
                self._counters[index, f"left_out:{why.value}"] = left_out.labels(
                    *values, why.value
                )
            for kind in Skipped:
                gauge = self._gauges[index, f"skipped_groups:{kind.value}"] = (
                    skipped.labels(*values, kind.value)
                )
                gauge.set(0)
            for key, counter in plain.items():
                self._counters[index, key] = counter.labels(*values)

    def observe(self, stats: dict[str, int], engine_index: int) -> None:
        """Add one step's counts; a gauge takes its number as it is."""
        for key, number in stats.items():
            gauge = self._gauges.get((engine_index, key))
            if gauge is not None:
                gauge.set(number)
            else:
                self._counters[engine_index, key].inc(number)
