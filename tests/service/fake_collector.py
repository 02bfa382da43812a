"""A fake OpenTelemetry collector that accepts spans over OTLP/HTTP and records them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

Value = str | int | float | bool


@dataclass(frozen=True)
class CollectedSpan:
    """A span as received; ids in hexadecimal."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Value]
    links: tuple[str, ...]
    failed: bool
    raw: bytes

    @property
    def context(self) -> str:
        """Trace id and span id as in the middle of a `traceparent`; the exporter omits the flags."""
        return f"{self.trace_id}-{self.span_id}"


class FakeCollector:
    """Records spans; `endpoint` is the value for `OTEL_EXPORTER_OTLP_ENDPOINT`."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        self.endpoint = ""

    def receive_export(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        for part in request.resource_spans:
            service = str(_read_attributes(part.resource.attributes)["service.name"])
            self.spans += [_convert_span(service, span) for scope in part.scope_spans for span in scope.spans]

    def find_span(self, name: str) -> CollectedSpan:
        """Return the only span of this name."""
        [matching] = [span for span in self.spans if span.name == name]
        return matching


@contextmanager
def run_collector() -> Iterator[FakeCollector]:
    """Run a collector on a free port until the block ends."""
    collector = FakeCollector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces"
            assert self.headers["Content-Type"] == "application/x-protobuf"
            collector.receive_export(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        collector.endpoint = f"http://127.0.0.1:{server.server_port}"
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def _convert_span(service: str, span: OtlpSpan) -> CollectedSpan:
    return CollectedSpan(
        service=service,
        name=span.name,
        kind=OtlpSpan.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        attributes=_read_attributes(span.attributes),
        links=tuple(f"{link.trace_id.hex()}-{link.span_id.hex()}" for link in span.links),
        failed=span.status.code == 2,
        raw=span.SerializeToString(),
    )


def _read_attributes(attributes: Iterable[KeyValue]) -> dict[str, Value]:
    attributes_by_name: dict[str, Value] = {}
    for item in attributes:
        kind = item.value.WhichOneof("value")
        assert kind is not None
        attributes_by_name[item.key] = getattr(item.value, kind)
    return attributes_by_name
