"""Decisions of a run, the events that announce them and its suspicions, and the first calls of its detectors."""

from __future__ import annotations

import json
from datetime import timedelta

import msgspec
import pytest
from evalstop_detectors import POLICIES, name_calls, policy_to_document, replay
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.domain.run import DetectorCall
from evalstop_service.evaluation import backtests
from evalstop_service.ingest import CheckpointSaved, Resumed, list_calls
from evalstop_service.store import tables
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run

from tests.fixtures.recorded_runs import build_observations, load_run_records
from tests.service.project_fixture import (
    DECLINING_EVALS,
    NOW,
    ONE_HOUR_LATER,
    ProjectFixture,
    evals,
    set_up_project,
)


def test_attempt_is_decided_once(project: ProjectFixture) -> None:
    """An attempt gets one decision, however long its evals decline; a resumed attempt can get another."""
    run, first = project.open_declining_run()
    assert (first.state, first.step, first.attempt) == (DecisionState.REQUESTED, 4, 1)
    again = project.post_observations(run, evals(0.5, 0.4, start=5)).decision
    assert again is not None
    assert again.id == first.id
    assert project.submit(run, Resumed(1)).decision is None
    second = project.post_observations(run, evals(0.8, 0.7, 0.6, start=2)).decision
    assert second is not None
    assert (second.attempt, second.step) == (2, 4)
    assert len(project.load_events(run, "run.stop_requested")) == 2


def test_late_eval_does_not_revoke_a_decision(project: ProjectFixture) -> None:
    """A late eval changes the verdict to what it would have been; the decision stays on record."""
    run = project.open_run()
    project.post_observations(run, [*DECLINING_EVALS[:3], *DECLINING_EVALS[4:], *evals(0.5, start=5)])
    receipt = project.post_observations(run, evals(0.95, start=3))
    assert receipt.run.verdict.verdict == "suspect"
    assert receipt.decision is not None
    assert [row["verdict"].verdict for row in project.load_rows(tables.verdicts, run)] == ["suspect", "stop", "suspect"]


def test_ended_run_gets_no_decision(project: ProjectFixture) -> None:
    """A run that has completed gets a verdict but no decision."""
    run = project.open_run()
    project.finish_run(run)
    receipt = project.post_observations(run, DECLINING_EVALS)
    assert receipt.run.verdict.verdict == "stop"
    assert receipt.decision is None


def test_shadow_decision_is_not_announced(database: Database) -> None:
    """In shadow mode a decision is recorded without an event."""
    project = set_up_project(database, mode="shadow", veto_window_seconds=60)
    run, decision = project.open_declining_run()
    assert decision.state == DecisionState.SHADOW
    assert not decision.stops
    assert project.load_events(run, "run.stop_requested") == []


def test_stop_event_carries_the_decision(project: ProjectFixture) -> None:
    """The event has the verdict, the decision and the best checkpoint as they were committed."""
    run = project.open_run(labels={"slurm_job_id": "4711"})
    project.submit(run, CheckpointSaved(1, "file:///1"))
    receipt = project.post_observations(run, DECLINING_EVALS)
    (event,) = project.load_events(run, "run.stop_requested")
    data = json.loads(event["body"])["data"]
    assert receipt.decision is not None
    assert data["decision"]["id"] == str(receipt.decision.id)
    assert data["decision"]["state"] == "requested"
    assert data["verdict"] == json.loads(msgspec.json.encode(receipt.run.verdict))
    assert data["best_checkpoint"] == msgspec.to_builtins(receipt.run.best_checkpoint)
    assert data["run"]["labels"] == {"slurm_job_id": "4711"}


def test_suspicion_is_announced_once_per_attempt(project: ProjectFixture) -> None:
    """The first suspicion of an attempt is announced, later ones are not."""
    run = project.open_run()
    for observation in evals(0.9, 0.8, 0.7, 0.9, 0.8, 0.7):
        project.post_observations(run, [observation])
    assert len(project.load_events(run, "run.suspected")) == 1
    verdicts = [row["verdict"].verdict for row in project.load_rows(tables.verdicts, run)]
    assert verdicts == ["suspect", "continue", "suspect"]


def test_suspicion_by_proxy_alone_requests_an_eval(project: ProjectFixture) -> None:
    """A suspicion raised by the proxy alone requests an eval; one raised by evals does not."""
    proxy_only, with_evals = project.open_run(policy="watch-all-roles"), project.open_run(policy="watch-all-roles")
    project.post_observations(proxy_only, [PostedObservation("proxy", step, -float(step)) for step in range(5)])
    project.post_observations(with_evals, evals(0.9, 0.8))
    for run, requests in ((proxy_only, 1), (with_evals, 0)):
        assert project.load_run(run).verdict.verdict == "suspect"
        assert len(project.load_events(run, "run.suspected")) == 1
        assert len(project.load_events(run, "run.eval_requested")) == requests


def test_batch_records_every_change_of_verdict(project: ProjectFixture) -> None:
    """One large batch records the same changes of verdict as the same observations one by one."""
    batched, single = project.open_run(), project.open_run()
    project.post_observations(batched, DECLINING_EVALS)
    for observation in DECLINING_EVALS:
        project.post_observations(single, [observation])
    for run in (batched, single):
        assert [row["verdict"].verdict for row in project.load_rows(tables.verdicts, run)] == ["suspect", "stop"]
        assert len(project.load_events(run, "run.suspected")) == 1


RECORD = next(record for record in load_run_records() if record["run_id"] == "np-0044")
DOCUMENT = policy_to_document(POLICIES["default"]) | {"name": "tried"}
POINTS = [
    PostedObservation(item.role, item.step, item.value, item.stderr) for item in build_observations(RECORD["log"])
]


def load_calls(project: ProjectFixture, run: Run) -> dict[str, DetectorCall]:
    with project.database.reading() as tx:
        return {item.detector: item for item in list_calls(tx, project.load_run(run))}


def load_steps(project: ProjectFixture, run: Run) -> dict[str, int | None]:
    return {name: item.step for name, item in load_calls(project, run).items()}


@pytest.mark.parametrize("order", ["batches", "one by one", "backwards"])
def test_calls_do_not_depend_on_how_observations_arrive(project: ProjectFixture, order: str) -> None:
    """The row has the calls of the replay and of the backtest, of deciding and observing detectors."""
    run = project.open_run(policy="default", mode="shadow")
    size = 1 if order == "one by one" else 50
    batches = [POINTS[first : first + size] for first in range(0, len(POINTS), size)]
    for batch in batches[::-1] if order == "backwards" else batches:
        project.post_observations(run, batch)
    expected = name_calls(POLICIES["default"], replay(POLICIES["default"], build_observations(RECORD["log"])))
    assert load_steps(project, run) == expected
    assert sum(step is not None for step in expected.values()) > 1
    project.drop_monitor_state(run)
    assert load_steps(project, run) == expected
    project.finish_run(run)
    (finding,) = backtests.run_backtest(project.database, project.id, DOCUMENT, 10, "x", NOW).findings
    assert finding.calls == expected


def test_call_shows_its_time_and_the_evidence_now(project: ProjectFixture) -> None:
    """The time is that of the first call; the evidence goes on. An observer that has not called has no step."""
    run = project.open_run(policy="paper", mode="shadow")
    project.post_observations(run, DECLINING_EVALS[:4])
    assert load_steps(project, run) == {"k_decline": None, "posterior": None}
    project.post_observations(run, DECLINING_EVALS[4:], ONE_HOUR_LATER)
    project.post_observations(run, evals(0.95, start=5), ONE_HOUR_LATER + timedelta(hours=1))
    calls = load_calls(project, run)
    decline, posterior = calls["k_decline"], calls["posterior"]
    assert (decline.observes, decline.threshold, decline.evidence, decline.step) == (False, 3.0, 0.0, 4)
    assert decline.called_at == ONE_HOUR_LATER
    assert (posterior.observes, posterior.step, posterior.called_at) == (True, None, None)
    assert posterior.evidence is not None


def test_late_observation_and_resume_take_calls_back(project: ProjectFixture) -> None:
    """A call that the changed past does not support is gone; one at the same step keeps its time."""
    run = project.open_run(policy="paper", mode="shadow")
    project.post_observations(run, DECLINING_EVALS)
    project.post_observations(run, [PostedObservation("kl", 1, 0.1)], ONE_HOUR_LATER)
    assert load_calls(project, run)["k_decline"].called_at == NOW
    project.submit(run, Resumed(3, "trainer"))
    assert load_steps(project, run)["k_decline"] is None
    project.post_observations(run, evals(0.6, start=4), ONE_HOUR_LATER)
    assert load_calls(project, run)["k_decline"].called_at == ONE_HOUR_LATER
