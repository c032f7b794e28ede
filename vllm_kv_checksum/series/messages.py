"""Add fields that carry KV checksums between scheduler and workers.

The scheduler's step asks for sums, the workers' records ride `KVConnectorOutput` and are
concatenated over workers, counts travel with the scheduler's statistics. All are None
when checksums are off.
"""

from ..edits import Module, assign

output = Module("v1/core/sched/output.py")
with output.cls("SchedulerOutput") as c:
    c.after(
        assign("kv_connector_metadata"),
        """
        # KVChecksumScheduled | None: KV checksums that this step asks of workers.
        kv_checksum_scheduled: Any = None
        """,
    )
output.imports("from typing import Any")

outputs = Module("v1/outputs.py")
outputs.imports("from typing import Any")
with outputs.cls("KVConnectorOutput") as c:
    c.after(
        "expected_finished_count: int = 0",
        """
        # KVChecksumOutput | None: KV checksums summed in this step.
        kv_checksums: Any = None
        """,
    )
with outputs.function("KVConnectorOutput.is_empty") as f:
    f.prepend(
        """
        if self.kv_checksums is not None:
            return False
        """
    )

aggregator = Module("distributed/kv_transfer/kv_connector/utils.py")
with aggregator.function("KVOutputAggregator.aggregate") as f:
    f.after("invalid_block_ids = set[int]()", "kv_checksums = None")
    f.after(
        "invalid_block_ids |= kv_output.invalid_block_ids",
        """
        if kv_output.kv_checksums is not None:
            kv_checksums = kv_output.kv_checksums.aggregate(kv_checksums)
        """,
    )
    f.after(
        assign("output.kv_connector_output"),
        "output.kv_connector_output.kv_checksums = kv_checksums",
    )

stats = Module("v1/metrics/stats.py")
with stats.cls("SchedulerStats") as c:
    c.after(
        assign("kv_connector_stats"), "kv_checksum_stats: dict[str, int] | None = None"
    )

interface = Module("v1/kv_cache_interface.py")
with interface.cls("KVCacheConfig") as c:
    c.after(
        assign("kv_cache_layout"),
        '''
        kv_checksum_skipped: dict[int, str] | None = None
        """KV cache groups that some worker does not checksum: reasons by group id. Set in
        the scheduler's configuration alone."""
        ''',
        past_docstring=True,
    )

MODULES = [output, outputs, aggregator, stats, interface]
