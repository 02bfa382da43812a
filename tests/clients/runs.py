"""Opens runs that report to the fake service, and lists what it accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from evalstop_client import Limits, MetricRole, Run

from tests.clients.fake_service import KEY, Answer, FakeServer, FakeService

METRICS: dict[str, MetricRole] = {"score": {"role": "eval", "direction": "maximize"}, "kl": {"role": "kl"}}
FAST_LIMITS = Limits(flush_seconds=60, poll_seconds=0.05, unauthorized_seconds=0.05)


def open_run(server: FakeServer, **arguments: Any) -> Run:
    """A run of the fake service that flushes only when it is told to."""
    return Run(**{"url": server.url, "key": KEY, "name": "a run", "limits": FAST_LIMITS, **arguments})


def list_posts(service: FakeService) -> list[tuple[str, dict[str, Any]]]:
    """What was accepted, as (last part of the path, body); observations one by one."""
    posts: list[tuple[str, dict[str, Any]]] = []
    for path, body in service.posts:
        kind = path.rpartition("/")[2]
        posts += [(kind, item) for item in body["observations"]] if kind == "observations" else [(kind, body)]
    return posts


def answer_on_path(end: str, answer: Answer) -> Callable[[str, dict[str, Any]], Answer | None]:
    """Answers the next post whose path ends with `end`."""
    return lambda path, body: answer if path.endswith(end) else None


def list_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The client's messages in the log."""
    return [record.getMessage() for record in caplog.records if record.name == "evalstop_client"]
