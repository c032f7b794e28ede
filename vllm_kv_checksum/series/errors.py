"""Tell the client of a failed request that its KV checksums are the reason.

vLLM's answer to a failed load is "Internal server error". An engine's output may name
an error, which the API server then raises, for plain and streaming requests alike.
"""

from ..edits import Module, assign

scheduler = Module("v1/core/sched/scheduler.py")
with scheduler.function("Scheduler.update_from_output") as f:
    f.before(
        assign("engine_core_outputs"),
        """
        if self.kv_checksum is not None:
            self.kv_checksum.attach_errors(outputs.values())

        """,
    )

MODULES = [scheduler]
