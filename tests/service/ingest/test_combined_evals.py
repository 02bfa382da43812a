"""A run with several evals: their mean is stored as its eval, and its stop names what fell."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from evalstop_detectors import combine_values, start_combining
from evalstop_service.decisions import commands
from evalstop_service.errors import Conflict
from evalstop_service.ingest import CheckpointSaved, RolesCorrected
from evalstop_service.rules.role_recognition import COMBINED_METRIC, MetricFields
from evalstop_service.runs.watched_metrics import find_combined_evals, select_eval_values
from evalstop_service.store import observations, outcomes, tables
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run

from tests.service.project_fixture import NOW, ProjectFixture

EVALS: dict[str, MetricFields] = {
    "code": {"role": "eval", "direction": "minimize"},
    "math": {"role": "eval", "direction": "maximize", "weight": 2.0},
    "chat": {"role": "eval", "direction": "maximize"},
}
GUARDED: dict[str, MetricFields] = EVALS | {"chat": {"role": "eval", "direction": "maximize", "critical": True}}


def rows(metric: str, values: Iterable[float], first_step: int = 0) -> list[PostedObservation]:
    return [PostedObservation(metric, step, value) for step, value in enumerate(values, start=first_step)]


def stored_scores(project: ProjectFixture, run: Run) -> list[tuple[int, float]]:
    with project.database.reading() as tx:
        return [(point.step, point.value) for point in observations.load_series(tx, run.id, [COMBINED_METRIC])]


def expected_scores(project: ProjectFixture, run: Run) -> list[tuple[int, float]]:
    """What the evals on record make, taken in at once."""
    weights = find_combined_evals(run)
    with project.database.reading() as tx:
        values = select_eval_values(run, observations.load_series(tx, run.id, weights))
    _, scores = combine_values(tuple(weights.values()), start_combining(len(weights)), values)
    return [(score.step, score.value) for score in scores]


def test_the_mean_is_what_is_watched(project: ProjectFixture) -> None:
    """The run is stopped when the mean turns, and its reason names the evals that fell."""
    run = project.open_run(metrics=EVALS, policy="paper")
    project.submit(run, CheckpointSaved(2, "file:///2"))
    project.post_observations(run, rows("code", [9.0, 8.0, 7.0, 8.0, 9.0, 10.0]))
    project.post_observations(run, rows("math", [1.0, 2.0, 3.0, 2.0, 1.0, 0.0]))
    stopped = project.post_observations(run, rows("chat", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]))
    assert stopped.run.verdict.verdict == "stop"
    assert stopped.run.verdict.reason.endswith("; fallen evals: math (67 % of the fall), code (33 % of the fall)")
    assert stopped.decision is not None
    assert stopped.decision.verdict.reason == stopped.run.verdict.reason
    assert stopped.run.best_checkpoint is not None
    assert stopped.run.best_checkpoint.step == 2
    assert stored_scores(project, run) == expected_scores(project, run)


@pytest.mark.parametrize("remembered", [True, False])
def test_a_late_value_moves_the_scores_from_there_on(project: ProjectFixture, remembered: bool) -> None:
    """Scores that were stored without an eval are stored anew when it comes, those of before stay."""
    run = project.open_run(metrics=EVALS)
    project.post_observations(run, [*rows("code", [5.0, 4.0, 4.5, 3.0]), *rows("math", [1.0, 3.0, 2.0, 5.0])])
    project.post_observations(run, rows("chat", [0.5, 0.7], first_step=2))
    before = stored_scores(project, run)
    if not remembered:
        project.drop_monitor_state(run)
    project.post_observations(run, rows("chat", [0.1], first_step=1))
    after = stored_scores(project, run)
    assert after == expected_scores(project, run)
    assert (after[:1], after[1:]) == (before[:1], after[1:])
    assert after != before


def test_roles_that_are_corrected_make_other_scores(project: ProjectFixture) -> None:
    """Other weights make other scores of all that was measured; with one eval left there are none."""
    run = project.open_run(metrics=EVALS)
    project.post_observations(run, [point for metric in EVALS for point in rows(metric, [1.0, 2.0, 1.5, 4.0])])
    before = stored_scores(project, run)
    heavy: dict[str, MetricFields] = EVALS | {"math": {"role": "eval", "direction": "maximize", "weight": 9.0}}
    weighed = project.submit(run, RolesCorrected(heavy, "dana")).run
    assert stored_scores(project, run) == expected_scores(project, weighed) != before
    alone = project.submit(run, RolesCorrected({"math": EVALS["math"]}, "dana")).run
    assert stored_scores(project, run) == []
    assert alone.raw_maximum is not None
    assert alone.raw_maximum.score == 4.0
    more = project.post_observations(run, rows("math", [9.0], first_step=4)).run
    assert more.raw_maximum is not None
    assert more.raw_maximum.score == 9.0


def test_nobody_posts_the_scores(project: ProjectFixture) -> None:
    """What the service computes is refused from a trainer, with the names of the evals that it is made of."""
    run = project.open_run(metrics=EVALS)
    with pytest.raises(Conflict, match="chat, code, math"):
        project.post_observations(run, rows(COMBINED_METRIC, [1.0]))


def test_a_critical_eval_is_judged_by_itself(project: ProjectFixture) -> None:
    """Its fall stops a run whose mean rises; whether that was right is told by its own later values."""
    run = project.open_run(metrics=GUARDED, policy="paper")
    rising = [float(step) for step in range(30)]
    falling = [*[0.3 * step for step in range(8)], *[2.1 - 0.2 * step for step in range(1, 23)]]
    points = [*rows("code", [-value for value in rising]), *rows("math", rising), *rows("chat", falling)]
    stopped = project.post_observations(run, points)
    assert stopped.decision is not None
    assert (stopped.decision.verdict.critical, stopped.decision.step) == ("chat", 10)
    assert stopped.run.verdict.reason.startswith("critical eval chat: k_decline")
    commands.finish_run(project.database, project.id, run.id, "completed", NOW)
    with project.database.reading() as tx:
        outcome = outcomes.find_outcome(tx, run.id, 1)
    assert outcome is not None
    assert (outcome.outcome, outcome.turn_step) == ("right", 7)


def test_one_eval_stores_nothing_else(project: ProjectFixture) -> None:
    """A run with one eval, weighed or critical, has no series of scores."""
    run = project.open_run(metrics={"chat": GUARDED["chat"]}, policy="paper")
    project.post_observations(run, rows("chat", [3.0, 2.0, 1.0, 0.0]))
    assert {row["metric"] for row in project.load_rows(tables.observations, run)} == {"chat"}
    assert project.load_run(run).verdict.critical is None
