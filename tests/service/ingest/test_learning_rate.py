"""The learning rate, which trainers log without a role, tells when the warm-up is over."""

from __future__ import annotations

import random

import pytest
from evalstop_service.domain.run import Call
from evalstop_service.store.observations import PostedObservation

from tests.service.project_fixture import ProjectFixture

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
