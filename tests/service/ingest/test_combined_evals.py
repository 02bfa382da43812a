"""The eval of a run: the weighted mean of several, the best checkpoint by it, and its turn once the run has ended."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from evalstop_detectors import combine_values, start_combining
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.domain.run import COMBINED_METRIC, MetricFields
from evalstop_service.errors import Conflict
from evalstop_service.ingest import CheckpointSaved, Resumed, RolesCorrected
from evalstop_service.runs.watched_metrics import find_combined_evals, select_eval_values
from evalstop_service.store import cases, decisions, observations, tables
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run

from tests.service.project_fixture import (
    ProjectFixture,
    evals,
)

EVALS: dict[str, MetricFields] = {
    "code": {"role": "eval", "direction": "minimize"},
    "math": {"role": "eval", "direction": "maximize", "weight": 2.0},
    "chat": {"role": "eval", "direction": "maximize"},
}
EVALS_WITH_CRITICAL: dict[str, MetricFields] = EVALS | {
    "chat": {"role": "eval", "direction": "maximize", "critical": True}
}


def build_observations(metric: str, values: Iterable[float], first_step: int = 0) -> list[PostedObservation]:
    return [PostedObservation(metric, step, value) for step, value in enumerate(values, start=first_step)]


def load_scores(project: ProjectFixture, run: Run) -> list[tuple[int, float]]:
    with project.database.reading() as tx:
        return [
            (observation.step, observation.value)
            for observation in observations.load_series(tx, run.id, [COMBINED_METRIC])
        ]


def compute_scores(project: ProjectFixture, run: Run) -> list[tuple[int, float]]:
    """Combine the stored evals at once, as the reference."""
    weights = find_combined_evals(run)
    with project.database.reading() as tx:
        values = select_eval_values(run, observations.load_series(tx, run.id, weights))
    _, scores = combine_values(tuple(weights.values()), start_combining(len(weights)), values)
    return [(score.step, score.value) for score in scores]


def test_falling_mean_stops_the_run(project: ProjectFixture) -> None:
    """The run is stopped when the mean turns, and a rebuilt state calls for the same stop."""
    run = project.open_run(metrics=EVALS, policy="paper")
    project.submit(run, CheckpointSaved(2, "file:///2"))
    project.post_observations(run, build_observations("code", [9.0, 8.0, 7.0, 8.0, 9.0, 10.0]))
    project.post_observations(run, build_observations("math", [1.0, 2.0, 3.0, 2.0, 1.0, 0.0]))
    stopped = project.post_observations(run, build_observations("chat", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]))
    assert stopped.run.verdict.verdict == "stop"
    assert stopped.decision is not None
    assert stopped.decision.verdict.reason == stopped.run.verdict.reason
    assert stopped.run.best_checkpoint is not None
    assert stopped.run.best_checkpoint.step == 2
    assert load_scores(project, run) == compute_scores(project, run)
    project.drop_monitor_state(run)
    later = [build_observations(metric, [0.7], first_step=6)[0] for metric in EVALS]
    assert project.post_observations(run, later).run.verdict.reason == stopped.run.verdict.reason


@pytest.mark.parametrize("cached", [True, False])
def test_late_eval_rewrites_later_scores(project: ProjectFixture, cached: bool) -> None:
    """A late eval changes the scores from its step on; earlier ones stay."""
    run = project.open_run(metrics=EVALS)
    project.post_observations(
        run, [*build_observations("code", [5.0, 4.0, 4.5, 3.0]), *build_observations("math", [1.0, 3.0, 2.0, 5.0])]
    )
    project.post_observations(run, build_observations("chat", [0.5, 0.7], first_step=2))
    before = load_scores(project, run)
    if not cached:
        project.drop_monitor_state(run)
    project.post_observations(run, build_observations("chat", [0.1], first_step=1))
    after = load_scores(project, run)
    assert after == compute_scores(project, run)
    assert (after[:1], after[1:]) == (before[:1], after[1:])
    assert after != before


def test_corrected_roles_recompute_the_scores(project: ProjectFixture) -> None:
    """Other weights recompute all scores; with one eval left there are none."""
    run = project.open_run(metrics=EVALS)
    project.post_observations(
        run, [observation for metric in EVALS for observation in build_observations(metric, [1.0, 2.0, 1.5, 4.0])]
    )
    before = load_scores(project, run)
    other_weights: dict[str, MetricFields] = EVALS | {"math": {"role": "eval", "direction": "maximize", "weight": 9.0}}
    reweighted = project.submit(run, RolesCorrected(other_weights, "dana")).run
    assert load_scores(project, run) == compute_scores(project, reweighted) != before
    single_eval = project.submit(run, RolesCorrected({"math": EVALS["math"]}, "dana")).run
    assert load_scores(project, run) == []
    assert single_eval.raw_maximum is not None
    assert single_eval.raw_maximum.score == 4.0
    later = project.post_observations(run, build_observations("math", [9.0], first_step=4)).run
    assert later.raw_maximum is not None
    assert later.raw_maximum.score == 9.0


def test_posting_the_combined_metric_is_refused(project: ProjectFixture) -> None:
    """The combined metric is computed by the service: posting it is refused, naming its evals."""
    run = project.open_run(metrics=EVALS)
    with pytest.raises(Conflict, match="chat, code, math"):
        project.post_observations(run, build_observations(COMBINED_METRIC, [1.0]))


def test_falling_critical_eval_stops_the_run(project: ProjectFixture) -> None:
    """A critical eval that falls stops the run while the mean rises; its own later values give the outcome."""
    run = project.open_run(metrics=EVALS_WITH_CRITICAL, policy="paper")
    rising = [float(step) for step in range(30)]
    falling = [*[0.3 * step for step in range(8)], *[2.1 - 0.2 * step for step in range(1, 23)]]
    posted = [
        *build_observations("code", [-value for value in rising]),
        *build_observations("math", rising),
        *build_observations("chat", falling),
    ]
    stopped = project.post_observations(run, posted)
    assert stopped.decision is not None
    assert (stopped.decision.verdict.critical, stopped.decision.step) == ("chat", 10)
    assert stopped.run.verdict.reason.startswith("critical eval chat: k_decline")
    project.finish_run(run)
    with project.database.reading() as tx:
        outcome = cases.find_outcome(tx, run.id, 1)
    assert outcome is not None
    assert (outcome.outcome, outcome.turn_step) == ("right", 7)


def test_single_eval_has_no_combined_metric(project: ProjectFixture) -> None:
    """A run with one eval, weighted or critical, stores no combined metric."""
    run = project.open_run(metrics={"chat": EVALS_WITH_CRITICAL["chat"]}, policy="paper")
    project.post_observations(run, build_observations("chat", [3.0, 2.0, 1.0, 0.0]))
    assert {row["metric"] for row in project.load_rows(tables.observations, run)} == {"chat"}
    assert project.load_run(run).verdict.critical is None


@pytest.mark.parametrize(("chat_falls", "verdict"), [(False, "continue"), (True, "stop")])
def test_required_evals_stop_the_run_only_together(project: ProjectFixture, chat_falls: bool, verdict: str) -> None:
    """A run with required evals goes on while one of them holds, and is stopped once the last has turned."""
    evals: dict[str, MetricFields] = {
        metric: {"role": "eval", "direction": "maximize", "required": True} for metric in ("code", "math", "chat")
    }
    run = project.open_run(metrics=evals, policy="paper")
    turned = [float(min(step, 40 - step)) for step in range(60)]
    risen = [float(min(step, 20)) for step in range(60)]
    for metric in evals:
        stopped = project.post_observations(run, build_observations(metric, risen if metric == "chat" else turned))
    assert stopped.run.verdict.verdict == "continue"
    if chat_falls:
        for metric in evals:
            values = [-20.0 - step if metric != "chat" else 19.0 - 2 * step for step in range(15)]
            stopped = project.post_observations(run, build_observations(metric, values, first_step=60))
    assert stopped.run.verdict.verdict == verdict


def test_best_checkpoint_is_committed_with_its_cause(project: ProjectFixture) -> None:
    """The best checkpoint changes, with an event, in the transaction of the eval or checkpoint that changes it."""
    run = project.open_run()
    assert project.post_observations(run, evals(0.5)).run.best_checkpoint is None
    assert project.submit(run, CheckpointSaved(0, "file:///0")).run.best_checkpoint is not None
    assert (
        project.submit(run, CheckpointSaved(1, "file:///1")).run.best_checkpoint
        == project.load_run(run).best_checkpoint
    )
    receipt = project.post_observations(run, evals(0.6, start=1))
    assert project.load_run(run).best_checkpoint == receipt.run.best_checkpoint
    assert receipt.run.best_checkpoint is not None
    assert receipt.run.best_checkpoint.step == 1
    assert len(project.load_events(run, "run.best_checkpoint_changed")) == 2


def test_changed_smoothed_score_sends_no_event(project: ProjectFixture) -> None:
    """Another eval changes the smoothed score; no event is sent while the best checkpoint is the same."""
    run = project.open_run()
    project.submit(run, CheckpointSaved(1, "file:///1"))
    before = project.post_observations(run, evals(0.5, 0.6, 0.4, 0.5)).run.best_checkpoint
    after = project.post_observations(run, evals(0.2, 0.6, 0.3, start=4)).run.best_checkpoint
    assert before is not None
    assert after is not None
    assert before.smoothed != after.smoothed
    assert len(project.load_events(run, "run.best_checkpoint_changed")) == 1


HILL = evals(*(1 - abs(step - 12) / 12 + 0.01 * (-1) ** step for step in range(25)))
"""The eval rises to step 12 and falls as far."""


def test_ended_run_has_a_turn(project: ProjectFixture) -> None:
    """An ended run has the turn estimated from all of its evals; a resumed one has none."""
    run = project.open_run()
    assert project.post_observations(run, HILL).run.turn is None
    ended = project.finish_run(run)
    assert ended.turn == project.load_run(run).turn
    assert ended.turn is not None
    assert abs(ended.turn.step - 12) <= 1
    assert ended.turn.low_step <= 12 <= ended.turn.high_step
    assert project.submit(run, Resumed(20)).run.turn is None


def test_late_evals_update_the_turn(project: ProjectFixture) -> None:
    """Evals that arrive after the end count as if they had come before."""
    late_run, prompt_run = project.open_run(), project.open_run()
    project.post_observations(prompt_run, HILL)
    project.post_observations(late_run, HILL[:13])
    for run in (late_run, prompt_run):
        project.finish_run(run, "failed")
    project.post_observations(late_run, HILL[13:])
    assert project.load_run(late_run).turn == project.load_run(prompt_run).turn
    assert project.load_run(late_run).turn is not None


def test_confirmed_stop_records_the_turn(project: ProjectFixture) -> None:
    """When a stop is confirmed, the turn is stored in the run and in the decision's history."""
    run = project.open_run(mode="enforce")
    project.post_observations(run, HILL)
    decision = project.load_decision(run)
    project.record_report(decision, DecisionState.CONFIRMED)
    turn = project.load_run(run).turn
    assert turn is not None
    with project.database.reading() as tx:
        change = decisions.list_changes(tx, decision)[-1]
    assert change.details == {"exit_status": -15, "turn_step": turn.step}


def test_checkpoint_cannot_change_its_uri(project: ProjectFixture) -> None:
    """The same checkpoint again changes nothing; another URI for its step is refused."""
    run = project.open_run()
    assert project.submit(run, CheckpointSaved(0, "file:///0")).created
    assert not project.submit(run, CheckpointSaved(0, "file:///0")).created
    with pytest.raises(Conflict, match="file:///0"):
        project.submit(run, CheckpointSaved(0, "file:///1"))
