"""A series at a chosen resolution is exact: no spike is lost, whatever came late, was superseded or is summarized."""

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
WHOLE = (0, 2**53 - 1)


@pytest.fixture
def project(database: Database) -> ProjectFixture:
    return set_up_project(database)


@pytest.fixture
def run(project: ProjectFixture) -> Run:
    """A run with a series that is summarized up to its last five hundred points."""
    run = project.open_run()
    store(project, run, [PostedObservation("loss", 2 * step, value_at(step)) for step in range(END)])
    store(project, run, [PostedObservation("eval", step, -1e300) for step in range(100)])
    summarize(project, run)
    return run


def value_at(step: int) -> float:
    strange = {77: math.nan, 78: math.inf, 10_000: -math.inf, 6_345: 1e9, 15_000: -1e9, END - 3: math.nan}
    return strange.get(step, math.sin(step / 100))


def store(project: ProjectFixture, run: Run, points: Sequence[PostedObservation], late: bool = True) -> None:
    with project.database.transaction() as tx:
        runs.lock_runs(tx, [run.id])
        if late:
            series.forget_summaries(tx, ((run.id, point.metric, point.step) for point in points))
        insert_observations(tx, [(run.id, point) for point in points])


def summarize(project: ProjectFixture, run: Run) -> int:
    times = 0
    while True:
        with project.database.transaction() as tx:
            runs.lock_runs(tx, [run.id])
            if not series.summarize_series(tx, run.id, "loss"):
                return times
            times += 1


def check(project: ProjectFixture, run: Run, first: int, last: int, buckets: int) -> None:
    """The buckets are what the points themselves say."""
    with project.database.reading() as tx:
        points = [point for point in observations.load_series(tx, run.id, ["loss"]) if first <= point.step <= last]
        found = series.load_buckets(tx, run.id, "loss", first, last, buckets)
    assert len(found) <= buckets
    assert all(one.last_step < other.first_step for one, other in pairwise(found))
    assert sum(bucket.count for bucket in found) == len(points)
    start = 0
    for bucket in found:
        inside = points[start : start + bucket.count]
        start += bucket.count
        values = [point.value for point in inside]
        finite = [value for value in values if math.isfinite(value)]
        assert (bucket.first_step, bucket.last_step) == (inside[0].step, inside[-1].step)
        assert (bucket.lowest, bucket.highest) == (min(finite, default=None), max(finite, default=None))
        assert repr(bucket.last) == repr(values[-1])
        assert bucket.nan_count == sum(map(math.isnan, values))
        assert bucket.infinite_count == sum(map(math.isinf, values))


def test_says_what_the_points_say(project: ProjectFixture, run: Run) -> None:
    """Lowest, highest, last and the counts are those of the points in the bucket, at every resolution and range."""
    for buckets in (1, 7, 2000):
        check(project, run, *WHOLE, buckets)
        check(project, run, 3333, 30_001, buckets)
    for first, last in ((0, 100), (2 * END - 50, 2 * END), (20_000, 19_999), (152, 158)):
        check(project, run, first, last, 10)


def test_reads_summaries(project: ProjectFixture, run: Run) -> None:
    """A long series is read from its summaries, a summary holding so many observations."""
    rows = project.load_rows(tables.series_buckets, run)
    assert [row["count"] for row in rows] == [series.OBSERVATIONS_A_ROW] * (
        2 * OBSERVATIONS_AT_A_TIME // series.OBSERVATIONS_A_ROW
    )
    with project.database.transaction() as tx:
        tx.execute(tables.series_buckets.update().values(highest=5e9))
    with project.database.reading() as tx:
        assert series.load_buckets(tx, run.id, "loss", *WHOLE, 1)[0].highest == 5e9


@pytest.mark.parametrize("step", [1, 2 * OBSERVATIONS_AT_A_TIME + 1, 2 * END + 5])
def test_a_late_point_is_seen(project: ProjectFixture, run: Run, step: int) -> None:
    """A spike that arrives late, amid what is summarized, is in the next answer, and still there when that is again."""
    store(project, run, [PostedObservation("loss", step, 7e9)])
    check(project, run, *WHOLE, 50)
    assert summarize(project, run) > 0 or step > 2 * END
    check(project, run, *WHOLE, 50)


def test_what_is_not_late_leaves_the_summaries(project: ProjectFixture, run: Run) -> None:
    """A point past the last one costs no summary."""
    before = len(project.load_rows(tables.series_buckets, run))
    store(project, run, [PostedObservation("loss", 2 * END, 7e9)], late=False)
    store(project, run, [PostedObservation("loss", 2 * END + 1, 7e9)])
    assert len(project.load_rows(tables.series_buckets, run)) == before
    check(project, run, *WHOLE, 50)


def test_what_is_superseded_is_gone(project: ProjectFixture, run: Run) -> None:
    """After a resume the superseded points count no more, and those that take their place do."""
    with project.database.transaction() as tx:
        runs.lock_runs(tx, [run.id])
        assert observations.supersede_observations(tx, run.id, 10_000, 2) > 0
    check(project, run, *WHOLE, 50)
    store(project, run, [PostedObservation("loss", step, 3e9) for step in range(10_001, 10_011)])
    summarize(project, run)
    check(project, run, *WHOLE, 50)


def test_what_is_summarized_is_counted(project: ProjectFixture, run: Run) -> None:
    """The number of a metric's live observations is the same, however many of them are summarized."""
    with project.database.transaction() as tx:
        tx.execute(tables.runs.update().where(tables.runs.c.id == run.id).values(last_step=2 * END))
        counts = {item.metric: item.count for item in observations.list_latest(tx, run.id)}
    assert counts == {"loss": END, "eval": 100}
