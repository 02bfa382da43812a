"""Long series are summarized when they are read, and reads stay exact whatever happens in between."""

from __future__ import annotations

import math
import threading

import pytest
from evalstop_service.ingest import Resumed
from evalstop_service.store import observations, series, tables
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from evalstop_service.store.series import OBSERVATIONS_A_ROW, OBSERVATIONS_AT_A_TIME, Bucket

from tests.service.concurrency import run_concurrently
from tests.service.project_fixture import ProjectFixture, set_up_project

END = 2 * OBSERVATIONS_AT_A_TIME + 300
BUCKETS = 200


@pytest.fixture
def project(database: Database) -> ProjectFixture:
    return set_up_project(database)


def summarize_losses(project: ProjectFixture, run: Run) -> None:
    series.catch_up_summaries(project.database, run.id, "loss")


def build_losses(first: int, end: int) -> list[PostedObservation]:
    return [PostedObservation("loss", step, math.sin(step / 50)) for step in range(first, end)]


def count_summarized(project: ProjectFixture, run: Run) -> int:
    """Count the observations of a run that are summarized."""
    return sum(row["count"] for row in project.load_rows(tables.series_buckets, run))


def check_buckets(project: ProjectFixture, run: Run) -> None:
    """Assert that buckets read without further summarizing equal those of the observations."""
    with project.database.reading() as tx:
        stored = observations.load_series(tx, run.id, ["loss"])
        buckets = series.load_buckets(tx, run.id, "loss", 0, 2**53 - 1, BUCKETS)
    assert sum(bucket.count for bucket in buckets) == len(stored)
    remaining = iter(stored)
    for bucket in buckets:
        inside = [next(remaining) for _ in range(bucket.count)]
        values = [observation.value for observation in inside]
        ends = inside[0].step, inside[-1].step
        assert bucket == Bucket(*ends, bucket.count, min(values), max(values), values[-1], 0, 0)


def test_summaries_survive_late_observations_and_resumes(project: ProjectFixture) -> None:
    """Reads are exact after late spikes, a resume and new observations of superseded steps."""
    run = project.open_run()
    project.post_observations(run, [observation for observation in build_losses(0, END) if observation.step % 1000])
    summarize_losses(project, run)
    assert count_summarized(project, run) == 2 * OBSERVATIONS_AT_A_TIME
    project.post_observations(run, [PostedObservation("loss", 5000, 1e9)])
    assert 5000 - 2 * OBSERVATIONS_A_ROW < count_summarized(project, run) < 5000
    check_buckets(project, run)
    project.post_observations(run, build_losses(END, 2 * END))
    summarize_losses(project, run)
    assert count_summarized(project, run) > 3 * OBSERVATIONS_AT_A_TIME
    check_buckets(project, run)
    project.submit(run, Resumed(12_345))
    assert 12_345 - 2 * OBSERVATIONS_A_ROW < count_summarized(project, run) < 12_345
    check_buckets(project, run)
    summarize_losses(project, run)
    project.post_observations(
        run, [PostedObservation("loss", step, -3e9) for step in range(12_346, 12_346 + OBSERVATIONS_AT_A_TIME)]
    )
    summarize_losses(project, run)
    assert count_summarized(project, run) > 12_345
    check_buckets(project, run)


def test_summarizing_beside_a_posting_trainer(project: ProjectFixture) -> None:
    """Two readers summarize while the trainer posts, partly late: no errors, and reads are exact."""
    run, all_posted = project.open_run(), threading.Event()
    on_time = [observation for observation in build_losses(0, 2 * END) if observation.step % 64]
    late = [PostedObservation("loss", step, 5e9 + step) for step in range(0, 2 * END, 64)]

    def post() -> None:
        try:
            for start in range(0, len(on_time), 4000):
                batch = [*on_time[start : start + 4000], *late[start // 400 : start // 400 + 10]]
                project.post_observations(run, batch)
        finally:
            all_posted.set()

    def summarize() -> None:
        while not all_posted.wait(0.02):
            summarize_losses(project, run)

    assert run_concurrently(post, summarize, summarize) == []
    check_buckets(project, run)
    summarize_losses(project, run)
    check_buckets(project, run)
