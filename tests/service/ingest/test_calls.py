"""The first calls of a policy's detectors: kept in the run's row, and the same however the observations arrive."""

from __future__ import annotations

from datetime import timedelta

import pytest
from evalstop_detectors import POLICIES, name_calls, policy_to_document, replay
from evalstop_service.domain.run import DetectorCall
from evalstop_service.evaluation import backtests
from evalstop_service.ingest import Resumed, list_calls
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run

from tests.fixtures.recorded_runs import build_observations, load_run_records
from tests.service.project_fixture import DECLINING_EVALS, NOW, ONE_HOUR_LATER, ProjectFixture, evals

RECORD = next(record for record in load_run_records() if record["run_id"] == "np-0044")
DOCUMENT = policy_to_document(POLICIES["default"]) | {"name": "tried"}
POINTS = [
    PostedObservation(item.role, item.step, item.value, item.stderr) for item in build_observations(RECORD["log"])
]


def load_calls(project: ProjectFixture, run: Run) -> dict[str, DetectorCall]:
    with project.database.reading() as tx:
        return {item.detector: item for item in list_calls(tx, project.load_run(run))}


def load_steps(project: ProjectFixture, run: Run) -> dict[str, int | None]:
    return {name: item.step for name, item in load_calls(project, run).items()}


@pytest.mark.parametrize("order", ["batches", "one by one", "backwards"])
def test_calls_do_not_depend_on_how_observations_arrive(project: ProjectFixture, order: str) -> None:
    """The row has the calls of the replay and of the backtest, of deciding and observing detectors."""
    run = project.open_run(policy="default", mode="shadow")
    size = 1 if order == "one by one" else 50
    batches = [POINTS[first : first + size] for first in range(0, len(POINTS), size)]
    for batch in batches[::-1] if order == "backwards" else batches:
        project.post_observations(run, batch)
    expected = name_calls(POLICIES["default"], replay(POLICIES["default"], build_observations(RECORD["log"])))
    assert load_steps(project, run) == expected
    assert sum(step is not None for step in expected.values()) > 1
    project.drop_monitor_state(run)
    assert load_steps(project, run) == expected
    project.finish_run(run)
    (finding,) = backtests.run_backtest(project.database, project.id, DOCUMENT, 10, "x", NOW).findings
    assert finding.calls == expected


def test_call_shows_its_time_and_the_evidence_now(project: ProjectFixture) -> None:
    """The time is that of the first call; the evidence goes on. An observer that has not called has no step."""
    run = project.open_run(policy="paper", mode="shadow")
    project.post_observations(run, DECLINING_EVALS[:4])
    assert load_steps(project, run) == {"k_decline": None, "posterior": None}
    project.post_observations(run, DECLINING_EVALS[4:], ONE_HOUR_LATER)
    project.post_observations(run, evals(0.95, start=5), ONE_HOUR_LATER + timedelta(hours=1))
    calls = load_calls(project, run)
    decline, posterior = calls["k_decline"], calls["posterior"]
    assert (decline.observes, decline.threshold, decline.evidence, decline.step) == (False, 3.0, 0.0, 4)
    assert decline.called_at == ONE_HOUR_LATER
    assert (posterior.observes, posterior.step, posterior.called_at) == (True, None, None)
    assert posterior.evidence is not None


def test_late_observation_and_resume_take_calls_back(project: ProjectFixture) -> None:
    """A call that the changed past does not support is gone; one at the same step keeps its time."""
    run = project.open_run(policy="paper", mode="shadow")
    project.post_observations(run, DECLINING_EVALS)
    project.post_observations(run, [PostedObservation("kl", 1, 0.1)], ONE_HOUR_LATER)
    assert load_calls(project, run)["k_decline"].called_at == NOW
    project.submit(run, Resumed(3, "trainer"))
    assert load_steps(project, run)["k_decline"] is None
    project.post_observations(run, evals(0.6, start=4), ONE_HOUR_LATER)
    assert load_calls(project, run)["k_decline"].called_at == ONE_HOUR_LATER
