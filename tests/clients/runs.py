"""Runs that report to the fake service, and what it has heard of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from evalstop_client import Limits, MetricRole, Run

from tests.clients.fake_service import KEY, Answer, FakeServer, FakeService

METRICS: dict[str, MetricRole] = {"gold": {"role": "eval", "direction": "maximize"}, "kl": {"role": "kl"}}


BRISK = Limits(flush_seconds=60, poll_seconds=0.05, unauthorized_seconds=0.05)


def start(server: FakeServer, **arguments: Any) -> Run:
    return Run(**{"url": server.url, "key": KEY, "name": "a run", "limits": BRISK, **arguments})


def posted(service: FakeService) -> list[tuple[str, dict[str, Any]]]:
    """What was accepted, observations one by one, as (what, body)."""
    flat: list[tuple[str, dict[str, Any]]] = []
    for path, body in service.heard:
        what = path.rpartition("/")[2]
        flat += [(what, point) for point in body["observations"]] if what == "observations" else [(what, body)]
    return flat


def on_path(end: str, answer: Answer) -> Callable[[str, dict[str, Any]], Answer | None]:
    """Says `answer` to the next post whose path has this end."""
    return lambda path, body: answer if path.endswith(end) else None


def words(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "evalstop_client"]
