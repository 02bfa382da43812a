"""An error in the combination of evals or the choice of a checkpoint ends the judgment of its run, and stores it."""

from __future__ import annotations

from typing import Any

from evalstop_service.domain.run import COMBINED_METRIC, MetricFields
from evalstop_service.ingest import CheckpointSaved, Observations, Resumed
from evalstop_service.runs.watched_metrics import WatchedMetrics
from evalstop_service.store import observations
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from msgspec.structs import replace

from tests.service.project_fixture import ProjectFixture, evals


class FailingFits(dict[tuple[int, int], Any]):
    """Fits without which no checkpoint can be chosen."""

    def get(self, *_: object) -> Any:
        raise ZeroDivisionError("fits")

    def copy(self) -> FailingFits:
        return self


def open_run_with_failing_choice(project: ProjectFixture) -> Run:
    run = project.open_run(policy="paper")
    project.submit(run, CheckpointSaved(0, "s3://bucket/0"))
    project.post_observations(run, evals(0.5))
    state = project.cached_state(run)
    project.cache.put_states([replace(state, scores=replace(state.scores, fits=FailingFits()))])
    return run


def test_evals_are_stored_although_the_choice_of_the_checkpoint_fails(project: ProjectFixture) -> None:
    """The run is marked as not judged, also by the evals that follow."""
    run = open_run_with_failing_choice(project)
    unjudged = project.read_counter("evalstop_unjudged_runs_total")
    assert project.post_observations(run, evals(0.9, start=1)).accepted == 1
    failure = project.load_run(run).detector_failure
    assert failure == "the choice of the best checkpoint failed: ZeroDivisionError('fits')"
    assert project.post_observations(run, evals(0.8, 0.7, 0.6, start=2)).accepted == 3
    assert project.load_run(run).detector_failure == failure
    assert project.load_run(run).last_step == 4
    assert project.find_decision(run) is None
    assert project.read_counter("evalstop_unjudged_runs_total") == unjudged + 1


def test_checkpoint_is_stored_although_the_choice_fails(project: ProjectFixture) -> None:
    """Another process chooses again with the next one, from everything that is stored."""
    run = open_run_with_failing_choice(project)
    project.post_observations(run, evals(0.4, start=1))
    project.submit(run, CheckpointSaved(1, "s3://bucket/1"))
    assert project.load_run(run).detector_failure is not None
    project.evict_run(run)
    project.submit(run, CheckpointSaved(2, "s3://bucket/2"))
    row = project.load_run(run)
    assert row.detector_failure is None
    assert row.best_checkpoint is not None
    assert row.best_checkpoint.step == 0


def test_run_whose_choice_failed_is_judged_again_in_a_new_attempt(project: ProjectFixture) -> None:
    """The monitor is replayed, as after an error of a detector."""
    run = open_run_with_failing_choice(project)
    project.post_observations(run, evals(0.9, start=1))
    project.submit(run, Resumed(0, "trainer"))
    assert project.load_run(run).detector_failure is None


def test_run_whose_choice_failed_is_judged_again_by_another_process(project: ProjectFixture) -> None:
    """It stays marked until a process that does not have it in memory brings its row up to date."""
    run = open_run_with_failing_choice(project)
    project.post_observations(run, evals(0.9, start=1))
    failure = project.load_run(run).detector_failure
    assert failure is not None
    project.post_observations(run, [PostedObservation("kl", 2, 0.1)])
    assert project.load_run(run).detector_failure == failure
    project.evict_run(run)
    project.post_observations(run, [PostedObservation("kl", 3, 0.1)])
    assert project.load_run(run).detector_failure is None


def test_evals_are_stored_although_they_cannot_be_combined(project: ProjectFixture) -> None:
    """Scores that are missing follow with the next evals, in a process that can combine them."""
    roles: MetricFields = {"role": "eval", "direction": "maximize"}
    run = project.open_run(metrics={"a": roles, "b": roles})

    def make_evals(step: int) -> list[PostedObservation]:
        return [PostedObservation(metric, step, step / 10) for metric in ("a", "b")]

    project.post_observations(run, make_evals(0))
    state = project.cached_state(run)
    weightless: Any = {metric: {**roles, "weight": None} for metric in ("a", "b")}
    watch = WatchedMetrics(replace(state.run, metrics=weightless), state.policy)
    project.cache.put_states([replace(state, watch=watch, combined=None)])
    assert project.submit(run, Observations((*make_evals(1), *make_evals(2)))).accepted == 4
    failure = project.load_run(run).detector_failure
    assert failure is not None
    assert failure.startswith("the combination of the evals failed: TypeError")
    project.evict_run(run)
    project.submit(run, Observations(tuple(make_evals(3))))
    assert project.load_run(run).detector_failure is None
    with project.database.reading() as tx:
        scores = observations.load_series(tx, run.id, [COMBINED_METRIC])
    assert [score.step for score in scores] == [0, 1, 2, 3]
