"""A recorded run gets the same verdicts through HTTP as through replay, which use the same monitor."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from evalstop_detectors import (
    POLICIES,
    EvalValue,
    MetricRole,
    MonitorState,
    Observation,
    combine_values,
    name_calls,
    replay,
    start,
    start_combining,
    step,
)
from evalstop_service.clock import utc_now
from evalstop_service.projects import api_keys
from evalstop_service.store.database import Database
from msgspec.structs import replace

from tests.fixtures.http_server import start_server
from tests.fixtures.recorded_runs import build_observations, load_run_records

pytestmark = pytest.mark.slow

RUN_COUNT = 6


@pytest.fixture
def client(embedded_database: Database) -> Iterator[httpx.Client]:
    """A client of a real server, with a key that may ingest and read."""
    key = api_keys.create_first_key(embedded_database, utc_now())
    with (
        start_server(embedded_database) as url,
        httpx.Client(
            base_url=f"{url}/api/v1", headers={"Authorization": f"Bearer {key}"}, timeout=60, trust_env=False
        ) as client,
    ):
        yield client


def load_evenly_spaced_records() -> list[dict[str, Any]]:
    """RUN_COUNT recorded runs, evenly spaced in the file to cover all kinds of runs."""
    records = load_run_records()
    return records[:: len(records) // RUN_COUNT][:RUN_COUNT]


def to_document(observation: Observation) -> dict[str, Any]:
    """An observation as it is posted."""
    document = {"metric": str(observation.role), "step": observation.step, "value": observation.value}
    return document if observation.stderr is None else document | {"stderr": observation.stderr}


def split_randomly(points: list[Observation], rng: random.Random, largest: int = 40) -> Iterator[list[Observation]]:
    """Batches of random sizes."""
    while points:
        size = rng.randint(1, largest)
        yield points[:size]
        points = points[size:]


@pytest.mark.parametrize(
    "policy",
    [name if name == "default" else pytest.param(name, marks=pytest.mark.nightly) for name in sorted(POLICIES)],
)
def test_verdicts_over_http_equal_replay(client: httpx.Client, policy: str) -> None:
    """Posted in order, a run has the replay's verdict after each batch; shuffled, at the end; and always its calls.

    In every second run the eval changes in the middle, which is reported before or after all observations.
    """
    rng = random.Random(policy)
    stopped = 0
    for number, run in enumerate(load_evenly_spaced_records()):
        points = build_observations(run["log"])
        run_id = open_run(client, f"{policy}-{number}", policy)
        middle = points[len(points) // 2].step if number % 2 else 2**53 - 1
        points = [replace(item, eval_version=int(item.step >= middle)) for item in points]
        change_eval(client, run_id, middle)
        state: MonitorState = start(POLICIES[policy])
        for batch in split_randomly(points, rng):
            for observation in batch:
                state, _ = step(POLICIES[policy], state, observation)
            assert post_observations(client, run_id, batch)["verdict"] == msgspec.json.decode(
                msgspec.json.encode(state.verdict)
            )
        stopped += state.verdict.stops
        shuffled = open_run(client, f"{policy}-{number}-shuffled", policy)
        # Few batches: each is replayed, and a key may spend only so much time on replays.
        for batch in split_randomly(rng.sample(points, len(points)), rng, largest=150):
            post_observations(client, shuffled, batch)
        replayed = replay(POLICIES[policy], points)
        assert change_eval(client, shuffled, middle)["verdict"] == msgspec.json.decode(
            msgspec.json.encode(replayed.verdict)
        )
        assert load_calls(client, run_id) == load_calls(client, shuffled) == name_calls(POLICIES[policy], replayed)
    assert stopped > 0


@pytest.mark.parametrize("policy", ["default", pytest.param("paper", marks=pytest.mark.nightly)])
def test_verdicts_on_several_evals_over_http_equal_replay(client: httpx.Client, policy: str) -> None:
    """A run with several evals, posted in random order, is judged by their mean and by the critical eval."""
    rng = random.Random(policy)
    stop_reasons = []
    for number, run in enumerate(load_evenly_spaced_records()):
        log = run["log"]
        series = {"code": [-value for value in log["proxy"]], "math": log["gold"], "tool": log["kl"]}
        roles = {
            "code": {"role": "eval", "direction": "minimize", "weight": 3},
            "math": {"role": "eval", "critical": True},
            "tool": {"role": "eval"},
        }
        body = {"name": f"several-{policy}-{number}", "policy": policy, "metrics": roles}
        run_id = client.post("/runs", json=body).raise_for_status().json()["id"]
        points = [
            {"metric": metric, "step": step_number, "value": value}
            for metric, values in series.items()
            for step_number, value in zip(log["step"], values, strict=True)
        ]
        rng.shuffle(points)
        for first in range(0, len(points), 100):
            answer = client.post(f"/runs/{run_id}/observations", json={"observations": points[first : first + 100]})
            verdict = answer.raise_for_status().json()["verdict"]
        rows = zip(log["step"], log["proxy"], log["gold"], log["kl"], strict=True)
        values = [EvalValue(step_number, place, value) for step_number, *row in rows for place, value in enumerate(row)]
        _, scores = combine_values((3.0, 1.0, 1.0), start_combining(3), values)
        observed = [Observation(MetricRole.EVAL, score.step, score.value) for score in scores]
        observed += [
            Observation(MetricRole.EVAL, item.step, item.value, critical=1) for item in values if item.place == 1
        ]
        expected = replay(POLICIES[policy].with_critical(["math"]), observed).verdict
        assert (verdict["verdict"], verdict["step"], verdict["critical"]) == (
            str(expected.verdict),
            expected.step,
            expected.critical,
        )
        assert verdict["reason"].startswith(expected.reason)
        stop_reasons.append(expected.critical)
    assert "math" in stop_reasons


def load_calls(client: httpx.Client, run_id: str) -> dict[str, int | None]:
    items = client.get(f"/runs/{run_id}/calls").raise_for_status().json()["items"]
    return {item["detector"]: item["step"] for item in items}


def open_run(client: httpx.Client, name: str, policy: str) -> str:
    identity: str = client.post("/runs", json={"name": name, "policy": policy}).raise_for_status().json()["id"]
    return identity


def change_eval(client: httpx.Client, run_id: str, step_number: int) -> dict[str, Any]:
    change = {"step": step_number, "reason": "another grader"}
    answer: dict[str, Any] = client.post(f"/runs/{run_id}/eval-changes", json=change).raise_for_status().json()
    return answer


def post_observations(client: httpx.Client, run_id: str, batch: list[Observation]) -> dict[str, Any]:
    body = {"observations": [to_document(item) for item in batch]}
    answer: dict[str, Any] = client.post(f"/runs/{run_id}/observations", json=body).raise_for_status().json()
    return answer
