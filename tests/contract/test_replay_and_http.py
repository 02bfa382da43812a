"""A recorded run gets the same verdicts through HTTP as through replay: both call the same monitor."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from evalstop_detectors import (
    POLICIES,
    EvalValue,
    MetricRole,
    MonitorState,
    Observation,
    combine_values,
    replay,
    start,
    start_combining,
    step,
    verdict_to_document,
)
from evalstop_service.clock import utc_now
from evalstop_service.projects import api_keys
from evalstop_service.store.database import Database
from msgspec.structs import replace

from tests.fixtures.http_server import start_server

RECORDED = Path(__file__).parent.parent / "data" / "rlhf_runs_public.jsonl"

CHOSEN = 8


@pytest.fixture
def client(embedded_database: Database) -> Iterator[httpx.Client]:
    """A client of a real server that may ingest and read."""
    key = api_keys.create_first_key(embedded_database, utc_now())
    with (
        start_server(embedded_database) as url,
        httpx.Client(
            base_url=f"{url}/api/v1", headers={"Authorization": f"Bearer {key}"}, timeout=60, trust_env=False
        ) as client,
    ):
        yield client


def recorded() -> list[dict[str, Any]]:
    """Some of the recorded runs, spread over all kinds of them."""
    lines = RECORDED.read_text().splitlines()
    return [json.loads(line) for line in lines[:: len(lines) // CHOSEN][:CHOSEN]]


def observations(log: dict[str, list[Any]]) -> list[Observation]:
    """What a trainer would have posted, in the order of the steps."""
    found = []
    for index, at in enumerate(log["step"]):
        found.append(Observation(MetricRole.PROXY, at, log["proxy"][index], log["proxy_se"][index]))
        found.append(Observation(MetricRole.KL, at, log["kl"][index]))
        found.append(Observation(MetricRole.EVAL, at, log["gold"][index], log["gold_se"][index]))
    return sorted(found, key=lambda item: item.order)


def document(observation: Observation) -> dict[str, Any]:
    sent = {"metric": str(observation.role), "step": observation.step, "value": observation.value}
    return sent if observation.stderr is None else sent | {"stderr": observation.stderr}


def batches(points: list[Observation], chance: random.Random) -> Iterator[list[Observation]]:
    while points:
        size = chance.randint(1, 40)
        yield points[:size]
        points = points[size:]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_same_verdicts(client: httpx.Client, policy: str) -> None:
    """In order, batch after batch, the verdict is the replay's at every point; shuffled, it is at the end. So it is of
    runs whose eval is measured otherwise from their middle on, told before or when all is posted."""
    chance = random.Random(policy)
    stopped = 0
    for number, run in enumerate(recorded()):
        points = observations(run["log"])
        told = open_run(client, f"{policy}-{number}", policy)
        middle = points[len(points) // 2].step if number % 2 else 2**53 - 1
        points = [replace(item, eval_version=int(item.step >= middle)) for item in points]
        change_eval(client, told, middle)
        state: MonitorState = start(POLICIES[policy])
        for batch in batches(points, chance):
            for observation in batch:
                state, _ = step(POLICIES[policy], state, observation)
            assert post(client, told, batch)["verdict"] == verdict_to_document(state.verdict)
        stopped += state.verdict.stops
        shuffled = open_run(client, f"{policy}-{number}-shuffled", policy)
        for batch in batches(chance.sample(points, len(points)), chance):
            post(client, shuffled, batch)
        assert change_eval(client, shuffled, middle)["verdict"] == verdict_to_document(
            replay(POLICIES[policy], points).verdict
        )
    assert stopped > 0


@pytest.mark.parametrize("policy", ["default", "paper"])
def test_same_verdicts_on_several_evals(client: httpx.Client, policy: str) -> None:
    """Posted in any order, a run with several evals, one of them critical, is judged as by the mean and that one."""
    chance = random.Random(policy)
    stops = []
    for number, run in enumerate(recorded()):
        log = run["log"]
        series = {"code": [-value for value in log["proxy"]], "math": log["gold"], "tool": log["kl"]}
        roles = {
            "code": {"role": "eval", "direction": "minimize", "weight": 3},
            "math": {"role": "eval", "critical": True},
            "tool": {"role": "eval"},
        }
        body = {"name": f"several-{policy}-{number}", "policy": policy, "metrics": roles}
        told = client.post("/runs", json=body).raise_for_status().json()["id"]
        points = [
            {"metric": metric, "step": at, "value": value}
            for metric, values in series.items()
            for at, value in zip(log["step"], values, strict=True)
        ]
        chance.shuffle(points)
        for first in range(0, len(points), 100):
            answer = client.post(f"/runs/{told}/observations", json={"observations": points[first : first + 100]})
            found = answer.raise_for_status().json()["verdict"]
        rows = zip(log["step"], log["proxy"], log["gold"], log["kl"], strict=True)
        values = [EvalValue(at, place, value) for at, *row in rows for place, value in enumerate(row)]
        _, scores = combine_values((3.0, 1.0, 1.0), start_combining(3), values)
        observed = [Observation(MetricRole.EVAL, score.step, score.value) for score in scores]
        observed += [
            Observation(MetricRole.EVAL, item.step, item.value, critical=1) for item in values if item.place == 1
        ]
        expected = replay(POLICIES[policy].with_critical(["math"]), observed).verdict
        assert (found["verdict"], found["step"], found["critical"]) == (
            str(expected.verdict),
            expected.step,
            expected.critical,
        )
        assert found["reason"].startswith(expected.reason)
        stops.append(expected.critical)
    assert "math" in stops


def open_run(client: httpx.Client, name: str, policy: str) -> str:
    identity: str = client.post("/runs", json={"name": name, "policy": policy}).raise_for_status().json()["id"]
    return identity


def change_eval(client: httpx.Client, run_id: str, at: int) -> dict[str, Any]:
    change = {"step": at, "reason": "another grader"}
    answer: dict[str, Any] = client.post(f"/runs/{run_id}/eval-changes", json=change).raise_for_status().json()
    return answer


def post(client: httpx.Client, run_id: str, batch: list[Observation]) -> dict[str, Any]:
    body = {"observations": [document(item) for item in batch]}
    answer: dict[str, Any] = client.post(f"/runs/{run_id}/observations", json=body).raise_for_status().json()
    return answer
