"""A trainer that goes on from a checkpoint: what its earlier attempt observed past it no longer counts."""

from __future__ import annotations

from typing import Any

from evalstop_service.clock import utc_now
from evalstop_service.decisions import commands
from evalstop_service.ingest import CheckpointSaved, Resumed
from evalstop_service.rules.decision_lifecycle import DecisionState
from evalstop_service.store import endpoints, tables
from evalstop_service.store.queue import leases
from evalstop_service.store.runs import Run

from tests.service.project_fixture import (
    DECLINING_EVALS,
    NOW,
    ProjectFixture,
    evals,
    load_stop_delivery_states,
)


def test_resume_supersedes(project: ProjectFixture) -> None:
    """What was observed and saved past the resumed step no longer counts, stays on record, and can come anew."""
    run = project.open_run()
    project.submit(run, CheckpointSaved(1, "file:///1"))
    project.submit(run, CheckpointSaved(3, "file:///3"))
    project.post_observations(run, evals(0.5, 0.6, 0.4, 0.9))
    assert pointer(project.load_run(run)) == {
        "step": 3,
        "uri": "file:///3",
        "score": 0.9,
        "chosen_by": "smoothed_maximum",
    }
    receipt = project.submit(run, Resumed(1))
    assert (receipt.superseded, receipt.run.attempt, receipt.run.last_step) == (2, 2, 1)
    assert pointer(receipt.run) == {"step": 1, "uri": "file:///1", "score": 0.6, "chosen_by": "smoothed_maximum"}
    assert project.post_observations(run, evals(0.7, 0.8, start=2)).accepted == 2
    assert project.submit(run, CheckpointSaved(3, "file:///elsewhere")).created
    kept = {(row["step"], row["superseded_by"]): row["value"] for row in project.load_rows(tables.observations, run)}
    assert kept == {(0, 0): 0.5, (1, 0): 0.6, (2, 2): 0.4, (3, 2): 0.9, (2, 0): 0.7, (3, 0): 0.8}


def pointer(run: Run) -> dict[str, Any] | None:
    best = run.best_checkpoint
    return {key: getattr(best, key) for key in ("step", "uri", "score", "chosen_by")} if best else None


def test_resume_can_be_sent_again(project: ProjectFixture) -> None:
    """The same resume, sent again with nothing in between, changes nothing; after news it begins another attempt."""
    run = project.open_run()
    project.post_observations(run, evals(0.5, 0.6, 0.4))
    assert project.submit(run, Resumed(1)).run.attempt == 2
    assert project.submit(run, Resumed(1)).run.attempt == 2
    assert project.submit(run, Resumed(0)).run.attempt == 3
    project.submit(run, CheckpointSaved(2, "file:///2"))
    assert project.submit(run, Resumed(0)).run.attempt == 4
    project.post_observations(run, evals(0.1, start=5))
    assert project.submit(run, Resumed(0)).run.attempt == 5


def test_resume_wakes_a_run_that_ended(project: ProjectFixture) -> None:
    """A job that failed right after it was resumed, and is resumed from the same step again, is watched again."""
    run = project.open_run()
    project.post_observations(run, evals(0.5))
    project.submit(run, Resumed(0))
    commands.finish_run(project.database, project.id, run.id, "failed", NOW)
    receipt = project.submit(run, Resumed(0))
    assert (receipt.run.status, receipt.run.ended_at) == ("running", None)
    assert project.post_observations(run, evals(0.4, 0.3, 0.2, start=1)).decision is not None


def test_resume_within_grace_withdraws(veto_project: ProjectFixture) -> None:
    """A stop that still waits for its veto window does not hit the attempt that the trainer begins meanwhile."""
    run = veto_project.open_run()
    veto_project.post_observations(run, DECLINING_EVALS)
    veto_project.submit(run, Resumed(1))
    decision = veto_project.find_decision(run)
    assert decision is not None
    assert decision.state == DecisionState.VETOED
    assert load_stop_delivery_states(veto_project) == ["cancelled"]


def test_resume_before_anybody_had_the_stop(project: ProjectFixture) -> None:
    """A stop that has reached no receiver is moot for an attempt that is over; one that may have waits for its word."""
    with project.database.transaction() as tx:
        endpoints.add_endpoint(tx, project.id, url="http://127.0.0.1:9/", event_types=["run.stop_requested"], now=NOW)
    run = project.open_run()
    project.post_observations(run, DECLINING_EVALS)
    project.submit(run, Resumed(1))
    assert (state_of(project, run, 1), load_stop_delivery_states(project)) == (DecisionState.MOOT, ["cancelled"])
    assert project.post_observations(run, evals(0.8, 0.7, 0.6, start=2)).decision is not None
    with project.database.transaction() as tx:
        assert len(leases.claim_deliveries(tx, utc_now(), 60.0, 10, 10)) == 1
    project.submit(run, Resumed(1))
    assert (state_of(project, run, 2), load_stop_delivery_states(project)) == (
        DecisionState.REQUESTED,
        ["cancelled"] * 2,
    )


def state_of(project: ProjectFixture, run: Run, attempt: int) -> str:
    decision = project.find_decision(run, attempt)
    assert decision is not None
    return decision.state
