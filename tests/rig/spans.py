"""Receive what servers export over OTLP/HTTP, as a collector does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from rig.servers import HOST

ENVIRONMENT = {
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "OTEL_BSP_SCHEDULE_DELAY": "100",
}
"""Environment of servers that export here, soon after a span's end."""

Attributes = dict[str, Any]


class Collector:
    """Keeps the attributes of every span that was received."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://{HOST}:{port}/v1/traces"
        self._spans: list[tuple[str, Attributes]] = []

    def add(self, request: ExportTraceServiceRequest) -> None:
        """Take the spans of one export."""
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    told = {a.key: _value(a.value) for a in span.attributes}
                    self._spans.append((span.name, told))

    def request_span(self, request_id: str, timeout: float = 20) -> Attributes:
        """Wait for the span of the request whose id holds this one; return its attributes.

        Raises:
            AssertionError: none came, or several.

        """
        (span,) = self.request_spans(request_id, 1, timeout)
        return span

    def request_spans(
        self, request_id: str, number: int, timeout: float = 20
    ) -> list[Attributes]:
        """Wait for the spans of a request, one per answer; return what has come until there are `number`, or the end."""
        ends = time.monotonic() + timeout
        while True:
            found = [
                told
                for name, told in list(self._spans)
                if name == "llm_request" and request_id in told["gen_ai.request.id"]
            ]
            if len(found) >= number or time.monotonic() > ends:
                return found
            time.sleep(0.05)


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


@contextmanager
def collecting() -> Iterator[Collector]:
    """Yield a collector that listens on a port of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # noqa: N802
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.add(ExportTraceServiceRequest.FromString(body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer((HOST, 0), Handler)
    collector = Collector(server.server_address[1])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
