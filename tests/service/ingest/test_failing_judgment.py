"""An error in the combination of evals or the choice of a checkpoint ends the judgment of its run, and stores it."""

from __future__ import annotations

from collections.abc import Iterable

from evalstop_detectors import CombinedState, Score
from evalstop_service.ingest import CheckpointSaved, Observations, Resumed
from evalstop_service.ingest.run_state import Scores
from evalstop_service.rules.role_recognition import COMBINED_METRIC, MetricFields
from evalstop_service.store.checkpoints import Checkpoint
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from msgspec.structs import replace

from tests.service.project_fixture import ProjectFixture, evals


class FailingScores(Scores):
    """Scores to which nothing can be added."""

    def add_scores(self, scores: Iterable[Score]) -> None:
        if list(scores):
            raise ZeroDivisionError("scores")

    def add_checkpoints(self, checkpoints: Iterable[Checkpoint]) -> None:
        if list(checkpoints):
            raise ZeroDivisionError("checkpoints")


def open_run_with_failing_choice(project: ProjectFixture) -> Run:
    run = project.open_run(policy="paper")
    project.post_observations(run, evals(0.5))
    project.cache.put_states([replace(project.cached_state(run), scores=FailingScores(), scores_count=0)])
    return run


def test_evals_are_stored_although_the_choice_of_the_checkpoint_fails(project: ProjectFixture) -> None:
    """The run is marked as not judged, also by the evals that follow."""
    run = open_run_with_failing_choice(project)
    unjudged = project.read_counter("evalstop_unjudged_runs_total")
    assert project.post_observations(run, evals(0.9, start=1)).accepted == 1
    failure = project.load_run(run).detector_failure
    assert failure == "the choice of the best checkpoint failed: ZeroDivisionError('scores')"
    assert project.post_observations(run, evals(0.8, 0.7, 0.6, start=2)).accepted == 3
    assert project.load_run(run).detector_failure == failure
    assert project.load_run(run).last_step == 4
    assert project.find_decision(run) is None
    assert project.read_counter("evalstop_unjudged_runs_total") == unjudged + 1


def test_checkpoint_is_stored_although_the_choice_fails(project: ProjectFixture) -> None:
    """The choice is attempted again with the next one, from everything that is stored."""
    run = open_run_with_failing_choice(project)
    project.submit(run, CheckpointSaved(0, "s3://bucket/0"))
    assert project.load_run(run).detector_failure is not None
    project.submit(run, CheckpointSaved(1, "s3://bucket/1"))
    best = project.load_run(run).best_checkpoint
    assert best is not None
    assert best.step == 0


def test_run_whose_choice_failed_is_judged_again_in_a_new_attempt(project: ProjectFixture) -> None:
    """The monitor is replayed, as after an error of a detector."""
    run = open_run_with_failing_choice(project)
    project.post_observations(run, evals(0.9, start=1))
    project.submit(run, Resumed(0, "trainer"))
    assert project.load_run(run).detector_failure is None


def test_run_whose_choice_failed_stays_marked_until_a_choice_succeeds(project: ProjectFixture) -> None:
    """Another process that loads the run chooses again only with an eval or a checkpoint."""
    run = open_run_with_failing_choice(project)
    project.post_observations(run, evals(0.9, start=1))
    failure = project.load_run(run).detector_failure
    assert failure is not None
    project.evict_run(run)
    project.post_observations(run, [PostedObservation("kl", 1, 0.1)])
    assert project.load_run(run).detector_failure == failure
    project.post_observations(run, evals(0.8, start=2))
    assert project.load_run(run).detector_failure is None


def test_evals_are_stored_although_they_cannot_be_combined(project: ProjectFixture) -> None:
    """Scores that are missing follow with the next evals."""
    roles: MetricFields = {"role": "eval", "direction": "maximize"}
    run = project.open_run(metrics={"a": roles, "b": roles})

    def make_evals(step: int) -> list[PostedObservation]:
        return [PostedObservation(metric, step, step / 10) for metric in ("a", "b")]

    project.post_observations(run, make_evals(0))
    state = project.cached_state(run)
    assert state.combined is not None
    broken = CombinedState(state.combined.evals[:1], last=0)  # two weights, but one eval
    project.cache.put_states([replace(state, combined=broken)])
    assert project.submit(run, Observations((*make_evals(1), *make_evals(2)))).accepted == 4
    failure = project.load_run(run).detector_failure
    assert failure is not None
    assert failure.startswith("the combination of the evals failed: ValueError")
    project.submit(run, Observations(tuple(make_evals(3))))
    assert project.cached_state(run).last_steps[COMBINED_METRIC] == 3


def test_run_is_loaded_although_its_scores_cannot_be_caught_up(project: ProjectFixture) -> None:
    """They are built again by the message that needs them."""
    run = open_run_with_failing_choice(project)
    state = project.cached_state(run)
    project.evict_run(run)
    project.post_observations(run, evals(0.6, start=1))  # as another process would
    project.cache.put_states([replace(state, shared=1)])
    assert project.post_observations(run, evals(0.7, start=2)).accepted == 1
    maximum = project.load_run(run).raw_maximum
    assert maximum is not None
    assert maximum.score == 0.7
