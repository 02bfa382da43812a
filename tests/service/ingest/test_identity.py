"""An identity counts once, and its first value stands."""

from __future__ import annotations

import math

import pytest
from evalstop_service.store import tables
from evalstop_service.store.observations import PostedObservation

from tests.service.project_fixture import (
    ProjectFixture,
    evals,
)


def test_counts_repeats(project: ProjectFixture) -> None:
    """A point that is sent again is a duplicate, within a batch and across batches, and is stored once."""
    run = project.open_run()
    receipt = project.post_observations(run, [*evals(0.1, 0.2), *evals(0.1)])
    assert (receipt.accepted, receipt.duplicates, receipt.conflicts) == (2, 1, ())
    receipt = project.post_observations(run, evals(0.1, 0.2, 0.3))
    assert (receipt.accepted, receipt.duplicates, receipt.conflicts) == (1, 2, ())
    assert len(project.load_rows(tables.observations, run)) == 3


@pytest.mark.parametrize("other", [0.2, math.nan, math.inf])
def test_first_value_stands(project: ProjectFixture, other: float) -> None:
    """Another value of a point on record is a conflict, named with both values; the first one stands."""
    run = project.open_run()
    receipt = project.post_observations(run, [*evals(0.1), PostedObservation("eval", 0, other)])
    assert (receipt.accepted, receipt.duplicates) == (1, 0)
    assert [item.stored_value for item in receipt.conflicts] == [0.1]
    again = project.post_observations(run, [PostedObservation("eval", 0, other)])
    assert (again.accepted, again.duplicates, len(again.conflicts)) == (0, 0, 1)
    assert [row["value"] for row in project.load_rows(tables.observations, run)] == [0.1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_repeats_what_is_not_finite(project: ProjectFixture, value: float) -> None:
    """NaN repeats NaN, an infinity itself; a number in its place is a conflict."""
    run = project.open_run()
    assert project.post_observations(run, [PostedObservation("eval", 0, value)] * 2).duplicates == 1
    assert project.post_observations(run, [PostedObservation("eval", 0, value)]).duplicates == 1
    assert len(project.post_observations(run, [PostedObservation("eval", 0, 1.0)]).conflicts) == 1


def test_repeats_do_not_count_as_declines(project: ProjectFixture) -> None:
    """A client that sends each eval three times is not stopped for it."""
    run = project.open_run()
    for point in evals(0.5, 0.4, 0.3):
        for _ in range(3):
            receipt = project.post_observations(run, [point])
    assert receipt.run.verdict.verdict == "suspect"
    assert receipt.decision is None


def test_takes_a_large_batch(project: ProjectFixture) -> None:
    """Ten thousand points of many metrics in one batch are all stored, and all known when they come again."""
    run = project.open_run()
    points = [PostedObservation(f"metric/{index % 7}", index, float(index)) for index in range(10_000)]
    assert project.post_observations(run, points).accepted == 10_000
    assert project.post_observations(run, points).duplicates == 10_000
