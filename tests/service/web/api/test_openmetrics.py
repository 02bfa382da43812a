"""Prometheus scrapes as observations: which samples are stored, at which step, and what is refused."""

from __future__ import annotations

import math

import httpx
import pytest
from evalstop_service.errors import Invalid
from evalstop_service.web.api.openmetrics import Stepping, read_observations
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_latest

from tests.service.web.api.api_calls import expect_json, expect_problem
from tests.service.web.api.conftest import Service


def build_registry(reward: float = 0.5) -> CollectorRegistry:
    """The metrics of an example trainer."""
    registry = CollectorRegistry()
    Gauge("reward", "r", ["split"], registry=registry).labels('v"al').set(reward)
    Gauge("trainer_global_step", "s", registry=registry).set(120)
    Counter("tokens", "t", registry=registry).inc(7)
    Histogram("seconds", "h", registry=registry).observe(1.0)
    return registry


@pytest.mark.parametrize("strict", [True, False])
@given(reward=st.floats(allow_nan=True, allow_infinity=True))
def test_scrape_of_the_prometheus_client_is_read_exactly(strict: bool, reward: float) -> None:
    """Gauges and counters that Prometheus' own client exports are read to the bit, in both text formats."""
    text = (openmetrics_latest if strict else generate_latest)(build_registry(reward)).decode()
    observations_by_metric = {
        point.metric: point for point in read_observations(text, Stepping(metric="trainer_global_step"), strict=strict)
    }
    assert set(observations_by_metric) == {'reward{split="v\\"al"}', "trainer_global_step", "tokens_total"}
    assert {point.step for point in observations_by_metric.values()} == {120}
    value = observations_by_metric['reward{split="v\\"al"}'].value
    assert value == reward or (math.isnan(value) and math.isnan(reward))


def test_step_comes_from_request_label_metric_or_timestamp() -> None:
    """The step is given by the request, a label, another metric or the sample's timestamp."""
    text = 'a{step="7",x="y"} 1 3000\nb 2 4500\n'
    assert [(p.metric, p.step) for p in read_observations(text, Stepping(5))] == [('a{step="7",x="y"}', 5), ("b", 5)]
    assert [(p.metric, p.step) for p in read_observations(text, Stepping(label="step"))] == [('a{x="y"}', 7)]
    assert [(p.metric, p.step) for p in read_observations(text, Stepping(metric="b"), {"b"})] == [("b", 2)]
    assert [p.step for p in read_observations(text, Stepping())] == [3, 4]


@pytest.mark.parametrize(
    ("text", "stepping", "expected_message"),
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
def test_invalid_scrape_is_refused_with_its_reason(text: str, stepping: Stepping, expected_message: str) -> None:
    """A scrape with one invalid sample is refused as a whole."""
    with pytest.raises(Invalid, match=expected_message):
        read_observations(text, stepping)


@given(text=st.text(alphabet='ab{}"=,#\n 1.\\e+NaIf-TYPEHL gauge\x00\ud800', max_size=60), strict=st.booleans())
def test_arbitrary_text_is_read_or_refused(text: str, strict: bool) -> None:
    """Any text yields observations with valid names or a refusal, and no other exception."""
    try:
        observations = read_observations(text, Stepping(1), strict=strict)
    except Invalid:
        return
    assert all(0 < len(point.metric) <= 256 for point in observations)


def test_posted_scrape_is_stored_once(service: Service, admin: httpx.Client) -> None:
    """A scrape is stored like any batch, also with the content type that curl sends; posting it again adds nothing."""
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
    anonymous = service.open_client_with_key(None)
    expect_problem(anonymous.post(f"{path}?step=3", content="a 1\n", headers=headers), 401)
