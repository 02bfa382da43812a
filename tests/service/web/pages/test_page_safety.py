"""Safety of the pages: headers, no inline script or style, and names shown as text."""

from __future__ import annotations

import re
import sys

import httpx
import pytest
from evalstop_service.domain.decision_lifecycle import Mode
from evalstop_service.domain.run import MetricFields
from evalstop_service.ingest import CheckpointSaved
from evalstop_service.store.observations import PostedObservation

from tests.service.web.pages.recorded_runs import Tenant, load_recorded_evals
from tests.service.web.pages.serving import SQLITE_ONLY, get_html

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

HACKING = load_recorded_evals("np-0044")

HOSTILE_NAMES = (
    '<script>alert("x")</script>',
    "'\"><img src=x onerror=alert(1)>",
    "{{ 7 * 7 }}{% raw %}",
    "\u202egnp.exe \u05d0\u05d1\u05d2",
    "__proto__",
    "a" * 256,
    "Z\u0351\u036b\u0343\u036a\u0302A\u0334\u0335\u031c",
)


@SQLITE_ONLY
@pytest.mark.parametrize("path", ["/", "/runs", "/login", "/runs/nonsense", "/login?token=x", "/session"])
def test_security_headers(visitor: httpx.Client, path: str) -> None:
    """No page may be framed, cached or sniffed, or run a script of another origin."""
    headers = visitor.get(path).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == "'self'"
    assert "unsafe" not in headers["content-security-policy"]
    assert policy["frame-ancestors"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"


@SQLITE_ONLY
def test_pages_have_no_inline_script_or_style(visitor: httpx.Client, tenant: Tenant) -> None:
    """The content security policy would block inline scripts and styles, so pages have none."""
    run = tenant.open_run("ppo")
    tenant.post_evals(run, HACKING[:5])
    for path in ("/runs", f"/runs/{run.id}", "/login"):
        html = get_html(visitor, path)
        assert "<style" not in html
        assert " style=" not in html
        assert re.findall(r"<script(?![^>]* src=)", html) == []
        assert "http://" not in html.replace("http://127.0.0.1", "")
        assert "https://" not in html


@SQLITE_ONLY
def test_assets_are_cached_by_digest(visitor: httpx.Client) -> None:
    """An asset under its current digest is immutable; under an old one it is not stored."""
    html = get_html(visitor, "/login")
    style = html.split('rel="stylesheet" href="')[1].split('"')[0]
    answer = visitor.get(style)
    assert answer.headers["content-type"].startswith("text/css")
    assert "immutable" in answer.headers["cache-control"]
    assert answer.headers["content-encoding"] == "gzip"
    assert visitor.get(style, headers={"Accept-Encoding": "identity"}).text == answer.text
    packed = visitor.get(style, headers={"Accept-Encoding": "gzip, deflate, br, zstd"})
    assert packed.headers["content-encoding"] == "zstd"
    assert zstd.decompress(packed.content) == answer.content
    assert visitor.get("/assets/old/evalstop.css").headers["cache-control"] == "no-store"


def test_hostile_names_are_escaped(visitor: httpx.Client, tenant: Tenant) -> None:
    """Names of runs, labels, metrics and checkpoints are escaped in HTML and unchanged in JSON."""
    for name in HOSTILE_NAMES:
        metrics: dict[str, MetricFields] = {name: {"role": "eval", "direction": "maximize"}}
        run = tenant.open_run(name, metrics=metrics, labels={name: name}, mode=Mode.ENFORCE)
        points = [PostedObservation(name, step, float(-step), 0.1) for step in range(10)]
        tenant.submit(run, CheckpointSaved(0, f"file:///{name}"))
        points.append(PostedObservation(f"{name}2", 1, 2.0))
        receipt = tenant.post_observations(run, points)
        assert receipt.decision is not None
        tenant.confirm_stop(receipt.decision)
        html = get_html(visitor, f"/runs/{run.id}")
        escaped = name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        assert escaped.replace('"', "&#34;").replace("'", "&#39;") in html
        assert "<img" not in html
        assert "<script>" not in html
        (series,) = visitor.get(f"/runs/{run.id}/series.json").json()["series"]
        assert series["metric"] == name
        assert series["values"][:3] == [0, -1, -2]
    run_list = get_html(visitor, "/runs")
    assert "<script>alert" not in run_list
    assert "<img" not in run_list
    assert run_list.count('class="row-link"') == len(HOSTILE_NAMES)


COMPARED_HEADERS = ("content-type", "content-length", "location", "allow", "etag", "cache-control")


@SQLITE_ONLY
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


@SQLITE_ONLY
def test_head_requests_are_counted_as_get(visitor: httpx.Client) -> None:
    """The request metric counts HEAD as the GET that serves it."""
    visitor.head("/livez")
    line = 'evalstop_request_seconds_count{method="GET",route="/livez",status="2xx"} 1.0'
    assert line in visitor.get("/metrics").text


@SQLITE_ONLY
@pytest.mark.parametrize("path", ["/api/v1/policies", "/runs", "/livez"])
def test_allow_header_lists_head(visitor: httpx.Client, path: str) -> None:
    """A path that allows GET lists HEAD in its Allow header, too."""
    answer = visitor.request("TRACE", path)
    assert answer.status_code == 405
    assert {"GET", "HEAD"} <= set(answer.headers["allow"].split(", "))
