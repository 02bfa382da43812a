"""Tracing: spans are exported to an OTLP collector if one is configured, and cost nothing otherwise."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from evalstop_service.observability import tracing
from evalstop_service.observability.tracing import Tracer
from evalstop_service.store.database import Database
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, get_current_span, set_span_in_context

from tests.service.fake_collector import FakeCollector, run_collector
from tests.service.running_service import run_service

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.fixture
def collector() -> Iterator[FakeCollector]:
    with run_collector() as collector:
        yield collector


@pytest.fixture
def tracer(collector: FakeCollector, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracer]:
    """A tracer configured by the environment; tests close it to flush its spans."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    tracer = tracing.create_tracer(os.environ)
    yield tracer
    tracer.close()


def format_context(span: Span) -> str:
    """The span's trace id and span id."""
    return format_traceparent(span)[3:52]


def format_traceparent(span: Span) -> str:
    """The span as a `traceparent` header."""
    headers: dict[str, str] = {}
    tracing.PROPAGATOR.inject(headers, set_span_in_context(span))
    return headers["traceparent"]


def test_exported_span_has_kind_attributes_and_parent(tracer: Tracer, collector: FakeCollector) -> None:
    """Spans are exported under the service's name, with the last name and all attributes."""
    with tracer.span("outer", kind=SpanKind.SERVER, request_id="r-1") as outer:
        assert get_current_span() is outer
        with tracer.span("inner", observations=120, result="hit") as inner:
            inner.set_attribute("db.system", "postgresql")
            inner.update_name("commit")
    assert get_current_span() is INVALID_SPAN
    tracer.close()
    sent_outer, sent_inner = collector.find_span("outer"), collector.find_span("commit")
    assert (sent_outer.service, sent_outer.kind, sent_outer.parent_id) == ("evalstop", "server", "")
    assert sent_outer.attributes == {"evalstop.request_id": "r-1"}
    assert (sent_inner.kind, sent_inner.parent_id) == ("internal", sent_outer.span_id)
    assert sent_inner.attributes == {
        "evalstop.observations": 120,
        "evalstop.result": "hit",
        "db.system": "postgresql",
    }
    assert (format_context(outer), format_context(inner)) == (sent_outer.context, sent_inner.context)
    assert not sent_outer.failed


def test_spans_continue_in_another_thread(tracer: Tracer, collector: FakeCollector) -> None:
    """A span is continued as the parent of a span by its header, and as links of one that serves several."""
    requests = []
    for number in range(3):
        with tracer.span(f"request {number}") as request:
            requests.append(request)

    def commit() -> None:
        links = [request.get_span_context() for request in (*requests, INVALID_SPAN)]
        with tracer.span("commit", links=links):
            pass
        with tracer.span("child", traceparent=format_traceparent(requests[0])):
            pass

    thread = threading.Thread(target=commit)
    thread.start()
    thread.join()
    tracer.close()
    assert collector.find_span("commit").links == tuple(map(format_context, requests))
    assert collector.find_span("commit").trace_id not in {
        span.trace_id for span in collector.spans if "request" in span.name
    }
    assert collector.find_span("child").parent_id == collector.find_span("request 0").span_id


def test_failed_span_has_no_exception_text(tracer: Tracer, collector: FakeCollector) -> None:
    """The exception's type is exported; its text may contain a secret and is not."""
    with pytest.raises(LookupError), tracer.span("delivery"):
        raise LookupError("whsec_c2VjcmV0")
    tracer.close()
    sent = collector.find_span("delivery")
    assert sent.failed
    assert b"LookupError" in sent.raw
    assert b"whsec_" not in sent.raw


def test_request_span_continues_the_callers_trace(
    tracer: Tracer, collector: FakeCollector, embedded_database: Database
) -> None:
    """The span is named by the route and has ids, but neither path nor query."""
    with run_service(embedded_database, tracer) as service:
        run = service.client.post("/api/v1/runs", json={"name": "named-by-a-tenant"}).json()
        response = service.client.get(
            f"/api/v1/runs/{run['id']}", headers={"traceparent": CALLER, "X-Request-Id": "r-1"}
        )
        assert response.status_code == 200
        service.client.get("/login", params={"token": "a-link-that-signs-in"})
    tracer.close()
    sent = collector.find_span("GET /api/v1/runs/{run_id}")
    assert (sent.trace_id, sent.parent_id, sent.kind) == (TRACE, CALLER.split("-")[2], "server")
    assert sent.attributes == {
        "http.request.method": "GET",
        "http.route": "/api/v1/runs/{run_id}",
        "http.response.status_code": 200,
        "evalstop.run_id": run["id"],
        "evalstop.request_id": "r-1",
    }
    exported = b"".join(span.raw for span in collector.spans)
    for secret in ("a-link-that-signs-in", service.key, "named-by-a-tenant"):
        assert secret.encode() not in exported


def test_internal_error_marks_its_span_as_failed(
    tracer: Tracer, collector: FakeCollector, embedded_database: Database
) -> None:
    """A 4xx does not."""
    with run_service(embedded_database, tracer) as service:
        with service.database.transaction() as tx:
            tx.exec_driver_sql("DROP TABLE verdicts")
        run = service.client.post("/api/v1/runs", json={"name": "r"}).json()
        service.client.get(f"/api/v1/runs/{run['id']}/verdicts")
        service.client.get("/nowhere")
    tracer.close()
    assert collector.find_span("GET /api/v1/runs/{run_id}/verdicts").failed
    assert not collector.find_span("GET (none)").failed


def test_invalid_traceparent_is_ignored(tracer: Tracer, collector: FakeCollector) -> None:
    """A request with an invalid header starts a trace of its own."""

    @given(st.text(max_size=80) | st.sampled_from([CALLER.upper(), CALLER[:-1], CALLER.replace("4", "0", 64)[:9]]))
    def start_span(text: str) -> None:
        with tracer.span("request", traceparent=text) as span:
            assert span.get_span_context().is_valid

    start_span()
    tracer.close()
    assert {span.parent_id for span in collector.spans} == {""}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_no_spans_are_recorded_without_a_collector(environment: dict[str, str]) -> None:
    """Without a collector every span is the same empty object."""
    tracer = tracing.create_tracer(environment)
    assert not tracer.recording
    with tracer.span("a", kind=SpanKind.SERVER, traceparent=CALLER, observations=1) as span:
        assert span is INVALID_SPAN
        assert get_current_span() is INVALID_SPAN
    tracer.close()


def test_unsupported_protocol_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """With gRPC configured nothing is recorded, and the warning names the supported protocol."""
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    with caplog.at_level(logging.WARNING):
        assert not tracing.create_tracer(environment).recording
    assert "http/protobuf" in caplog.text


SCRIPT_WITHOUT_SDK = """
import sys
sys.modules["opentelemetry.sdk"] = None  # as if it were not installed
from evalstop_service.observability import tracing
tracer = tracing.create_tracer({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"})
with tracer.span("a"):
    assert not tracer.recording
"""

SCRIPT_WITHOUT_COLLECTOR = """
import sys
from evalstop_service.observability import tracing
tracing.create_tracer({})
assert not [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
"""


def test_missing_sdk_logs_a_warning() -> None:
    """With a collector but without the extra, the warning names the extra, and spans are not recorded."""
    result = subprocess.run([sys.executable, "-c", SCRIPT_WITHOUT_SDK], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "evalstop-service[otel]" in result.stderr


def test_sdk_is_not_imported_without_a_collector() -> None:
    """The import would slow down each start."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT_WITHOUT_COLLECTOR], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_unreachable_collector_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans are dropped, and neither they nor closing the tracer wait."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    tracer = tracing.create_tracer(os.environ)
    with tracer.span("lost"):
        pass
    tracer.close()
