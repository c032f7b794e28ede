# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Count and log the KV cache groups, or parts of them, that checksums leave out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_checksum import metrics
from vllm.distributed.kv_transfer.kv_checksum.naming import request_name
from vllm.distributed.kv_transfer.kv_checksum.scheduler.report import Reporter
from vllm.distributed.kv_transfer.kv_checksum.verdict import LeftOut


@dataclass
class LeftOutGroups:
    """Counts what is left out of sends and loads.

    Attributes:
        stats: counts by key of `metrics`.
        reporter: logs.

    """

    stats: Counter[str]
    reporter: Reporter

    def add(self, req_id: str, group_id: int, reason: LeftOut) -> None:
        """Count a group, or a part of it, that is left out; log each reason once."""
        self.stats[metrics.left_out_key(reason)] += 1
        self.reporter.warn_once(
            f"left_out:{reason.value}:{group_id}",
            "KV checksums leave out %sKV cache group %d: %s (first for request %s)",
            "a part of " if reason is LeftOut.PARTIAL_BLOCKS else "",
            group_id,
            reason.value,
            request_name(req_id),
        )
