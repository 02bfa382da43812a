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

from tests.service.scenes import FALLING, NOW, Scene

LAWS = settings(
    max_examples=min(12, settings().max_examples),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

GOLD: MetricFields = {"role": "eval", "direction": "maximize"}


def falling(metric: str) -> list[PostedObservation]:
    return [PostedObservation(metric, point.step, point.value) for point in FALLING]


def test_recognised_while_it_runs(scene: Scene) -> None:
    """A run that says nothing of its metrics gets its roles by their names, and a stop by what was seen before."""
    run = scene.open(recognise=True, policy="paper")
    assert (run.metrics, run.recognition is not None) == ({}, True)
    scene.take(run, CheckpointSaved(1, "file:///1"))
    scene.post(run, [PostedObservation("train_runtime", point.step, 1.0) for point in FALLING])
    receipt = scene.post(run, falling("eval_accuracy"))
    assert receipt.run.metrics == {"eval_accuracy": GOLD}
    assert receipt.run.verdict.verdict == "stop"
    assert receipt.run.best_checkpoint is not None
    assert scene.read(run).metrics == receipt.run.metrics
    assert scene.read(run).verdict == receipt.run.verdict


def test_a_better_candidate_takes_the_role(scene: Scene) -> None:
    """When a better gold metric comes in, the run is judged by it alone, from its first observation on."""
    run = scene.open(recognise=True, policy="paper")
    assert scene.post(run, falling("eval_loss")).run.verdict.verdict == "continue"
    before = scene.read(run)
    after = scene.post(run, falling("eval_accuracy")).run
    assert after.rewritten_version > before.rewritten_version
    assert [name for name, role in after.metrics.items() if role["role"] == "eval"] == ["eval_accuracy"]
    assert after.verdict.verdict == "stop"
    assert after.raw_maximum == RawMaximum(1, 0.9)


@LAWS
@given(cuts=st.lists(st.integers(1, 14), unique=True), shuffled=st.permutations(range(15)))
def test_the_order_of_names_changes_nothing(scene: Scene, cuts: list[int], shuffled: list[int]) -> None:
    """However the points of all metrics are mixed and cut into batches, roles, verdict and pointers are the same."""
    points = [*falling("eval_accuracy"), *falling("reward"), *falling("eval_loss")]
    whole, parts = scene.open(recognise=True, policy="paper"), scene.open(recognise=True, policy="paper")
    scene.post(whole, points)
    mixed, bounds = [points[place] for place in shuffled], [0, *sorted(cuts), len(points)]
    for start, end in itertools.pairwise(bounds):
        scene.post(parts, mixed[start:end])
    assert essence(scene.read(parts)) == essence(scene.read(whole))


def essence(run: Run) -> tuple[object, ...]:
    return run.metrics, run.recognition, run.verdict.verdict, run.raw_maximum


def test_a_person_has_the_last_word(scene: Scene) -> None:
    """A correction is judged by at once, is on the audit log, and no new name changes it; neither does the trainer."""
    run = scene.open(recognise=True, policy="paper")
    scene.post(run, [*falling("odd"), *[PostedObservation("eval_accuracy", point.step, 0.5) for point in FALLING]])
    receipt = scene.take(run, RolesCorrected({"odd": GOLD}, "dana"))
    assert receipt.run.verdict.verdict == "stop"
    assert receipt.run.recognition is not None
    assert receipt.run.recognition.sources == {"odd": "person"}
    with scene.database.reading() as tx:
        (entry,) = audit.list_entries(tx, scene.project_id, action="run.metrics_changed")
    assert (entry.actor, entry.details["after"]) == ("dana", {"odd": GOLD})
    assert scene.post(run, falling("eval_f1")).run.metrics == {"odd": GOLD}
    assert scene.open(run.name, metrics={"eval_accuracy": GOLD}).metrics == {"odd": GOLD}


def test_correcting_twice_is_harmless(scene: Scene) -> None:
    """The same correction, sent again, changes nothing and is written down once."""
    run = scene.open()
    first = scene.take(run, RolesCorrected({"odd": GOLD}, "dana")).run
    assert scene.take(run, RolesCorrected({"odd": GOLD}, "dana")).run.version == first.version
    with scene.database.reading() as tx:
        assert len(audit.list_entries(tx, scene.project_id, action="run.metrics_changed")) == 1


def test_another_process_notices(scene: Scene) -> None:
    """A process that remembers a run by its old roles judges by the new ones as soon as it takes more of it in."""
    other = replace(scene, cache=RunCache())
    run = scene.open(policy="paper")
    other.post(run, falling("odd"))
    scene.take(run, RolesCorrected({"odd": GOLD}, "dana"))
    receipt = other.post(run, [PostedObservation("odd", 5, 0.5)])
    assert receipt.run.metrics == {"odd": GOLD}
    assert receipt.run.verdict.verdict == "stop"


def test_gold_that_is_taken_away(scene: Scene) -> None:
    """When nothing is gold any more, nothing is pointed at any more."""
    run = scene.open()
    scene.take(run, CheckpointSaved(1, "file:///1"))
    assert scene.post(run, FALLING).run.best_checkpoint is not None
    after = scene.take(run, RolesCorrected({}, "dana")).run
    assert (after.best_checkpoint, after.raw_maximum) == (None, None)


def test_patterns_of_the_project(scene: Scene) -> None:
    """In a project with patterns, runs that do not say their metrics get their roles by them."""
    with scene.database.transaction() as tx:
        project = projects.lock_project(tx, scene.project_id)
        projects.update_project(tx, replace(project, role_patterns=[{"pattern": "odd/*", "role": "eval"}]))
    run = scene.open(policy="paper")
    assert scene.post(run, falling("odd/one")).run.verdict.verdict == "stop"
    said = scene.open(metrics={"odd/two": GOLD | {"direction": "minimize"}})
    assert said.recognition is None


def test_another_word_of_the_trainer(scene: Scene) -> None:
    """A run whose roles are recognised cannot be opened with others by its trainer."""
    run = scene.open(recognise=True)
    with pytest.raises(Conflict):
        scene.open(run.name, metrics={"odd": GOLD})
    assert open_run.OpenRequest("n").recognise is False


def test_names_without_end(scene: Scene) -> None:
    """Past a thousand names the roles stay as they are, and points are taken as ever."""
    run = scene.open(recognise=True)
    scene.post(run, [PostedObservation(f"m{number}", 0, 1.0) for number in range(1000)])
    receipt = scene.take(run, Observations((PostedObservation("eval_accuracy", 0, 1.0),)), NOW)
    assert (receipt.accepted, receipt.run.metrics) == (1, {})


def test_a_guess_may_suspect_but_never_stops(scene: Scene) -> None:
    """A metric whose role only its words tell raises a suspicion that says what to do, in shadow mode too."""
    for mode in Mode:
        run = scene.open(recognise=True, policy="paper", mode=mode)
        receipt = scene.post(run, falling("eval_gsm8k"))
        assert receipt.run.metrics == {"eval_gsm8k": GOLD}
        assert receipt.run.verdict.verdict == "suspect"
        assert "guessed; confirm it to let it stop" in receipt.run.verdict.reason
        assert receipt.decision is None
        assert receipt.run.recognition is not None
        assert receipt.run.recognition.origins == {"eval_gsm8k": "guessed"}
        assert any("eval_gsm8k" in warning for warning in receipt.run.recognition.warnings)


def test_a_confirmed_guess_stops_at_once(scene: Scene) -> None:
    """A person who repeats the guessed role declares it: the run is judged anew, and what was held back follows."""
    run = scene.open(recognise=True, policy="paper")
    guessed = scene.post(run, falling("eval_gsm8k")).run
    receipt = scene.take(run, RolesCorrected(guessed.metrics, "dana"))
    assert receipt.run.metrics == guessed.metrics
    assert receipt.run.verdict.verdict == "stop"
    assert receipt.decision is not None
    assert receipt.run.recognition is not None
    assert receipt.run.recognition.origins == {"eval_gsm8k": "declared"}


def test_a_restored_run_keeps_what_is_guessed(scene: Scene) -> None:
    """A process that reads the run from the database stops nothing on a guess either."""
    run = scene.open(recognise=True, policy="paper")
    scene.post(run, falling("eval_gsm8k"))
    other = replace(scene, cache=RunCache())
    receipt = other.post(run, [PostedObservation("eval_gsm8k", FALLING[-1].step + 1, 0.0)])
    assert receipt.run.verdict.verdict == "suspect"
    assert receipt.decision is None


def test_a_falling_loss_of_one_of_several_eval_sets_is_a_good_sign(scene: Scene) -> None:
    """The loss of an eval set that is named after a benchmark is minimized, and its runtime makes it recognized."""
    run = scene.open(recognise=True, policy="paper")
    for name in ("eval_gsm8k_runtime", "eval_gsm8k_samples_per_second", "train_runtime"):
        scene.post(run, [PostedObservation(name, 0, 1.0)])
    after = scene.post(run, falling("eval_gsm8k_loss")).run
    assert after.metrics == {"eval_gsm8k_loss": {"role": "eval", "direction": "minimize"}}
    assert after.recognition is not None
    assert after.recognition.origins == {"eval_gsm8k_loss": "recognized"}
    assert after.verdict.verdict == "continue"


def test_a_guess_that_is_recognized_later_is_judged_anew(scene: Scene) -> None:
    """When a further name tells the trainer, the same role and direction are no guess any more."""
    run = scene.open(recognise=True, policy="paper")
    rising = [PostedObservation("eval_gsm8k_loss", point.step, -point.value) for point in FALLING]
    assert scene.post(run, rising).run.verdict.verdict == "suspect"
    names = ("eval_gsm8k_runtime", "train_runtime")
    after = scene.post(run, [PostedObservation(name, FALLING[-1].step, 1.0) for name in names]).run
    assert after.verdict.verdict == "stop"
