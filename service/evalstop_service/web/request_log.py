"""Middleware around each request and its answer: ids, metrics, headers, HEAD."""

from __future__ import annotations

import re
import time

from prometheus_client import Histogram
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evalstop_service.observability import logs
from evalstop_service.observability.metrics import ServiceMetrics

METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
ELSEWHERE = "(none)"
"""The route label of unmatched requests: callers choose their paths, and each path would become a series."""

HEADERS = (
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
)
"""Headers of answers that have none of their name."""


class RequestLog:
    """ASGI middleware. The id of a request is taken from `X-Request-Id` or generated, and returned in the same header.

    A request is timed until its answer begins: a stream may last for hours.
    """

    def __init__(self, app: ASGIApp, service_metrics: ServiceMetrics) -> None:
        self._app, self._seconds = app, service_metrics.request_seconds
        self._series: dict[tuple[int, str, int], Histogram] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        requested = dict(scope["headers"]).get(b"x-request-id")
        request_id = logs.choose_request_id(requested and requested.decode("latin-1"))
        started = time.perf_counter()

        async def answering(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message.get("headers", ())
                own = {name for name, _ in headers}
                protection = [header for header in HEADERS if header[0] not in own]
                message["headers"] = [*headers, *protection, (b"x-request-id", request_id.encode("latin-1"))]
                self._observe(scope, message["status"], time.perf_counter() - started)
            await send(message)

        with logs.log_context(request_id=request_id):
            await self._app(scope, receive, answering)

    def _observe(self, scope: Scope, status: int, seconds: float) -> None:
        key = (id(scope.get("route") or scope.get("endpoint")), scope["method"], status // 100)
        series = self._series.get(key)
        if series is None:
            method = scope["method"] if scope["method"] in METHODS else "OTHER"
            series = self._seconds.labels(method, route_template(scope), f"{status // 100}xx")
            if method != "OTHER":
                self._series[key] = series
        series.observe(seconds)


def route_template(scope: Scope) -> str:
    """The template of the route that matched a request, such as `/api/v1/runs/{run_id}`."""
    route = scope.get("route") or scope.get("endpoint")
    path: str | None = getattr(route, "path_format", None) or getattr(route, "path", None)
    if path is None:
        return ELSEWHERE
    # A route's path is relative to the router that it was added to: the rest of the request's path is the prefix.
    requested: str = scope["path"]
    filled = path.format_map(scope.get("path_params", {}))
    return requested.removesuffix(filled) + path if requested.endswith(filled) else path


class SubPath:
    """ASGI middleware: serves the app below the path of its public URL, such as https://host/evalstop.

    The proxy in front may pass this path on or strip it. Redirects and links of pages get it.
    """

    # No text can hold one of these: in what people or trainers wrote, quotes are escaped.
    _LINK = re.compile(rb'(\s(?:href|src|action|formaction|data-[a-z-]+)="|content="0;url=)/(?!/)')

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app, self._path = app, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and f"{scope['path']}/".startswith(f"{self._path}/"):
            raw_path = scope.get("raw_path", b"").removeprefix(self._path.encode()) or b"/"
            scope = {**scope, "path": scope["path"].removeprefix(self._path) or "/", "raw_path": raw_path}
        page: Message | None = None
        parts: list[bytes] = []

        async def add_path(message: Message) -> None:
            nonlocal page
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if (target := headers.get("location", "")).startswith("/"):
                    headers["location"] = f"{self._path}{target}"
                if scope["method"] != "HEAD" and headers.get("content-type", "").startswith("text/html"):
                    page = message  # its length is known with its links
                    return
            elif page is not None:
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    body = self._LINK.sub(rb"\g<1>" + self._path.encode() + rb"/", b"".join(parts))
                    MutableHeaders(scope=page)["content-length"] = str(len(body))
                    await send(page)
                    await send({"type": "http.response.body", "body": body})
                return
            await send(message)

        await self._app(scope, receive, add_path)


class HeadRequests:
    """ASGI middleware: answers HEAD as GET without its body (RFC 9110, section 9.3.2), for probes and link checkers.

    uvicorn, whose scope keeps the method, sends no body.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        await self._app({**scope, "method": "GET"} if is_head else scope, receive, send)
