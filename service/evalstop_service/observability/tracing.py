"""Spans for OpenTelemetry when a collector is named in the environment, and nothing at all when none is.

The variables are those of OpenTelemetry itself (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_SERVICE_NAME`,
`OTEL_TRACES_SAMPLER`, ...); the SDK and its exporter come with `evalstop-service[otel]` and are imported only then.
Spans travel between threads and processes as W3C `traceparent` texts, so that no part has to know the SDK.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger(__name__)

Attribute = str | bool | int | float
Kind = Literal["internal", "server", "client", "producer", "consumer"]

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
SPOKEN = "http/protobuf"


class Span:
    """A span that is not recorded."""

    __slots__ = ()

    @property
    def traceparent(self) -> str | None:
        """The span as a W3C `traceparent`, for a header or for the links of another span; None: it is not recorded."""
        return None

    def rename(self, name: str) -> None:
        """Give the span a name that was not known when it began."""

    def set(self, attributes: Mapping[str, Attribute] | None = None, **ours: Attribute) -> None:
        """Add attributes; those given by keyword are named `evalstop.KEYWORD`."""

    def fail(self, description: str) -> None:
        """Mark the span as one that went wrong."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None


_NOT_RECORDED = Span()


def _nothing() -> None:
    """The end of a span that is not recorded."""


class Tracer:
    """Makes spans: `with tracer.span("commit", links=[...], observations=120) as span`. This one records nothing."""

    recording = False

    def span(
        self,
        name: str,
        attributes: Mapping[str, Attribute] | None = None,
        *,
        kind: Kind = "internal",
        parent: str | None = None,
        links: Sequence[str | None] = (),
        **ours: Attribute,
    ) -> Span:
        """A span for the length of a `with` block, the present one in its thread or task.

        `parent`: the `traceparent` of a span elsewhere; None means the present one. `links`: those of others that had a
        part in it. An exception that leaves the block marks the span with its type alone: its text may hold a secret.
        """
        return _NOT_RECORDED

    def begin(self, name: str, *, links: Sequence[str | None] = (), **ours: Attribute) -> Callable[[], None]:
        """A span with no parent that somebody else ends, by calling what this gives."""
        return _nothing

    def here(self) -> str | None:
        """The `traceparent` of the present span; None if there is none."""
        return None

    def close(self) -> None:
        """Send what is not sent yet."""


def create_tracer(environment: Mapping[str, str]) -> Tracer:
    """A tracer that exports if the environment names a collector and the extra `otel` is installed; else one that
    records nothing, with a warning when that is not what was asked for."""
    wanted = any(environment.get(name) for name in ENDPOINTS)
    off = (
        environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none"
    )
    if not wanted or off:
        return Tracer()
    protocol = next((environment[name] for name in PROTOCOLS if environment.get(name)), SPOKEN)
    if protocol != SPOKEN:
        log.warning("no traces: %s is asked for, %s is what this exporter speaks", protocol, SPOKEN)
        return Tracer()
    try:
        return _exporting(environment)
    except ImportError as error:
        log.warning("no traces: %s; `pip install evalstop-service[otel]` brings it", error)
        return Tracer()


def _exporting(environment: Mapping[str, str]) -> Tracer:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = "OTEL_SERVICE_NAME" in environment or "service.name=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    provider = TracerProvider(resource=Resource.create({} if named else {"service.name": "evalstop"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return _Exporting(provider)


class _Exporting(Tracer):
    """A tracer of OpenTelemetry, on a provider of its own: nothing global is touched."""

    recording = True

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("evalstop_service")
        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()

    def span(
        self,
        name: str,
        attributes: Mapping[str, Attribute] | None = None,
        *,
        kind: Kind = "internal",
        parent: str | None = None,
        links: Sequence[str | None] = (),
        **ours: Attribute,
    ) -> Span:
        return _Recorded(
            self,
            self._tracer.start_as_current_span(
                name,
                context=self._read(parent) if parent else None,
                kind=self._trace.SpanKind[kind.upper()],
                attributes=_attributes(attributes, ours),
                links=self._links(links),
                record_exception=False,
                set_status_on_exception=False,
            ),
        )

    def begin(self, name: str, *, links: Sequence[str | None] = (), **ours: Attribute) -> Callable[[], None]:
        from opentelemetry.context import Context

        attributes = _attributes(None, ours)
        return self._tracer.start_span(name, Context(), attributes=attributes, links=self._links(links)).end

    def here(self) -> str | None:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return carrier.get("traceparent")

    def close(self) -> None:
        self._provider.shutdown()

    def failed(self, description: str) -> Any:
        """The status of a span that went wrong."""
        return self._trace.Status(self._trace.StatusCode.ERROR, description)

    def _links(self, traceparents: Sequence[str | None]) -> list[Any]:
        linked = (self._trace.get_current_span(self._read(link)).get_span_context() for link in traceparents if link)
        return [self._trace.Link(context) for context in linked if context.is_valid]

    def _read(self, traceparent: str) -> Any:
        return self._propagator.extract({"traceparent": traceparent})


class _Recorded(Span):
    __slots__ = ("_block", "_span", "_traceparent", "_tracer")

    def __init__(self, tracer: _Exporting, block: AbstractContextManager[Any]) -> None:
        self._tracer = tracer
        self._block = block
        self._traceparent: str | None = None

    @property
    def traceparent(self) -> str | None:
        return self._traceparent

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def set(self, attributes: Mapping[str, Attribute] | None = None, **ours: Attribute) -> None:
        self._span.set_attributes(_attributes(attributes, ours))

    def fail(self, description: str) -> None:
        self._span.set_status(self._tracer.failed(description))

    def __enter__(self) -> Self:
        self._span = self._block.__enter__()
        self._traceparent = self._tracer.here()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.fail(kind.__name__)
        self._block.__exit__(None, None, None)


def _attributes(attributes: Mapping[str, Attribute] | None, ours: Mapping[str, Attribute]) -> dict[str, Attribute]:
    return {**(attributes or {}), **{f"evalstop.{name}": value for name, value in ours.items()}}
