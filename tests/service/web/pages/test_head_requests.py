"""HEAD requests to probes, pages and API routes."""

from __future__ import annotations

import httpx
import pytest

from tests.service.web.pages.serving import SQLITE_ONLY

pytestmark = SQLITE_ONLY

COMPARED_HEADERS = ("content-type", "content-length", "location", "allow", "etag", "cache-control")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/livez", 200),
        ("/readyz", 200),
        ("/login", 200),
        ("/runs", 200),
        ("/logout", 405),
        ("/nowhere", 404),
        ("/docs", 200),
        ("/openapi.json", 200),
        ("/api/v1/runs", 401),
        ("/mlflow/api/2.0/mlflow/runs/get", 401),
    ],
)
def test_head_equals_get_without_body(visitor: httpx.Client, path: str, status: int) -> None:
    """HEAD has the status and the headers of GET, and no body."""
    by_get, by_head = visitor.get(path), visitor.head(path)
    assert (by_get.status_code, by_head.status_code) == (status, status)
    assert by_head.content == b""
    assert {name: by_head.headers.get(name) for name in COMPARED_HEADERS} == {
        name: by_get.headers.get(name) for name in COMPARED_HEADERS
    }


def test_head_requests_are_counted_as_get(visitor: httpx.Client) -> None:
    """The request metric counts HEAD as the GET that serves it."""
    visitor.head("/livez")
    line = 'evalstop_request_seconds_count{method="GET",route="/livez",status="2xx"} 1.0'
    assert line in visitor.get("/metrics").text


@pytest.mark.parametrize("path", ["/api/v1/policies", "/runs", "/livez"])
def test_allow_header_lists_head(visitor: httpx.Client, path: str) -> None:
    """A path that allows GET lists HEAD in its Allow header, too."""
    answer = visitor.request("TRACE", path)
    assert answer.status_code == 405
    assert {"GET", "HEAD"} <= set(answer.headers["allow"].split(", "))
