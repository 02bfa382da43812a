"""An identity counts once, and its first value stands."""

from __future__ import annotations

import math

import pytest
from evalstop_service.store import tables
from evalstop_service.store.observations import PostedObservation

from tests.service.scenes import (
    Scene,
    evals,
)


def test_counts_repeats(scene: Scene) -> None:
    """A point that is sent again is a duplicate, within a batch and across batches, and is stored once."""
    run = scene.open()
    receipt = scene.post(run, [*evals(0.1, 0.2), *evals(0.1)])
    assert (receipt.accepted, receipt.duplicates, receipt.conflicts) == (2, 1, ())
    receipt = scene.post(run, evals(0.1, 0.2, 0.3))
    assert (receipt.accepted, receipt.duplicates, receipt.conflicts) == (1, 2, ())
    assert len(scene.rows(tables.observations, run)) == 3


@pytest.mark.parametrize("other", [0.2, math.nan, math.inf])
def test_first_value_stands(scene: Scene, other: float) -> None:
    """Another value of a point on record is a conflict, named with both values; the first one stands."""
    run = scene.open()
    receipt = scene.post(run, [*evals(0.1), PostedObservation("eval", 0, other)])
    assert (receipt.accepted, receipt.duplicates) == (1, 0)
    assert [item.stored_value for item in receipt.conflicts] == [0.1]
    again = scene.post(run, [PostedObservation("eval", 0, other)])
    assert (again.accepted, again.duplicates, len(again.conflicts)) == (0, 0, 1)
    assert [row["value"] for row in scene.rows(tables.observations, run)] == [0.1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_repeats_what_is_not_finite(scene: Scene, value: float) -> None:
    """NaN repeats NaN, an infinity itself; a number in its place is a conflict."""
    run = scene.open()
    assert scene.post(run, [PostedObservation("eval", 0, value)] * 2).duplicates == 1
    assert scene.post(run, [PostedObservation("eval", 0, value)]).duplicates == 1
    assert len(scene.post(run, [PostedObservation("eval", 0, 1.0)]).conflicts) == 1


def test_repeats_do_not_count_as_declines(scene: Scene) -> None:
    """A client that sends each eval three times is not stopped for it."""
    run = scene.open()
    for point in evals(0.5, 0.4, 0.3):
        for _ in range(3):
            receipt = scene.post(run, [point])
    assert receipt.run.verdict.verdict == "suspect"
    assert receipt.decision is None


def test_takes_a_large_batch(scene: Scene) -> None:
    """Ten thousand points of many metrics in one batch are all stored, and all known when they come again."""
    run = scene.open()
    points = [PostedObservation(f"metric/{index % 7}", index, float(index)) for index in range(10_000)]
    assert scene.post(run, points).accepted == 10_000
    assert scene.post(run, points).duplicates == 10_000
