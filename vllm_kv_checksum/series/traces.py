"""Show the verdict of a request's KV loads on its OpenTelemetry span.

The scheduler knows the verdict, the API server makes the span. What ends the request
carries the attributes from one to the other. Without tracing there are none.
"""

from ..edits import Module, assign

scheduler = Module("v1/core/sched/scheduler.py")
with scheduler.function("Scheduler.update_from_output") as f:
    f.before(
        assign("engine_core_outputs"),
        """
        if self.kv_checksum is not None:
            self.kv_checksum.attach_traces(outputs.values())

        """,
    )

engine = Module("v1/engine/__init__.py")
_FIELD = """
# Attributes of the request's span: what came of its KV loads; on its last output.
kv_checksum_trace: dict[str, str | int] | None = None
"""
with engine.cls("EngineCoreOutput", since="0.33.0") as c:
    c.after(assign("error"), _FIELD)
with engine.cls("EngineCoreOutput", since="0.31.0", below="0.33.0") as c:
    c.after(assign("prompt_token_id_logprobs"), _FIELD)
with engine.cls("EngineCoreOutput", below="0.31.0") as c:
    c.after(assign("spec_decode_metrics"), _FIELD)

processor = Module("v1/engine/output_processor.py")
with processor.function("OutputProcessor.do_tracing") as f:
    f.before(
        "if req_state.n:",
        """
        if engine_core_output.kv_checksum_trace is not None:
            attributes.update(engine_core_output.kv_checksum_trace)
        """,
    )

MODULES = [scheduler, engine, processor]
