"""A detector, a combination of evals or a choice of a checkpoint that fails ends the judgment of its run alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from evalstop_detectors import DetectorError, Evidence, Kind, Member, Observation, Policy, Verdict, start
from evalstop_detectors.detectors.k_decline import KDecline
from evalstop_service.domain.run import COMBINED_METRIC, Call, MetricFields
from evalstop_service.evaluation.backtests import replay_run
from evalstop_service.ingest import CheckpointSaved, Message, Observations, Receipt, Resumed
from evalstop_service.ingest.changes import append
from evalstop_service.ingest.run_state import SAVE_EVERY
from evalstop_service.runs.watched_metrics import WatchedMetrics
from evalstop_service.store import observations
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from msgspec.structs import replace

from tests.service.fake_detectors import FakeDetector
from tests.service.project_fixture import NOW, ProjectFixture, evals

FAILS_AT = 3


class FailingDetector(FakeDetector, frozen=True):
    """Raises at one step; `calls_at`: it calls for a stop from this step on."""

    calls_at: int = 1_000_000

    name: ClassVar[str] = "failing"
    judges_first_evals: ClassVar[bool] = True

    def step(self, state: int, observation: Observation) -> tuple[int, Evidence]:
        if observation.step == FAILS_AT:
            raise ZeroDivisionError("no\x00where")
        return state + 1, Evidence(Kind.COUNT, float(observation.step >= self.calls_at))


def open_failing_run(project: ProjectFixture, *, calls_at: int = 1_000_000) -> Run:
    """A run with one observation, in the cache with a policy that fails."""
    run = project.open_run()
    project.post_observations(run, evals(0.5))
    state = project.cached_state(run)
    detector = FailingDetector(calls_at)
    policy = Policy("failing", (Member(detector, detector.thresholds),))
    watch = WatchedMetrics(state.run, policy)
    project.cache.put_states([replace(state, watch=watch, monitor=start(policy))])
    return run


def message(project: ProjectFixture, run: Run, *scores: float, start: int) -> Message:
    return Message(project.id, run.id, Observations(tuple(evals(*scores, start=start))))


def test_observations_of_a_failing_run_are_stored_and_the_failure_is_recorded(project: ProjectFixture) -> None:
    """Neither the failing post nor a later one is refused, and another run of the same commit is stored as well."""
    run, other = open_failing_run(project), project.open_run()
    unjudged = project.read_counter("evalstop_unjudged_runs_total")
    first = message(project, run, 0.5, 0.6, 0.7, start=2)
    receipts = project.submit_all([first, message(project, other, 0.5, start=1)])
    receipts += project.submit_all([message(project, run, 0.8, start=5)])
    assert [receipt.accepted for receipt in receipts if isinstance(receipt, Receipt)] == [3, 1, 1]
    failure = project.load_run(run).detector_failure
    assert failure == f"a detector failed at step {FAILS_AT}: ZeroDivisionError('no\\x00where')"
    assert project.load_run(other).detector_failure is None
    assert project.load_run(run).last_step == 5
    assert project.read_counter("evalstop_unjudged_runs_total") == unjudged + 1


class FailingPolicy(Policy, frozen=True):
    """Raises when it judges, from one step on."""

    def judge(self, evidence: Sequence[Evidence | None], step: int, evals: int, opening: Any = None) -> Verdict:
        if step >= FAILS_AT:
            raise ZeroDivisionError
        return super().judge(evidence, step, evals)


def test_failed_judgment_ends_the_judgment_of_its_run(project: ProjectFixture) -> None:
    """A batch is judged at its end, and the failure names the step from which on no verdict was found."""
    run = project.open_run()
    project.post_observations(run, evals(0.5))
    state = project.cached_state(run)
    policy = FailingPolicy("failing", (Member(KDecline(k=3), KDecline(k=3).thresholds),))
    watch = WatchedMetrics(state.run, policy)
    project.cache.put_states([replace(state, watch=watch, monitor=start(policy))])
    project.post_observations(run, evals(*[0.5] * 6, start=2))
    assert project.load_run(run).detector_failure == f"a detector failed at step {FAILS_AT}: ZeroDivisionError()"


@pytest.mark.parametrize("at_once", [True, False])
def test_verdict_before_a_failure_stands_however_the_observations_arrived(
    project: ProjectFixture, at_once: bool
) -> None:
    """A stop that was reached before the failure becomes a decision."""
    run = open_failing_run(project, calls_at=2)
    posts = [[1, 2, 3, 4]] if at_once else [[1], [2], [3], [4]]
    for steps in posts:
        project.post_observations(run, evals(*[0.5] * len(steps), start=steps[0]))
    assert project.load_run(run).verdict.verdict is Call.STOP
    assert project.load_run(run).verdict.step == 2
    assert project.find_decision(run) is not None
    assert project.load_run(run).detector_failure is not None


def test_run_is_judged_again_once_its_monitor_is_replayed_without_the_failure(project: ProjectFixture) -> None:
    """A new attempt begins without the observation that made the detector fail."""
    run = open_failing_run(project)
    project.post_observations(run, evals(0.5, 0.5, 0.5, start=2))
    project.submit(run, CheckpointSaved(1, "s3://bucket/1"))
    assert project.load_run(run).detector_failure is not None
    project.submit(run, Resumed(1, "trainer"))
    assert project.load_run(run).detector_failure is None


def test_run_is_judged_again_by_a_process_whose_detectors_do_not_fail(project: ProjectFixture) -> None:
    """All its observations count there, also those that were passed over."""
    run = open_failing_run(project)
    project.post_observations(run, evals(0.9, 0.8, 0.7, 0.6, start=2))
    project.cache.drop_states([run.id])
    project.post_observations(run, evals(0.5, start=6), NOW)
    state = project.cached_state(run)
    assert state.monitor.evals == 6
    assert project.load_run(run).detector_failure is None


def test_posts_of_a_failing_run_have_no_consequences(project: ProjectFixture) -> None:
    """They are saved by the hot statement alone: a monitor that passed over observations is never stored."""
    run = open_failing_run(project)
    project.post_observations(run, evals(*[0.5] * SAVE_EVERY, start=1))
    project.post_observations(run, evals(0.5, start=SAVE_EVERY + 1))
    state = project.cached_state(run)
    assert (state.failure is not None, state.unsaved >= SAVE_EVERY) == (True, True)
    (point,) = evals(0.5, start=SAVE_EVERY + 2)
    changes = append(state, [Message(project.id, run.id, Observations((point,)))], None, NOW)
    assert (len(changes.answers), changes.follows) == (1, False)


def test_replay_names_the_failure_of_a_detector(project: ProjectFixture) -> None:
    """A backtest lists it as the error of this run, and goes on with the others."""
    run = project.open_run()
    project.post_observations(run, evals(*[0.5] * (FAILS_AT + 2)))
    policy = Policy("failing", (Member(FailingDetector(), FailingDetector.thresholds),))
    with project.database.reading() as tx, pytest.raises(DetectorError, match="a detector failed: ZeroDivisionError"):
        replay_run(tx, run, policy)


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
