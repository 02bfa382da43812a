"""Metric roles that change while a run goes on: recognized with each new name, or corrected by a person."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from evalstop_detectors.roles.recognition import NO_EVAL
from evalstop_lab.replay.sources import read_runs
from evalstop_service.domain.decision_lifecycle import Mode
from evalstop_service.domain.run import COMBINED_METRIC, Call, MetricFields, RawMaximum
from evalstop_service.errors import Conflict
from evalstop_service.ingest import CheckpointSaved, Observations, RolesCorrected, RunCache, open_run
from evalstop_service.runs import metric_roles
from evalstop_service.store import audit
from evalstop_service.store.observations import PostedObservation, load_series
from evalstop_service.store.runs import Run
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.service.project_fixture import DECLINING_EVALS, NOW, ProjectFixture

HYPOTHESIS_SETTINGS = settings(
    max_examples=min(5, settings().max_examples),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

EVAL_ROLE: MetricFields = {"role": "eval", "direction": "maximize"}


def build_declining(metric: str) -> list[PostedObservation]:
    return [PostedObservation(metric, observation.step, observation.value) for observation in DECLINING_EVALS]


def test_role_is_recognized_while_the_run_goes_on(project: ProjectFixture) -> None:
    """A run without declared metrics gets roles by their names, and is judged by all earlier observations."""
    run = project.open_run(recognise=True, policy="paper")
    assert (run.metrics, run.recognition is not None) == ({}, True)
    project.submit(run, CheckpointSaved(1, "file:///1"))
    project.post_observations(
        run, [PostedObservation("train_runtime", observation.step, 1.0) for observation in DECLINING_EVALS]
    )
    receipt = project.post_observations(run, build_declining("eval_accuracy"))
    assert receipt.run.metrics == {"eval_accuracy": EVAL_ROLE}
    assert receipt.run.verdict.verdict == "stop"
    assert receipt.run.best_checkpoint is not None
    assert project.load_run(run).metrics == receipt.run.metrics
    assert project.load_run(run).verdict == receipt.run.verdict


def test_better_candidate_takes_the_eval_role(project: ProjectFixture) -> None:
    """When a better eval metric appears, the run is judged by it alone, from its first observation on."""
    run = project.open_run(recognise=True, policy="paper")
    assert project.post_observations(run, build_declining("eval_loss")).run.verdict.verdict == "continue"
    before = project.load_run(run)
    after = project.post_observations(run, build_declining("eval_accuracy")).run
    assert after.rewritten_version > before.rewritten_version
    assert [name for name, role in after.metrics.items() if role["role"] == "eval"] == ["eval_accuracy"]
    assert after.verdict.verdict == "stop"
    assert after.raw_maximum == RawMaximum(1, 0.9)


@HYPOTHESIS_SETTINGS
@given(cuts=st.lists(st.integers(1, 14), unique=True), shuffled=st.permutations(range(15)))
def test_order_of_names_does_not_matter(project: ProjectFixture, cuts: list[int], shuffled: list[int]) -> None:
    """However observations of several metrics are shuffled and batched, roles, verdict and raw maximum are the same."""
    observations = [*build_declining("eval_accuracy"), *build_declining("reward"), *build_declining("eval_loss")]
    single_batch, batched = (
        project.open_run(recognise=True, policy="paper"),
        project.open_run(recognise=True, policy="paper"),
    )
    project.post_observations(single_batch, observations)
    shuffled_observations, bounds = [observations[index] for index in shuffled], [0, *sorted(cuts), len(observations)]
    for start, end in itertools.pairwise(bounds):
        project.post_observations(batched, shuffled_observations[start:end])
    assert summarize_run(project.load_run(batched)) == summarize_run(project.load_run(single_batch))


LOSSES = (3, 2, 1.5, 1.2, 1.3, 1.5, 1.7, 1.9, 2.1, 2.3, 2.5, 2.8)


@HYPOTHESIS_SETTINGS
@given(cuts=st.lists(st.integers(1, 23), unique=True), shuffled=st.none() | st.permutations(range(24)))
@example(cuts=list(range(1, 24)), shuffled=None)
def test_constant_eval_does_not_hide_the_loss(
    project: ProjectFixture, cuts: list[int], shuffled: list[int] | None
) -> None:
    """An eval that stays at 0 gives way to the loss, however its observations arrive: the run is judged as with
    the loss alone."""
    alone, both = (project.open_run(recognise=True, policy="paper") for _ in range(2))
    losses = [PostedObservation("eval_loss", step, loss) for step, loss in enumerate(LOSSES)]
    project.post_observations(alone, losses)
    observations = [point for loss in losses for point in (PostedObservation("eval_exact_match", loss.step, 0.0), loss)]
    observations = observations if shuffled is None else [observations[index] for index in shuffled]
    for start, end in itertools.pairwise([0, *sorted(cuts), len(observations)]):
        project.post_observations(both, observations[start:end])
    expected, run = project.load_run(alone), project.load_run(both)
    assert (run.metrics, run.verdict, run.raw_maximum) == (expected.metrics, expected.verdict, expected.raw_maximum)
    assert run.verdict.verdict == "stop"
    assert run.recognition is not None
    assert "first 5 evals" in run.recognition.reasons["eval_exact_match"]


@pytest.mark.parametrize(("score", "is_hidden"), [("eval_match_accuracy", True), ("eval_exact_match", False)])
def test_eval_that_changes_hides_another_if_it_is_known(project: ProjectFixture, score: str, is_hidden: bool) -> None:
    """An eval whose fifth value differs from the first ones keeps its role; a guess has none beside a known loss."""
    run = project.open_run(recognise=True, policy="paper")
    for step, loss in enumerate(LOSSES):
        value = PostedObservation(score, step, float(step >= 4))
        project.post_observations(run, [value, PostedObservation("eval_loss", step, loss)])
    found = project.load_run(run)
    expected = ("eval_loss", "stop") if is_hidden else (score, "continue")
    assert ([*found.metrics], found.verdict.verdict) == ([expected[0]], expected[1])


@HYPOTHESIS_SETTINGS
@given(cuts=st.lists(st.integers(1, 21), unique=True), shuffled=st.none() | st.permutations(range(22)))
def test_eval_sets_are_combined_as_in_a_replay(
    project: ProjectFixture, tmp_path: Path, cuts: list[int], shuffled: list[int] | None
) -> None:
    """The same metric of several sets is judged by their mean, however it arrives, and a replay of a file with the same
    values has the same mean."""
    points = [
        PostedObservation(f"eval_{name}_f1", step, scale * (3 - loss))
        for step, loss in enumerate(LOSSES)
        for name, scale in (("squad", 1.0), ("triviaqa", 50.0))
        if name == "squad" or step not in (0, 5)
    ]
    order = points if shuffled is None else [points[index] for index in shuffled]
    run = project.open_run(recognise=True, policy="paper")
    for start, end in itertools.pairwise([0, *sorted(cuts), len(order)]):
        project.post_observations(run, order[start:end])
    found = project.load_run(run)
    assert found.metrics == {"eval_squad_f1": EVAL_ROLE, "eval_triviaqa_f1": EVAL_ROLE}
    assert found.recognition is not None
    assert found.recognition.warnings[0].startswith("eval_squad_f1, eval_triviaqa_f1: role eval")
    with project.database.reading() as tx:
        stored = [(point.step, point.value) for point in load_series(tx, run.id, [COMBINED_METRIC])]
    rows = [{"step": point.step, point.metric: point.value} for point in points]
    file = tmp_path / "log.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = read_runs([file])
    runs.settle()
    (past,) = runs.by_name.values()
    assert stored == [(score.step, score.value) for score in past.scores()]


def summarize_run(run: Run) -> tuple[object, ...]:
    return run.metrics, run.recognition, run.verdict.verdict, run.raw_maximum


def test_correction_by_a_person_is_final(project: ProjectFixture) -> None:
    """A correction applies at once and is audited; neither new names nor the trainer change it."""
    run = project.open_run(recognise=True, policy="paper")
    project.post_observations(
        run,
        [
            *build_declining("odd"),
            *[PostedObservation("eval_accuracy", observation.step, 0.5) for observation in DECLINING_EVALS],
        ],
    )
    receipt = project.submit(run, RolesCorrected({"odd": EVAL_ROLE}, "dana"))
    assert receipt.run.verdict.verdict == "stop"
    assert receipt.run.recognition is not None
    assert receipt.run.recognition.sources == {"odd": "person"}
    with project.database.reading() as tx:
        (entry,) = audit.list_entries(tx, project.id, action="run.metrics_changed")
    assert (entry.actor, entry.details["after"]) == ("dana", {"odd": EVAL_ROLE})
    assert project.post_observations(run, build_declining("eval_f1")).run.metrics == {"odd": EVAL_ROLE}
    assert project.open_run(run.name, metrics={"eval_accuracy": EVAL_ROLE}).metrics == {"odd": EVAL_ROLE}


def test_repeated_correction_changes_nothing(project: ProjectFixture) -> None:
    """The same correction again changes nothing and is audited once."""
    run = project.open_run()
    first = project.submit(run, RolesCorrected({"odd": EVAL_ROLE}, "dana")).run
    assert project.submit(run, RolesCorrected({"odd": EVAL_ROLE}, "dana")).run.version == first.version
    with project.database.reading() as tx:
        assert len(audit.list_entries(tx, project.id, action="run.metrics_changed")) == 1


def test_other_process_applies_a_correction(project: ProjectFixture) -> None:
    """A process that cached the run with its old roles applies the new ones with its next message."""
    other = replace(project, cache=RunCache())
    run = project.open_run(policy="paper")
    other.post_observations(run, build_declining("odd"))
    project.submit(run, RolesCorrected({"odd": EVAL_ROLE}, "dana"))
    receipt = other.post_observations(run, [PostedObservation("odd", 5, 0.5)])
    assert receipt.run.metrics == {"odd": EVAL_ROLE}
    assert receipt.run.verdict.verdict == "stop"


def test_run_without_evals_has_no_best_checkpoint(project: ProjectFixture) -> None:
    """When the last eval loses its role, best checkpoint and raw maximum are cleared."""
    run = project.open_run()
    project.submit(run, CheckpointSaved(1, "file:///1"))
    assert project.post_observations(run, DECLINING_EVALS).run.best_checkpoint is not None
    after = project.submit(run, RolesCorrected({}, "dana")).run
    assert (after.best_checkpoint, after.raw_maximum) == (None, None)


def test_recognized_roles_cannot_be_declared_later(project: ProjectFixture) -> None:
    """A run whose roles are recognized cannot be reopened with declared ones."""
    run = project.open_run(recognise=True)
    with pytest.raises(Conflict):
        project.open_run(run.name, metrics={"odd": EVAL_ROLE})
    assert open_run.OpenRequest("n").recognise is False


def test_roles_are_fixed_after_a_thousand_names(project: ProjectFixture) -> None:
    """After a thousand names roles no longer change, and observations are still accepted."""
    run = project.open_run(recognise=True)
    project.post_observations(run, [PostedObservation(f"m{number}", 0, 1.0) for number in range(1000)])
    receipt = project.submit(run, Observations((PostedObservation("eval_accuracy", 0, 1.0),)), NOW)
    assert (receipt.accepted, receipt.run.metrics) == (1, {})


def test_guessed_role_only_suspects(project: ProjectFixture) -> None:
    """A metric with a guessed role raises a suspicion that says how to confirm it, in any mode."""
    for mode in Mode:
        run = project.open_run(recognise=True, policy="paper", mode=mode)
        receipt = project.post_observations(run, build_declining("eval_gsm8k"))
        assert receipt.run.metrics == {"eval_gsm8k": EVAL_ROLE}
        assert receipt.run.verdict.verdict == "suspect"
        assert "guessed; confirm it to let it stop" in receipt.run.verdict.reason
        assert receipt.decision is None
        assert receipt.run.recognition is not None
        assert receipt.run.recognition.origins == {"eval_gsm8k": "guessed"}
        assert any("eval_gsm8k" in warning for warning in receipt.run.recognition.warnings)


def test_confirmed_guess_stops_the_run(project: ProjectFixture) -> None:
    """Confirming a guessed role declares it: the run is judged again and stopped."""
    run = project.open_run(recognise=True, policy="paper")
    guessed = project.post_observations(run, build_declining("eval_gsm8k")).run
    receipt = project.submit(run, RolesCorrected(guessed.metrics, "dana"))
    assert receipt.run.metrics == guessed.metrics
    assert receipt.run.verdict.verdict == "stop"
    assert receipt.decision is not None
    assert receipt.run.recognition is not None
    assert receipt.run.recognition.origins == {"eval_gsm8k": "declared"}


def test_reloaded_run_keeps_guessed_roles(project: ProjectFixture) -> None:
    """A process that reloads the run from the database does not stop it on a guess either."""
    run = project.open_run(recognise=True, policy="paper")
    project.post_observations(run, build_declining("eval_gsm8k"))
    other = replace(project, cache=RunCache())
    receipt = other.post_observations(run, [PostedObservation("eval_gsm8k", DECLINING_EVALS[-1].step + 1, 0.0)])
    assert receipt.run.verdict.verdict == "suspect"
    assert receipt.decision is None


def test_loss_of_a_named_eval_set_is_minimized(project: ProjectFixture) -> None:
    """The loss of an eval set named after a benchmark is minimized; its runtime metric makes the role certain."""
    run = project.open_run(recognise=True, policy="paper")
    for name in ("eval_gsm8k_runtime", "eval_gsm8k_samples_per_second", "train_runtime"):
        project.post_observations(run, [PostedObservation(name, 0, 1.0)])
    after = project.post_observations(run, build_declining("eval_gsm8k_loss")).run
    assert after.metrics == {"eval_gsm8k_loss": {"role": "eval", "direction": "minimize"}}
    assert after.recognition is not None
    assert after.recognition.origins == {"eval_gsm8k_loss": "recognized"}
    assert after.verdict.verdict == "continue"


def test_guess_recognized_later_is_judged_again(project: ProjectFixture) -> None:
    """When another name identifies the trainer, the same role is no longer a guess and the run is stopped."""
    run = project.open_run(recognise=True, policy="paper")
    rising = [
        PostedObservation("eval_gsm8k_loss", observation.step, -observation.value) for observation in DECLINING_EVALS
    ]
    assert project.post_observations(run, rising).run.verdict.verdict == "suspect"
    names = ("eval_gsm8k_runtime", "train_runtime")
    after = project.post_observations(
        run, [PostedObservation(name, DECLINING_EVALS[-1].step, 1.0) for name in names]
    ).run
    assert after.verdict.verdict == "stop"


DIP = [0.0, -0.12, -0.25, -0.37, -0.5, -0.63, -0.75, -0.88, -1.0]
EVALS = [PostedObservation("eval", 10 * place, value) for place, value in enumerate(DIP, start=1)]


def list_rates(metric: str, scale: float) -> list[PostedObservation]:
    return [PostedObservation(metric, step, scale * step) for step in range(5, 95, 5)]


@pytest.mark.parametrize("metrics", [("learning_rate",), ("lr-AdamW", "actor/lr"), ("grad_norm",)])
def test_rising_learning_rate_holds_a_stop_back(project: ProjectFixture, metrics: tuple[str, ...]) -> None:
    """Whatever its trainer calls it, however many optimizers log one, and in whatever order it arrives."""
    rates = [point for place, metric in enumerate(metrics) for point in list_rates(metric, 1e-6 * (1 + place))]
    points = sorted([*EVALS, *rates], key=lambda point: (point.step, point.metric == "eval"))
    shuffled = random.Random(1).sample(points, len(points))
    runs = [project.open_run(policy="early", total_steps=300) for _ in range(3)]
    project.post_observations(runs[0], points)
    for point in points:
        project.post_observations(runs[1], [point])
    for first in range(0, len(shuffled), 4):
        project.post_observations(runs[2], shuffled[first : first + 4])
    verdicts = [project.load_run(run).verdict for run in runs]
    assert {verdict.verdict for verdict in verdicts} == {Call.STOP if metrics == ("grad_norm",) else Call.SUSPECT}
    assert len({verdict.reason for verdict in verdicts}) == 1


def test_later_learning_rates_replay_nothing(project: ProjectFixture) -> None:
    """Once it has peaked the learning rate changes no state, so evals of earlier steps are not late."""
    run = project.open_run()
    project.post_observations(run, [PostedObservation("lr", step, 1.0) for step in (1, 2)])
    before = project.cached_monitor(run)
    project.post_observations(run, [PostedObservation("lr", step, 2.0) for step in (30, 40)])
    assert project.cached_monitor(run) == before
    assert before is not None
    assert before.last == (2, 0)


NAMES = st.lists(
    st.sampled_from(["loss", "reward", "kl", "eval_reward", "eval_accuracy", "val-core/x/mean@4", "critic/score/mean"]),
    unique=True,
)


def load_no_values(metric: str) -> list[float]:
    return []


def test_missing_eval_is_a_warning() -> None:
    """Without an eval metric there is a warning."""
    assert NO_EVAL in metric_roles.assign_roles({"reward", "kl"}, {}, load_no_values).recognition.warnings
    assert NO_EVAL in metric_roles.NOTHING_YET.warnings


def test_direction_that_contradicts_the_name_is_a_warning(project: ProjectFixture) -> None:
    """An error rate that is maximized, as by a default of transformers, and a score that is minimized are warned of."""
    for metric, direction, is_wrong in (
        *(("eval_wer", "maximize", True), ("eval_wer", "minimize", False), ("eval_f1", "minimize", True)),
        *(("odd", "minimize", False), ("odd", "maximize", False)),
    ):
        run = project.open_run(metrics={metric: {"role": "eval", "direction": direction}})
        warnings = metric_roles.describe_roles(run).warnings
        assert [metric in warning and "worst checkpoint" in warning for warning in warnings] == [True] * is_wrong


@given(names=NAMES)
def test_each_role_has_at_most_one_metric(names: list[str]) -> None:
    """Whatever the order of names, each role has at most one metric, and each metric its source."""
    assigned = metric_roles.assign_roles(names, {}, load_no_values)
    roles = [role["role"] for role in assigned.metrics.values()]
    assert len(roles) == len(set(roles))
    assert set(assigned.recognition.sources) == set(assigned.metrics)
    assert assigned == metric_roles.assign_roles(names[::-1], {}, load_no_values)
