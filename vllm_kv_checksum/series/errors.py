"""Tell the client of a failed request that its KV checksums are the reason.

vLLM's answer to a failed load is HTTP 500, "Internal server error". An engine's output
may name an error, which the API server then raises, for plain and streaming requests
alike. A failed check is named as one that is safe to retry, HTTP 503, and the answer
holds its code as `reason`, because `code` is the HTTP status there.
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

_SINCE = "0.33.0"
"""Outputs have a field for an error since then."""

exceptions = Module("exceptions.py")
with exceptions.cls("RetryableRequestError", since=_SINCE) as c:
    c.prepend(
        '''
        reason: str | None = None
        """A stable code for the cause, for clients that act on it."""

        '''
    )

outputs = Module("outputs.py")
with outputs.function("RequestError.to_exception", since=_SINCE) as f:
    f.before(
        "if self.retryable:",
        """
        if self.code.startswith("kv_checksum_"):
            error = RetryableRequestError(self.message)
            error.reason = self.code
            return error
        """,
    )

processor = Module("v1/engine/output_processor.py")
with processor.function("OutputProcessor.process_outputs", since=_SINCE) as f:
    f.after(
        "req_state.queue.put(error.to_exception())",
        """
        if error.code.startswith("kv_checksum_"):
            # It was run, so it counts like any other request that fails.
            self._update_stats_from_output(
                req_state,
                engine_core_output,
                engine_core_timestamp,
                iteration_stats,
            )
            self._update_stats_from_finished(
                req_state, engine_core_output.finish_reason, iteration_stats
            )
            if self.tracing_enabled:
                self.do_tracing(engine_core_output, req_state, iteration_stats)
        """,
    )

response = Module("entrypoints/serve/exception_handling/error_response.py")
response.imports("from typing import Any")
with response.function("create_error_response", since=_SINCE) as f:
    f.after("exc: Exception | None = None", "extra: dict[str, Any] = {}")
    f.after(
        "message = str(exc)",
        """
        if isinstance(exc, RetryableRequestError) and exc.reason is not None:
            extra["reason"] = exc.reason
        """,
    )
    f.keyword("ErrorInfo", "**extra")

chat = Module("entrypoints/openai/chat_completion/serving.py")
with chat.function(
    "OpenAIServingChat.chat_completion_stream_generator_raw", since=_SINCE
) as f:
    f.before(
        "yield self.create_error_response(str(e), "
        'err_type="InternalServerError", status_code=e.status_code)',
        """
        if getattr(e, "reason", None) is not None:
            yield self.create_error_response(e)
            return
        """,
    )

responses = Module("entrypoints/openai/responses/serving.py")
responses.imports("from openai.types.responses import ResponseErrorEvent")
with responses.function(
    "OpenAIServingResponses.responses_stream_generator", since=_SINCE
) as f:
    # vLLM's own line takes the error for one of the stream's events, which it is not.
    f.before(
        "error_json = self._convert_generation_error_to_streaming_response(e)",
        """
        if getattr(e, "reason", None) is not None:
            error = ResponseErrorEvent(
                type="error", code=e.reason, message=str(e), sequence_number=-1
            )
            yield _increment_sequence_number_and_return(error)
            return
        """,
    )

MODULES = [scheduler, exceptions, outputs, processor, response, chat, responses]
