"""Long series are summarized while they grow, and what is read of them stays exact whatever comes in between."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from uuid import UUID

import pytest
from evalstop_service.decisions import commands
from evalstop_service.ingest import Resumed
from evalstop_service.runs import downsampling
from evalstop_service.store import observations, series, tables
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from evalstop_service.store.series import OBSERVATIONS_A_ROW, OBSERVATIONS_AT_A_TIME, Bucket

from tests.service.project_fixture import NOW, ProjectFixture, run_concurrently, set_up_project

END = 2 * OBSERVATIONS_AT_A_TIME + 300
CLOSELY = 200


@pytest.fixture
def project(database: Database) -> ProjectFixture:
    return set_up_project(database)


@dataclass
class Process:
    """A process that keeps up, and remembers at which step it looked at each run."""

    project: ProjectFixture
    looked_at: dict[UUID, int] = field(default_factory=dict)

    def keep_up(self) -> None:
        self.looked_at = downsampling.summarize_grown_runs(self.project.database, self.looked_at)


def losses(first: int, end: int) -> list[PostedObservation]:
    return [PostedObservation("loss", step, math.sin(step / 50)) for step in range(first, end)]


def summarized(project: ProjectFixture, run: Run) -> int:
    """How many observations of a run are summarized."""
    return sum(row["count"] for row in project.load_rows(tables.series_buckets, run))


def check(project: ProjectFixture, run: Run) -> None:
    """A look at the series, with nothing summarized for it, says what the observations say."""
    with project.database.reading() as tx:
        points = observations.load_series(tx, run.id, ["loss"])
        found = series.load_buckets(tx, run.id, "loss", 0, 2**53 - 1, CLOSELY)
    assert sum(bucket.count for bucket in found) == len(points)
    rest = iter(points)
    for bucket in found:
        inside = [next(rest) for _ in range(bucket.count)]
        values = [point.value for point in inside]
        ends = inside[0].step, inside[-1].step
        assert bucket == Bucket(*ends, bucket.count, min(values), max(values), values[-1], 0, 0)


def test_what_has_grown_is_summarized(project: ProjectFixture) -> None:
    """A pass summarizes whole pieces of each long series of a running run; short runs and ended ones are left alone."""
    run, short, over = project.open_run(), project.open_run(), project.open_run()
    for each, end in ((run, END), (short, 500), (over, END)):
        project.post_observations(each, losses(0, end))
    project.post_observations(
        run, [PostedObservation("entropy", 3 * step, 0.5) for step in range(OBSERVATIONS_AT_A_TIME)]
    )
    commands.finish_run(project.database, project.id, over.id, "completed", NOW)
    process = Process(project)
    process.keep_up()
    assert [summarized(project, each) for each in (run, short, over)] == [3 * OBSERVATIONS_AT_A_TIME, 0, 0]
    assert process.looked_at.keys() == {run.id}
    check(project, run)


def test_a_look_pays_for_what_is_new(project: ProjectFixture) -> None:
    """After a pass a look has nothing to summarize."""
    run = project.open_run()
    project.post_observations(run, losses(0, END))
    Process(project).keep_up()
    pieces: list[float] = []

    def pause(seconds: float) -> bool:
        pieces.append(seconds)
        return False

    series.catch_up_summaries(project.database, run.id, "loss", pause)
    assert pieces == []
    project.post_observations(run, losses(END, END + OBSERVATIONS_AT_A_TIME))
    series.catch_up_summaries(project.database, run.id, "loss", pause)
    assert summarized(project, run) == 3 * OBSERVATIONS_AT_A_TIME
    check(project, run)


def test_what_did_not_grow_is_not_looked_at(project: ProjectFixture) -> None:
    """A run that has moved by less than a piece since it was looked at is passed over: there cannot be one."""
    run, process = project.open_run(), Process(project)
    project.post_observations(run, losses(0, END))
    process.keep_up()
    with project.database.transaction() as tx:
        series.forget_summaries_after(tx, run.id, -1)
    project.post_observations(run, losses(END, END + OBSERVATIONS_AT_A_TIME - 1))
    process.keep_up()
    assert summarized(project, run) == 0
    project.post_observations(run, losses(END + OBSERVATIONS_AT_A_TIME - 1, END + OBSERVATIONS_AT_A_TIME))
    process.keep_up()
    assert summarized(project, run) == 3 * OBSERVATIONS_AT_A_TIME


def test_late_points_and_resumptions_between_passes(project: ProjectFixture) -> None:
    """Between passes spikes come late, an attempt is superseded and its steps are observed anew: each look is exact."""
    run, process = project.open_run(), Process(project)
    project.post_observations(run, [point for point in losses(0, END) if point.step % 1000])
    process.keep_up()
    assert summarized(project, run) == 2 * OBSERVATIONS_AT_A_TIME
    project.post_observations(run, [PostedObservation("loss", 5000, 1e9)])
    assert 5000 - 2 * OBSERVATIONS_A_ROW < summarized(project, run) < 5000
    check(project, run)
    project.post_observations(run, losses(END, 2 * END))
    process.keep_up()
    assert summarized(project, run) > 3 * OBSERVATIONS_AT_A_TIME
    check(project, run)
    project.submit(run, Resumed(12_345))
    assert 12_345 - 2 * OBSERVATIONS_A_ROW < summarized(project, run) < 12_345
    check(project, run)
    process.keep_up()
    project.post_observations(
        run, [PostedObservation("loss", step, -3e9) for step in range(12_346, 12_346 + OBSERVATIONS_AT_A_TIME)]
    )
    process.keep_up()
    assert summarized(project, run) > 12_345
    check(project, run)


def test_while_points_come_in(project: ProjectFixture) -> None:
    """Two processes keep up with a run while its trainer posts, late points among them: nobody fails, all is exact."""
    run, done = project.open_run(), threading.Event()
    on_time = [point for point in losses(0, 2 * END) if point.step % 64]
    late = [PostedObservation("loss", step, 5e9 + step) for step in range(0, 2 * END, 64)]

    def post() -> None:
        try:
            for at in range(0, len(on_time), 4000):
                both = [*on_time[at : at + 4000], *late[at // 400 : at // 400 + 10]]
                project.post_observations(run, both)
        finally:
            done.set()

    def keep_up() -> None:
        while not done.wait(0.02):
            Process(project).keep_up()

    assert run_concurrently(post, keep_up, keep_up) == []
    check(project, run)
    Process(project).keep_up()
    check(project, run)


def test_it_can_be_told_to_end(project: ProjectFixture) -> None:
    """A pass rests after each piece, for longer than that took, and ends there when it is told to."""
    run = project.open_run()
    project.post_observations(run, losses(0, END))
    rests: list[float] = []

    def pause(seconds: float) -> bool:
        rests.append(seconds)
        return len(rests) == 2

    assert downsampling.summarize_grown_runs(project.database, {}, pause) == {run.id: 0}
    assert summarized(project, run) == OBSERVATIONS_AT_A_TIME
    assert all(seconds > 0 for seconds in rests)


def test_the_chore_goes_on_where_it_was(project: ProjectFixture) -> None:
    """The chore looks at a run again when that has grown again."""
    run, chore = project.open_run(), downsampling.create_job(project.database)
    for at in (0, END):
        project.post_observations(run, losses(at, at + END))
        assert chore.do(lambda _: False) == downsampling.EVERY_SECONDS
    assert summarized(project, run) == 4 * OBSERVATIONS_AT_A_TIME
