"""Buckets of a series equal its observations: no spike is lost, and superseded ones are left out."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from evalstop_service.store import observations, runs, series
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run

from tests.service.project_fixture import ProjectFixture, insert_observations, set_up_project

END = 2_000


@pytest.fixture
def project(database: Database) -> ProjectFixture:
    return set_up_project(database)


@pytest.fixture
def run(project: ProjectFixture) -> Run:
    """A run with a series at every other step, but for a stretch without any."""
    run = project.open_run()
    losses = [PostedObservation("loss", 2 * step, compute_value(step)) for step in range(END) if step // 100 != 7]
    others = [PostedObservation("eval", step, -1e300) for step in range(100)]
    with project.database.transaction() as tx:
        insert_observations(tx, [(run.id, observation) for observation in (*losses, *others)])
    return run


def compute_value(step: int) -> float:
    special_values = {77: math.nan, 78: math.inf, 1_000: -math.inf, 634: 1e9, 1_500: -1e9, END - 1: math.nan}
    return special_values.get(step, math.sin(step / 100))


def check_buckets(project: ProjectFixture, run: Run, most: int) -> None:
    """Assert that the buckets equal those computed from the observations."""
    with project.database.reading() as tx:
        stored = observations.load_series(tx, run.id, ["loss"])
        loaded = series.load_buckets(tx, run.id, "loss", most)
    assert 0 < len(loaded) <= most
    assert (loaded[0].first_step, loaded[-1].last_step) == (stored[0].step, stored[-1].step)
    assert all(left.last_step < right.first_step for left, right in pairwise(loaded))
    found = []
    for bucket in loaded:
        inside = [item.value for item in stored if bucket.first_step <= item.step <= bucket.last_step]
        finite = [value for value in inside if math.isfinite(value)]
        assert (bucket.lowest, bucket.highest) == (min(finite, default=None), max(finite, default=None))
        assert bucket.gaps == len(inside) - len(finite)
        assert bucket.last == inside[-1] or (math.isnan(bucket.last) and math.isnan(inside[-1]))
        found += inside
    assert len(found) == len(stored)


@pytest.mark.parametrize("most", [1, 7, 333, 2 * END])
def test_buckets_equal_the_observations(project: ProjectFixture, run: Run, most: int) -> None:
    """The lowest, the highest and the last value are those of the observations, at every resolution."""
    check_buckets(project, run, most)


def test_superseded_observations_are_left_out(project: ProjectFixture, run: Run) -> None:
    """After a resume, superseded observations no longer count, and those that replace them do."""
    with project.database.transaction() as tx:
        runs.lock_runs(tx, [run.id])
        assert observations.supersede(tx, run.id, 1_000, 2) > 0
        again = [PostedObservation("loss", step, 3e9) for step in range(1_001, 1_011)]
        insert_observations(tx, [(run.id, observation) for observation in again])
    check_buckets(project, run, 50)


def test_highest_steps_do_not_overflow(project: ProjectFixture) -> None:
    """A series over all possible steps is divided too; one that does not exist has no buckets."""
    run = project.open_run()
    with project.database.transaction() as tx:
        ends = [PostedObservation("loss", step, float(step)) for step in (0, observations.MAX_STEP)]
        insert_observations(tx, [(run.id, observation) for observation in ends])
        buckets = series.load_buckets(tx, run.id, "loss", 2_000)
        assert [bucket.last_step for bucket in buckets] == [0, observations.MAX_STEP]
        assert series.load_buckets(tx, run.id, "other", 10) == []
