"""Scrapes as observations: what is taken, at which step, and what is refused."""

from __future__ import annotations

import math

import httpx
import pytest
from evalstop_service.errors import Invalid
from evalstop_service.web.api.reading.openmetrics import Stepping, read_observations
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_latest

from tests.service.web.api.api_calls import expect_json, expect_problem
from tests.service.web.api.conftest import Service


def scraped(reward: float = 0.5) -> CollectorRegistry:
    """What a trainer might export."""
    registry = CollectorRegistry()
    Gauge("reward", "r", ["split"], registry=registry).labels('v"al').set(reward)
    Gauge("trainer_global_step", "s", registry=registry).set(120)
    Counter("tokens", "t", registry=registry).inc(7)
    Histogram("seconds", "h", registry=registry).observe(1.0)
    return registry


@pytest.mark.parametrize("strict", [True, False])
@given(reward=st.floats(allow_nan=True, allow_infinity=True))
def test_a_real_scrape(strict: bool, reward: float) -> None:
    """What Prometheus' own client exports is taken in both formats: gauges and counters, to the bit."""
    text = (openmetrics_latest if strict else generate_latest)(scraped(reward)).decode()
    found = {
        point.metric: point for point in read_observations(text, Stepping(metric="trainer_global_step"), strict=strict)
    }
    assert set(found) == {'reward{split="v\\"al"}', "trainer_global_step", "tokens_total"}
    assert {point.step for point in found.values()} == {120}
    value = found['reward{split="v\\"al"}'].value
    assert value == reward or (math.isnan(value) and math.isnan(reward))


def test_where_the_step_is() -> None:
    """The step is that of the request, in a label, in a metric beside, or the time of the value."""
    text = 'a{step="7",x="y"} 1 3000\nb 2 4500\n'
    assert [(p.metric, p.step) for p in read_observations(text, Stepping(5))] == [('a{step="7",x="y"}', 5), ("b", 5)]
    assert [(p.metric, p.step) for p in read_observations(text, Stepping(label="step"))] == [('a{x="y"}', 7)]
    assert [(p.metric, p.step) for p in read_observations(text, Stepping(metric="b"), {"b"})] == [("b", 2)]
    assert [p.step for p in read_observations(text, Stepping())] == [3, 4]


@pytest.mark.parametrize(
    ("text", "stepping", "word"),
    [
        ("a 1\n", Stepping(), "timestamp"),
        ('a{step="x"} 1\n', Stepping(label="step"), "whole number"),
        ("a 1.5\n", Stepping(metric="a"), "whole number"),
        ("a 1\n", Stepping(metric="b"), "step_metric"),
        ("", Stepping(1), "no gauge"),
        ("a 1\n" * 10_001, Stepping(1), "10000"),
        (f'a{{x="{"y" * 300}"}} 1\n', Stepping(1), "characters"),
        ("a{ 1\n", Stepping(1), "not the text format"),
        ("a many\n", Stepping(1), "not the text format"),
    ],
)
def test_refused(text: str, stepping: Stepping, word: str) -> None:
    """What cannot be taken is refused whole, and the error says why."""
    with pytest.raises(Invalid, match=word):
        read_observations(text, stepping)


@given(text=st.text(alphabet='ab{}"=,#\n 1.\\e+NaIf-TYPEHL gauge\x00\ud800', max_size=60), strict=st.booleans())
def test_anything(text: str, strict: bool) -> None:
    """Whatever is sent, it is taken or refused, and never a fault."""
    try:
        found = read_observations(text, Stepping(1), strict=strict)
    except Invalid:
        return
    assert all(0 < len(point.metric) <= 256 for point in found)


def test_posting_a_scrape(service: Service, admin: httpx.Client) -> None:
    """A scrape is stored and judged like any other batch, as curl sends it, and counts once."""
    run_id = expect_json(admin.post("/runs", json={"name": "scraped", "metrics": "auto"}), 201)["id"]
    path = f"/runs/{run_id}/openmetrics"
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    for accepted in (1, 0):
        answer = expect_json(admin.post(f"{path}?step=3", content="eval_accuracy 0.5\n", headers=headers), 200)
        assert answer["accepted"] == accepted
    assert "eval_accuracy" in expect_json(admin.get(f"/runs/{run_id}"), 200)["metrics"]
    expect_problem(admin.post(f"{path}?step=3", content=b"\xff", headers={"Content-Type": "text/plain"}), 400)
    expect_problem(
        admin.post(f"{path}?step=3", content="a 1\n", headers={"Content-Type": "application/openmetrics-text"}), 422
    )
    expect_problem(admin.post(f"{path}?step=3", content="a 1\n", headers={"Content-Type": "image/png"}), 415)
    expect_problem(admin.post(f"{path}?step=3&step_label=s", content="a 1\n", headers=headers), 422)
    anyone = service.open_client_with_key(None)
    expect_problem(anyone.post(f"{path}?step=3", content="a 1\n", headers=headers), 401)
