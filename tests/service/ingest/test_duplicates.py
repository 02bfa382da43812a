"""An observation's identity counts once, and its first value is kept."""

from __future__ import annotations

import math

import pytest
from evalstop_service.ingest import Message, Observations, Receipt
from evalstop_service.store import tables
from evalstop_service.store.observations import PostedObservation

from tests.service.project_fixture import (
    ProjectFixture,
    evals,
)


def test_repeated_observation_is_a_duplicate(project: ProjectFixture) -> None:
    """An observation sent again, within a batch or in a later one, is a duplicate and stored once."""
    run = project.open_run()
    receipt = project.post_observations(run, [*evals(0.1, 0.2), *evals(0.1)])
    assert (receipt.accepted, receipt.duplicates, receipt.conflicts) == (2, 1, ())
    receipt = project.post_observations(run, evals(0.1, 0.2, 0.3))
    assert (receipt.accepted, receipt.duplicates, receipt.conflicts) == (1, 2, ())
    assert len(project.load_rows(tables.observations, run)) == 3


@pytest.mark.parametrize("other", [0.2, math.nan, math.inf])
def test_first_value_is_kept(project: ProjectFixture, other: float) -> None:
    """Another value of a stored observation is a conflict that names the stored value, which is kept."""
    run = project.open_run()
    receipt = project.post_observations(run, [*evals(0.1), PostedObservation("eval", 0, other)])
    assert (receipt.accepted, receipt.duplicates) == (1, 0)
    assert [item.stored_value for item in receipt.conflicts] == [0.1]
    again = project.post_observations(run, [PostedObservation("eval", 0, other)])
    assert (again.accepted, again.duplicates, len(again.conflicts)) == (0, 0, 1)
    assert [row["value"] for row in project.load_rows(tables.observations, run)] == [0.1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_value_is_a_duplicate_of_itself(project: ProjectFixture, value: float) -> None:
    """NaN repeats NaN, and an infinity itself; a number in its place is a conflict."""
    run = project.open_run()
    assert project.post_observations(run, [PostedObservation("eval", 0, value)] * 2).duplicates == 1
    assert project.post_observations(run, [PostedObservation("eval", 0, value)]).duplicates == 1
    assert len(project.post_observations(run, [PostedObservation("eval", 0, 1.0)]).conflicts) == 1


def test_repeat_within_one_commit_is_looked_up(project: ProjectFixture, caplog: pytest.LogCaptureFixture) -> None:
    """It waits until the first one is saved; neither fails."""
    run = project.open_run()
    receipts = project.submit_all([Message(project.id, run.id, Observations(tuple(evals(0.1)))) for _ in range(2)])
    assert [(item.accepted, item.duplicates) for item in receipts if isinstance(item, Receipt)] == [(1, 0), (0, 1)]
    assert caplog.records == []


def test_late_observation_leaves_the_last_step(project: ProjectFixture) -> None:
    """The last step of a run is the highest that it has reported, of any metric."""
    run = project.open_run()
    project.post_observations(run, evals(0.1, start=5))
    for late in (evals(0.1, start=2), [PostedObservation("loss", 3, 0.1)]):
        assert project.post_observations(run, late).run.last_step == 5


def test_duplicates_do_not_count_as_declines(project: ProjectFixture) -> None:
    """A client that sends each eval three times is not stopped for it."""
    run = project.open_run()
    for observation in evals(0.5, 0.4, 0.3):
        for _ in range(3):
            receipt = project.post_observations(run, [observation])
    assert receipt.run.verdict.verdict == "suspect"
    assert receipt.decision is None


def test_large_batch_is_stored_once(project: ProjectFixture) -> None:
    """Ten thousand observations in one batch are all stored, and all duplicates when sent again."""
    run = project.open_run()
    observations = [PostedObservation(f"metric/{index % 7}", index, float(index)) for index in range(10_000)]
    assert project.post_observations(run, observations).accepted == 10_000
    assert project.post_observations(run, observations).duplicates == 10_000
