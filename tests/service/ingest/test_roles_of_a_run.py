"""Runs whose metrics get their roles while they go on: recognised with each new name, and corrected by a person."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from evalstop_service.errors import Conflict
from evalstop_service.ingest import CheckpointSaved, Observations, RolesCorrected, RunCache, open_run
from evalstop_service.rules.decision_lifecycle import Mode
from evalstop_service.rules.role_recognition import MetricFields
from evalstop_service.rules.run_results import RawMaximum
from evalstop_service.store import audit, projects
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.service.project_fixture import DECLINING_EVALS, NOW, ProjectFixture

LAWS = settings(
    max_examples=min(12, settings().max_examples),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

GOLD: MetricFields = {"role": "eval", "direction": "maximize"}


def falling(metric: str) -> list[PostedObservation]:
    return [PostedObservation(metric, point.step, point.value) for point in DECLINING_EVALS]


def test_recognised_while_it_runs(project: ProjectFixture) -> None:
    """A run that says nothing of its metrics gets its roles by their names, and a stop by what was seen before."""
    run = project.open_run(recognise=True, policy="paper")
    assert (run.metrics, run.recognition is not None) == ({}, True)
    project.submit(run, CheckpointSaved(1, "file:///1"))
    project.post_observations(run, [PostedObservation("train_runtime", point.step, 1.0) for point in DECLINING_EVALS])
    receipt = project.post_observations(run, falling("eval_accuracy"))
    assert receipt.run.metrics == {"eval_accuracy": GOLD}
    assert receipt.run.verdict.verdict == "stop"
    assert receipt.run.best_checkpoint is not None
    assert project.load_run(run).metrics == receipt.run.metrics
    assert project.load_run(run).verdict == receipt.run.verdict


def test_a_better_candidate_takes_the_role(project: ProjectFixture) -> None:
    """When a better gold metric comes in, the run is judged by it alone, from its first observation on."""
    run = project.open_run(recognise=True, policy="paper")
    assert project.post_observations(run, falling("eval_loss")).run.verdict.verdict == "continue"
    before = project.load_run(run)
    after = project.post_observations(run, falling("eval_accuracy")).run
    assert after.rewritten_version > before.rewritten_version
    assert [name for name, role in after.metrics.items() if role["role"] == "eval"] == ["eval_accuracy"]
    assert after.verdict.verdict == "stop"
    assert after.raw_maximum == RawMaximum(1, 0.9)


@LAWS
@given(cuts=st.lists(st.integers(1, 14), unique=True), shuffled=st.permutations(range(15)))
def test_the_order_of_names_changes_nothing(project: ProjectFixture, cuts: list[int], shuffled: list[int]) -> None:
    """However the points of all metrics are mixed and cut into batches, roles, verdict and pointers are the same."""
    points = [*falling("eval_accuracy"), *falling("reward"), *falling("eval_loss")]
    whole, parts = project.open_run(recognise=True, policy="paper"), project.open_run(recognise=True, policy="paper")
    project.post_observations(whole, points)
    mixed, bounds = [points[place] for place in shuffled], [0, *sorted(cuts), len(points)]
    for start, end in itertools.pairwise(bounds):
        project.post_observations(parts, mixed[start:end])
    assert essence(project.load_run(parts)) == essence(project.load_run(whole))


def essence(run: Run) -> tuple[object, ...]:
    return run.metrics, run.recognition, run.verdict.verdict, run.raw_maximum


def test_a_person_has_the_last_word(project: ProjectFixture) -> None:
    """A correction is judged by at once, is on the audit log, and no new name changes it; neither does the trainer."""
    run = project.open_run(recognise=True, policy="paper")
    project.post_observations(
        run, [*falling("odd"), *[PostedObservation("eval_accuracy", point.step, 0.5) for point in DECLINING_EVALS]]
    )
    receipt = project.submit(run, RolesCorrected({"odd": GOLD}, "dana"))
    assert receipt.run.verdict.verdict == "stop"
    assert receipt.run.recognition is not None
    assert receipt.run.recognition.sources == {"odd": "person"}
    with project.database.reading() as tx:
        (entry,) = audit.list_entries(tx, project.id, action="run.metrics_changed")
    assert (entry.actor, entry.details["after"]) == ("dana", {"odd": GOLD})
    assert project.post_observations(run, falling("eval_f1")).run.metrics == {"odd": GOLD}
    assert project.open_run(run.name, metrics={"eval_accuracy": GOLD}).metrics == {"odd": GOLD}


def test_correcting_twice_is_harmless(project: ProjectFixture) -> None:
    """The same correction, sent again, changes nothing and is written down once."""
    run = project.open_run()
    first = project.submit(run, RolesCorrected({"odd": GOLD}, "dana")).run
    assert project.submit(run, RolesCorrected({"odd": GOLD}, "dana")).run.version == first.version
    with project.database.reading() as tx:
        assert len(audit.list_entries(tx, project.id, action="run.metrics_changed")) == 1


def test_another_process_notices(project: ProjectFixture) -> None:
    """A process that remembers a run by its old roles judges by the new ones as soon as it takes more of it in."""
    other = replace(project, cache=RunCache())
    run = project.open_run(policy="paper")
    other.post_observations(run, falling("odd"))
    project.submit(run, RolesCorrected({"odd": GOLD}, "dana"))
    receipt = other.post_observations(run, [PostedObservation("odd", 5, 0.5)])
    assert receipt.run.metrics == {"odd": GOLD}
    assert receipt.run.verdict.verdict == "stop"


def test_gold_that_is_taken_away(project: ProjectFixture) -> None:
    """When nothing is gold any more, nothing is pointed at any more."""
    run = project.open_run()
    project.submit(run, CheckpointSaved(1, "file:///1"))
    assert project.post_observations(run, DECLINING_EVALS).run.best_checkpoint is not None
    after = project.submit(run, RolesCorrected({}, "dana")).run
    assert (after.best_checkpoint, after.raw_maximum) == (None, None)


def test_patterns_of_the_project(project: ProjectFixture) -> None:
    """In a project with patterns, runs that do not say their metrics get their roles by them."""
    with project.database.transaction() as tx:
        project_row = projects.lock_project(tx, project.id)
        projects.update_project(tx, replace(project_row, role_patterns=[{"pattern": "odd/*", "role": "eval"}]))
    run = project.open_run(policy="paper")
    assert project.post_observations(run, falling("odd/one")).run.verdict.verdict == "stop"
    said = project.open_run(metrics={"odd/two": GOLD | {"direction": "minimize"}})
    assert said.recognition is None


def test_another_word_of_the_trainer(project: ProjectFixture) -> None:
    """A run whose roles are recognised cannot be opened with others by its trainer."""
    run = project.open_run(recognise=True)
    with pytest.raises(Conflict):
        project.open_run(run.name, metrics={"odd": GOLD})
    assert open_run.OpenRequest("n").recognise is False


def test_names_without_end(project: ProjectFixture) -> None:
    """Past a thousand names the roles stay as they are, and points are taken as ever."""
    run = project.open_run(recognise=True)
    project.post_observations(run, [PostedObservation(f"m{number}", 0, 1.0) for number in range(1000)])
    receipt = project.submit(run, Observations((PostedObservation("eval_accuracy", 0, 1.0),)), NOW)
    assert (receipt.accepted, receipt.run.metrics) == (1, {})


def test_a_guess_may_suspect_but_never_stops(project: ProjectFixture) -> None:
    """A metric whose role only its words tell raises a suspicion that says what to do, in shadow mode too."""
    for mode in Mode:
        run = project.open_run(recognise=True, policy="paper", mode=mode)
        receipt = project.post_observations(run, falling("eval_gsm8k"))
        assert receipt.run.metrics == {"eval_gsm8k": GOLD}
        assert receipt.run.verdict.verdict == "suspect"
        assert "guessed; confirm it to let it stop" in receipt.run.verdict.reason
        assert receipt.decision is None
        assert receipt.run.recognition is not None
        assert receipt.run.recognition.origins == {"eval_gsm8k": "guessed"}
        assert any("eval_gsm8k" in warning for warning in receipt.run.recognition.warnings)


def test_a_confirmed_guess_stops_at_once(project: ProjectFixture) -> None:
    """A person who repeats the guessed role declares it: the run is judged anew, and what was held back follows."""
    run = project.open_run(recognise=True, policy="paper")
    guessed = project.post_observations(run, falling("eval_gsm8k")).run
    receipt = project.submit(run, RolesCorrected(guessed.metrics, "dana"))
    assert receipt.run.metrics == guessed.metrics
    assert receipt.run.verdict.verdict == "stop"
    assert receipt.decision is not None
    assert receipt.run.recognition is not None
    assert receipt.run.recognition.origins == {"eval_gsm8k": "declared"}


def test_a_restored_run_keeps_what_is_guessed(project: ProjectFixture) -> None:
    """A process that reads the run from the database stops nothing on a guess either."""
    run = project.open_run(recognise=True, policy="paper")
    project.post_observations(run, falling("eval_gsm8k"))
    other = replace(project, cache=RunCache())
    receipt = other.post_observations(run, [PostedObservation("eval_gsm8k", DECLINING_EVALS[-1].step + 1, 0.0)])
    assert receipt.run.verdict.verdict == "suspect"
    assert receipt.decision is None


def test_a_falling_loss_of_one_of_several_eval_sets_is_a_good_sign(project: ProjectFixture) -> None:
    """The loss of an eval set that is named after a benchmark is minimized, and its runtime makes it recognized."""
    run = project.open_run(recognise=True, policy="paper")
    for name in ("eval_gsm8k_runtime", "eval_gsm8k_samples_per_second", "train_runtime"):
        project.post_observations(run, [PostedObservation(name, 0, 1.0)])
    after = project.post_observations(run, falling("eval_gsm8k_loss")).run
    assert after.metrics == {"eval_gsm8k_loss": {"role": "eval", "direction": "minimize"}}
    assert after.recognition is not None
    assert after.recognition.origins == {"eval_gsm8k_loss": "recognized"}
    assert after.verdict.verdict == "continue"


def test_a_guess_that_is_recognized_later_is_judged_anew(project: ProjectFixture) -> None:
    """When a further name tells the trainer, the same role and direction are no guess any more."""
    run = project.open_run(recognise=True, policy="paper")
    rising = [PostedObservation("eval_gsm8k_loss", point.step, -point.value) for point in DECLINING_EVALS]
    assert project.post_observations(run, rising).run.verdict.verdict == "suspect"
    names = ("eval_gsm8k_runtime", "train_runtime")
    after = project.post_observations(
        run, [PostedObservation(name, DECLINING_EVALS[-1].step, 1.0) for name in names]
    ).run
    assert after.verdict.verdict == "stop"
