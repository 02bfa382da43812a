"""Long series are summarized while they grow, and reads stay exact whatever happens in between."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from uuid import UUID

import pytest
from evalstop_service.ingest import Resumed
from evalstop_service.runs import downsampling
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


@dataclass
class SummarizingProcess:
    """A process that summarizes grown runs and remembers the step at which it did."""

    project: ProjectFixture
    summarized_steps: dict[UUID, int] = field(default_factory=dict)

    def summarize(self) -> None:
        self.summarized_steps = downsampling.summarize_grown_runs(self.project.database, self.summarized_steps)


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


def test_long_series_of_running_runs_are_summarized(project: ProjectFixture) -> None:
    """A pass summarizes whole rows of each long series of a running run, not of short or ended ones."""
    run, short, ended_run = project.open_run(), project.open_run(), project.open_run()
    for each, end in ((run, END), (short, 500), (ended_run, END)):
        project.post_observations(each, build_losses(0, end))
    project.post_observations(
        run, [PostedObservation("entropy", 3 * step, 0.5) for step in range(OBSERVATIONS_AT_A_TIME)]
    )
    project.finish_run(ended_run)
    process = SummarizingProcess(project)
    process.summarize()
    assert [count_summarized(project, each) for each in (run, short, ended_run)] == [3 * OBSERVATIONS_AT_A_TIME, 0, 0]
    assert process.summarized_steps.keys() == {run.id}
    check_buckets(project, run)


def test_read_summarizes_only_new_observations(project: ProjectFixture) -> None:
    """After a pass, a read has nothing left to summarize but what is new."""
    run = project.open_run()
    project.post_observations(run, build_losses(0, END))
    SummarizingProcess(project).summarize()
    pieces: list[float] = []

    def pause(seconds: float) -> bool:
        pieces.append(seconds)
        return False

    series.catch_up_summaries(project.database, run.id, "loss", pause)
    assert pieces == []
    project.post_observations(run, build_losses(END, END + OBSERVATIONS_AT_A_TIME))
    series.catch_up_summaries(project.database, run.id, "loss", pause)
    assert count_summarized(project, run) == 3 * OBSERVATIONS_AT_A_TIME
    check_buckets(project, run)


def test_run_without_enough_growth_is_skipped(project: ProjectFixture) -> None:
    """A run that advanced by less than one summary row since the last pass is skipped."""
    run, process = project.open_run(), SummarizingProcess(project)
    project.post_observations(run, build_losses(0, END))
    process.summarize()
    with project.database.transaction() as tx:
        series.forget_summaries_after(tx, run.id, -1)
    project.post_observations(run, build_losses(END, END + OBSERVATIONS_AT_A_TIME - 1))
    process.summarize()
    assert count_summarized(project, run) == 0
    project.post_observations(run, build_losses(END + OBSERVATIONS_AT_A_TIME - 1, END + OBSERVATIONS_AT_A_TIME))
    process.summarize()
    assert count_summarized(project, run) == 3 * OBSERVATIONS_AT_A_TIME


def test_summaries_survive_late_observations_and_resumes(project: ProjectFixture) -> None:
    """Reads are exact after late spikes, a resume and new observations of superseded steps."""
    run, process = project.open_run(), SummarizingProcess(project)
    project.post_observations(run, [observation for observation in build_losses(0, END) if observation.step % 1000])
    process.summarize()
    assert count_summarized(project, run) == 2 * OBSERVATIONS_AT_A_TIME
    project.post_observations(run, [PostedObservation("loss", 5000, 1e9)])
    assert 5000 - 2 * OBSERVATIONS_A_ROW < count_summarized(project, run) < 5000
    check_buckets(project, run)
    project.post_observations(run, build_losses(END, 2 * END))
    process.summarize()
    assert count_summarized(project, run) > 3 * OBSERVATIONS_AT_A_TIME
    check_buckets(project, run)
    project.submit(run, Resumed(12_345))
    assert 12_345 - 2 * OBSERVATIONS_A_ROW < count_summarized(project, run) < 12_345
    check_buckets(project, run)
    process.summarize()
    project.post_observations(
        run, [PostedObservation("loss", step, -3e9) for step in range(12_346, 12_346 + OBSERVATIONS_AT_A_TIME)]
    )
    process.summarize()
    assert count_summarized(project, run) > 12_345
    check_buckets(project, run)


def test_summarizing_beside_a_posting_trainer(project: ProjectFixture) -> None:
    """Two processes summarize while the trainer posts, partly late: no errors, and reads are exact."""
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
            SummarizingProcess(project).summarize()

    assert run_concurrently(post, summarize, summarize) == []
    check_buckets(project, run)
    SummarizingProcess(project).summarize()
    check_buckets(project, run)


def test_pass_can_be_stopped_between_rows(project: ProjectFixture) -> None:
    """A pass pauses after each row and ends there when told to stop."""
    run = project.open_run()
    project.post_observations(run, build_losses(0, END))
    pauses: list[float] = []

    def pause(seconds: float) -> bool:
        pauses.append(seconds)
        return len(pauses) == 2

    assert downsampling.summarize_grown_runs(project.database, {}, pause) == {run.id: 0}
    assert count_summarized(project, run) == OBSERVATIONS_AT_A_TIME
    assert all(seconds > 0 for seconds in pauses)


def test_job_summarizes_each_growth(project: ProjectFixture) -> None:
    """The background job summarizes a run again once it has grown again."""
    run, job = project.open_run(), downsampling.create_job(project.database)
    for start in (0, END):
        project.post_observations(run, build_losses(start, start + END))
        assert job.do(lambda _: False) == downsampling.EVERY_SECONDS
    assert count_summarized(project, run) == 4 * OBSERVATIONS_AT_A_TIME
