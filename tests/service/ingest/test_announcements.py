"""Decisions of a run, and the events that announce them and its suspicions."""

from __future__ import annotations

import json

import msgspec
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.ingest import CheckpointSaved, Resumed
from evalstop_service.store import tables
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation

from tests.service.project_fixture import (
    DECLINING_EVALS,
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
