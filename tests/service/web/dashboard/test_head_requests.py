"""HEAD is answered as GET, without the body: by probes, pages, what lies beside them, and streams."""

from __future__ import annotations

import httpx
import pytest

from tests.service.web.dashboard.serving import EMBEDDED

SAME = ("content-type", "content-length", "location", "allow", "etag", "cache-control")


@EMBEDDED
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
def test_head_is_get_without_the_body(visitor: httpx.Client, path: str, status: int) -> None:
    """Status and headers are those of GET."""
    by_get, by_head = visitor.get(path), visitor.head(path)
    assert (by_get.status_code, by_head.status_code) == (status, status)
    assert by_head.content == b""
    assert {name: by_head.headers.get(name) for name in SAME} == {name: by_get.headers.get(name) for name in SAME}


@EMBEDDED
def test_the_head_of_a_stream_has_an_end(visitor: httpx.Client) -> None:
    """The head of a stream that would go on is answered at once, and the connection takes the next request."""
    answer = visitor.head("/runs/events", params={"seen": "nothing"}, timeout=10)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert visitor.get("/livez", timeout=10).status_code == 200


@EMBEDDED
def test_counted_as_head(visitor: httpx.Client) -> None:
    """In what is measured a HEAD is a HEAD, of the route that would take a GET."""
    visitor.head("/livez")
    line = 'evalstop_request_seconds_count{method="HEAD",route="/livez",status="2xx"} 1.0'
    figures = visitor.get("/metrics").text
    assert line in figures, [found for found in figures.splitlines() if "HEAD" in found]


@EMBEDDED
@pytest.mark.parametrize("path", ["/api/v1/policies", "/runs", "/livez"])
def test_said_to_be_taken(visitor: httpx.Client, path: str) -> None:
    """Where GET is among the methods that a path takes, HEAD is, too."""
    answer = visitor.request("TRACE", path)
    assert answer.status_code == 405
    assert {"GET", "HEAD"} <= set(answer.headers["allow"].split(", "))
