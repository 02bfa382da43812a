"""Spans arrive at a real receiver of OTLP where one is named, and cost nothing where none is."""

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
    """A tracer as the environment asks for it; closed by the test when it wants to look."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    tracer = tracing.create_tracer(os.environ)
    yield tracer
    tracer.close()


def place(span: Span) -> str:
    """Its trace and its id."""
    return traceparent(span)[3:52]


def traceparent(span: Span) -> str:
    """It as a header."""
    headers: dict[str, str] = {}
    tracing.PROPAGATOR.inject(headers, set_span_in_context(span))
    return headers["traceparent"]


def test_spans_arrive(tracer: Tracer, collector: FakeCollector) -> None:
    """A span comes with its name, its kind, its attributes and its parent, under the name of the service."""
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
    assert (place(outer), place(inner)) == (sent_outer.context, sent_inner.context)
    assert not sent_outer.failed


def test_spans_go_on_elsewhere(tracer: Tracer, collector: FakeCollector) -> None:
    """A span goes on in another thread: as the parent of one, by its header, and as links of one that serves many."""
    requests = []
    for number in range(3):
        with tracer.span(f"request {number}") as request:
            requests.append(request)

    def commit() -> None:
        links = [request.get_span_context() for request in (*requests, INVALID_SPAN)]
        with tracer.span("commit", links=links):
            pass
        with tracer.span("child", traceparent=traceparent(requests[0])):
            pass

    thread = threading.Thread(target=commit)
    thread.start()
    thread.join()
    tracer.close()
    assert collector.find_span("commit").links == tuple(map(place, requests))
    assert collector.find_span("commit").trace_id not in {
        span.trace_id for span in collector.spans if "request" in span.name
    }
    assert collector.find_span("child").parent_id == collector.find_span("request 0").span_id


def test_a_span_that_fails_keeps_the_text_to_itself(tracer: Tracer, collector: FakeCollector) -> None:
    """An exception marks its span and goes on; what it says may hold a secret and is not sent."""
    with pytest.raises(LookupError), tracer.span("delivery"):
        raise LookupError("whsec_c2VjcmV0")
    tracer.close()
    sent = collector.find_span("delivery")
    assert sent.failed
    assert b"LookupError" in sent.raw
    assert b"whsec_" not in sent.raw


def test_a_request_is_a_span(tracer: Tracer, collector: FakeCollector, embedded_database: Database) -> None:
    """A request goes on with the caller's trace, is named for its route, and tells ids but neither path nor query."""
    with run_service(embedded_database, tracer) as service:
        run = service.client.post("/api/v1/runs", json={"name": "named-by-a-tenant"}).json()
        answer = service.client.get(f"/api/v1/runs/{run['id']}", headers={"traceparent": CALLER, "X-Request-Id": "r-1"})
        assert answer.status_code == 200
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
    everything = b"".join(span.raw for span in collector.spans)
    for secret in ("a-link-that-signs-in", service.key, "named-by-a-tenant"):
        assert secret.encode() not in everything


def test_a_request_that_breaks_fails_its_span(
    tracer: Tracer, collector: FakeCollector, embedded_database: Database
) -> None:
    """A fault of the service is marked, a caller's mistake is not."""
    with run_service(embedded_database, tracer) as service:
        with service.database.transaction() as tx:
            tx.exec_driver_sql("DROP TABLE verdicts")
        run = service.client.post("/api/v1/runs", json={"name": "r"}).json()
        service.client.get(f"/api/v1/runs/{run['id']}/verdicts")
        service.client.get("/nowhere")
    tracer.close()
    assert collector.find_span("GET /api/v1/runs/{run_id}/verdicts").failed
    assert not collector.find_span("GET (none)").failed


def test_a_forged_traceparent_is_no_parent(tracer: Tracer, collector: FakeCollector) -> None:
    """Whatever a caller sends as its trace, the request is traced on its own unless it is a trace."""

    @given(st.text(max_size=80) | st.sampled_from([CALLER.upper(), CALLER[:-1], CALLER.replace("4", "0", 64)[:9]]))
    def forge(text: str) -> None:
        with tracer.span("request", traceparent=text) as span:
            assert span.get_span_context().is_valid

    forge()
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
def test_unasked_nothing_is_recorded(environment: dict[str, str]) -> None:
    """Without a collector a span is one and the same empty object, whatever is asked of it."""
    tracer = tracing.create_tracer(environment)
    assert not tracer.recording
    with tracer.span("a", kind=SpanKind.SERVER, traceparent=CALLER, observations=1) as span:
        assert span is INVALID_SPAN
        assert get_current_span() is INVALID_SPAN
    tracer.close()


def test_a_protocol_that_is_not_spoken_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Asked for gRPC, it says that it speaks HTTP and records nothing, and the service goes on."""
    asked = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    with caplog.at_level(logging.WARNING):
        assert not tracing.create_tracer(asked).recording
    assert "http/protobuf" in caplog.text


WITHOUT_THE_EXTRA = """
import sys
sys.modules["opentelemetry.sdk"] = None  # as if it were not installed
from evalstop_service.observability import tracing
tracer = tracing.create_tracer({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"})
with tracer.span("a"):
    assert not tracer.recording
"""

UNASKED = """
import sys
from evalstop_service.observability import tracing
tracing.create_tracer({})
assert not [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
"""


def test_without_the_extra_the_service_goes_on() -> None:
    """A collector is named but the extra is missing: a warning names it, and nothing else happens."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_THE_EXTRA], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "evalstop-service[otel]" in done.stderr


def test_unasked_nothing_is_imported() -> None:
    """The SDK is not even imported where no collector is named."""
    done = subprocess.run([sys.executable, "-c", UNASKED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_collector_that_is_away_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans for a collector that does not listen are dropped; neither they nor the end wait for it."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    tracer = tracing.create_tracer(os.environ)
    with tracer.span("lost"):
        pass
    tracer.close()
