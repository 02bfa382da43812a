"""Buckets of a series equal its observations, whether late, superseded or summarized: no spike is lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from evalstop_service.store import observations, runs, series, tables
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from evalstop_service.store.series import OBSERVATIONS_AT_A_TIME

from tests.service.project_fixture import ProjectFixture, insert_observations, set_up_project

END = 2 * OBSERVATIONS_AT_A_TIME + 500
ALL_STEPS = (0, 2**53 - 1)


@pytest.fixture
def project(database: Database) -> ProjectFixture:
    return set_up_project(database)


@pytest.fixture
def run(project: ProjectFixture) -> Run:
    """A run with a series that is summarized except for its last 500 observations."""
    run = project.open_run()
    insert_series(project, run, [PostedObservation("loss", 2 * step, compute_value(step)) for step in range(END)])
    insert_series(project, run, [PostedObservation("eval", step, -1e300) for step in range(100)])
    summarize_all(project, run)
    return run


def compute_value(step: int) -> float:
    special_values = {77: math.nan, 78: math.inf, 10_000: -math.inf, 6_345: 1e9, 15_000: -1e9, END - 3: math.nan}
    return special_values.get(step, math.sin(step / 100))


def insert_series(project: ProjectFixture, run: Run, posted: Sequence[PostedObservation], late: bool = True) -> None:
    with project.database.transaction() as tx:
        runs.lock_runs(tx, [run.id])
        if late:
            series.forget_summaries(tx, ((run.id, observation.metric, observation.step) for observation in posted))
        insert_observations(tx, [(run.id, observation) for observation in posted])


def summarize_all(project: ProjectFixture, run: Run) -> int:
    passes = 0
    while True:
        with project.database.transaction() as tx:
            runs.lock_runs(tx, [run.id])
            if not series.summarize_series(tx, run.id, "loss"):
                return passes
            passes += 1


def check_buckets(project: ProjectFixture, run: Run, first: int, last: int, buckets: int) -> None:
    """Assert that the buckets equal those computed from the observations."""
    with project.database.reading() as tx:
        expected = [
            observation
            for observation in observations.load_series(tx, run.id, ["loss"])
            if first <= observation.step <= last
        ]
        loaded = series.load_buckets(tx, run.id, "loss", first, last, buckets)
    assert len(loaded) <= buckets
    assert all(left.last_step < right.first_step for left, right in pairwise(loaded))
    assert sum(bucket.count for bucket in loaded) == len(expected)
    start = 0
    for bucket in loaded:
        inside = expected[start : start + bucket.count]
        start += bucket.count
        values = [observation.value for observation in inside]
        finite = [value for value in values if math.isfinite(value)]
        assert (bucket.first_step, bucket.last_step) == (inside[0].step, inside[-1].step)
        assert (bucket.lowest, bucket.highest) == (min(finite, default=None), max(finite, default=None))
        assert repr(bucket.last) == repr(values[-1])
        assert bucket.nan_count == sum(map(math.isnan, values))
        assert bucket.infinite_count == sum(map(math.isinf, values))


@pytest.mark.slow
def test_buckets_equal_the_observations(project: ProjectFixture, run: Run) -> None:
    """Minimum, maximum, last value and counts are those of the observations, at every resolution and range."""
    for buckets in (1, 7, 2000):
        check_buckets(project, run, *ALL_STEPS, buckets)
        check_buckets(project, run, 3333, 30_001, buckets)
    for first, last in ((0, 100), (2 * END - 50, 2 * END), (20_000, 19_999), (152, 158)):
        check_buckets(project, run, first, last, 10)


def test_long_series_is_read_from_summaries(project: ProjectFixture, run: Run) -> None:
    """A long series is read from summary rows of a fixed number of observations."""
    rows = project.load_rows(tables.series_buckets, run)
    assert [row["count"] for row in rows] == [series.OBSERVATIONS_A_ROW] * (
        2 * OBSERVATIONS_AT_A_TIME // series.OBSERVATIONS_A_ROW
    )
    with project.database.transaction() as tx:
        tx.execute(tables.series_buckets.update().values(highest=5e9))
    with project.database.reading() as tx:
        assert series.load_buckets(tx, run.id, "loss", *ALL_STEPS, 1)[0].highest == 5e9


def test_late_observation_is_included(project: ProjectFixture, run: Run) -> None:
    """A late spike within a summarized range is in the next answer, and still there after it is summarized again."""
    for step in (1, 2 * OBSERVATIONS_AT_A_TIME + 1):
        insert_series(project, run, [PostedObservation("loss", step, 7e9 + step)])
        check_buckets(project, run, *ALL_STEPS, 50)
        assert summarize_all(project, run) > 0
        check_buckets(project, run, *ALL_STEPS, 50)


def test_new_observation_keeps_the_summaries(project: ProjectFixture, run: Run) -> None:
    """An observation after the last one invalidates no summary."""
    before = len(project.load_rows(tables.series_buckets, run))
    for step, late in ((2 * END, False), (2 * END + 1, True), (2 * END + 5, True)):
        insert_series(project, run, [PostedObservation("loss", step, 7e9)], late=late)
    assert len(project.load_rows(tables.series_buckets, run)) == before
    check_buckets(project, run, *ALL_STEPS, 50)


def test_superseded_observations_are_left_out(project: ProjectFixture, run: Run) -> None:
    """After a resume, superseded observations no longer count, and those that replace them do."""
    with project.database.transaction() as tx:
        runs.lock_runs(tx, [run.id])
        assert observations.supersede_observations(tx, run.id, 10_000, 2) > 0
    check_buckets(project, run, *ALL_STEPS, 50)
    insert_series(project, run, [PostedObservation("loss", step, 3e9) for step in range(10_001, 10_011)])
    summarize_all(project, run)
    check_buckets(project, run, *ALL_STEPS, 50)


def test_counts_include_summarized_observations(project: ProjectFixture, run: Run) -> None:
    """A metric's count of live observations does not depend on how many are summarized."""
    with project.database.transaction() as tx:
        tx.execute(tables.runs.update().where(tables.runs.c.id == run.id).values(last_step=2 * END))
        counts = {item.metric: item.count for item in observations.list_latest(tx, run.id)}
    assert counts == {"loss": END, "eval": 100}
