"""OpenTelemetry spans, if the environment names a collector.

The variables are OpenTelemetry's own (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_SERVICE_NAME`,
`OTEL_TRACES_SAMPLER`, ...); the SDK and its exporter come with `evalstop-service[otel]` and are imported only then.
No global state is changed: an embedding program keeps its own provider.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from opentelemetry.trace import INVALID_SPAN, Link, Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
SPOKEN = "http/protobuf"

PROPAGATOR = TraceContextTextMapPropagator()
"""Reads and writes the W3C header `traceparent`."""

_NOT_RECORDED = nullcontext(INVALID_SPAN)


class Tracer:
    """Creates spans: `with tracer.span("commit", links=[...], observations=120) as span`; none without a provider."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("evalstop_service") if provider else None

    @property
    def recording(self) -> bool:
        """Whether spans are exported."""
        return self._tracer is not None

    def span(
        self,
        name: str,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        traceparent: str | None = None,
        links: Iterable[SpanContext] = (),
        **attributes: str | int,
    ) -> AbstractContextManager[Span]:
        """Open a span for a `with` block; it is the current span of its thread or task.

        `traceparent`: its remote parent; None means the current span. `links`: the traceparents of related spans.
        Attributes are named `evalstop.KEYWORD`.
        """
        if self._tracer is None:
            return _NOT_RECORDED  # the API's own span that records nothing takes 10 microseconds
        return self._record(name, kind, traceparent, links, attributes)

    @contextmanager
    def _record(
        self,
        name: str,
        kind: SpanKind,
        traceparent: str | None,
        links: Iterable[SpanContext],
        attributes: Mapping[str, str | int],
    ) -> Iterator[Span]:
        assert self._tracer is not None
        with self._tracer.start_as_current_span(
            name,
            context=PROPAGATOR.extract({"traceparent": traceparent}) if traceparent else None,
            kind=kind,
            attributes={f"evalstop.{key}": value for key, value in attributes.items()},
            links=[Link(context) for context in links if context.is_valid],
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except BaseException as error:
                span.set_status(Status(StatusCode.ERROR, type(error).__name__))  # its message may contain a secret
                raise

    def close(self) -> None:
        """Export the remaining spans."""
        if self._provider is not None:
            self._provider.shutdown()


def create_tracer(environment: Mapping[str, str]) -> Tracer:
    """A tracer that exports if the environment names a collector and the extra `otel` is installed; else one that
    records nothing, with a warning if a collector is named."""
    is_configured = any(environment.get(name) for name in ENDPOINTS)
    is_disabled = (
        environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none"
    )
    if not is_configured or is_disabled:
        return Tracer()
    protocol = next((environment[name] for name in PROTOCOLS if environment.get(name)), SPOKEN)
    if protocol != SPOKEN:
        log.warning("no traces: the protocol is set to %s, but only %s is supported", protocol, SPOKEN)
        return Tracer()
    try:
        return Tracer(_create_provider(environment))
    except ImportError as error:
        log.warning("no traces: %s; install it with `pip install evalstop-service[otel]`", error)
        return Tracer()


def _create_provider(environment: Mapping[str, str]) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    has_name = "OTEL_SERVICE_NAME" in environment or "service.name=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    provider = TracerProvider(resource=Resource.create({} if has_name else {"service.name": "evalstop"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
