"""The clock stepping back an hour, or standing still: what came last is told by counting, never by the time."""

from __future__ import annotations

import itertools
from datetime import timedelta

import sqlalchemy as sa
from evalstop_service.clock import Clock
from evalstop_service.ingest import Arrival, Committer, LiveRuns, News, Points, Resumed
from evalstop_service.store import tables, verdicts
from evalstop_service.store.database import Database
from evalstop_service.telemetry import Telemetry

from tests.faults.callers import told
from tests.faults.records import history, stands, undisturbed, values
from tests.service.scenes import NOW, set_up

STEPS = 120
HOUR = timedelta(hours=1)


def stepping_back() -> Clock:
    """A clock that goes back an hour at every third look, and stands still between."""
    looks = itertools.count()
    return lambda: NOW - HOUR * (next(looks) // 3)


def test_back_by_an_hour(database: Database, embedded_database: Database) -> None:
    """Two processes whose clock steps back again and again, and shows each moment thrice, store and judge what one with
    a good clock does; every change of the run is told from every other.
    """
    scene, clock = set_up(database), stepping_back()
    run = scene.open(policy="paper", mode="enforce")
    processes = [Committer(database, LiveRuns(), clock, Telemetry()) for _ in range(2)]
    middle, steps = STEPS // 2, [Points(tuple(told(step))) for step in range(STEPS)]
    news: list[News] = [*steps[:middle], Resumed(middle - 10), *steps[middle - 9 :]]
    stamps = []
    for step, item in enumerate(news):
        receipt = processes[step % 2].take(Arrival(scene.project_id, run.id, item))
        stamps.append((receipt.run.version, receipt.run.updated_at))
    for process in processes:
        process.close()
    other, expected = undisturbed(embedded_database, news)
    assert len({version for version, _ in stamps}) == len(stamps)
    assert stamps == sorted(stamps, key=lambda stamp: stamp[0])
    assert stands(scene.read(run)) == stands(expected)
    assert values(scene, run) == values(other, expected)
    assert history(scene, run) == history(other, expected)
    with database.reading() as tx:
        told_last = [change.document for change in verdicts.listing(tx, run.id)]
        times = list(tx.execute(sa.select(tables.verdicts.c.at).order_by(tables.verdicts.c.sequence)).scalars())
    assert times == sorted(times, reverse=True)
    assert told_last == [document for _, document in history(other, expected)["verdicts"]][::-1]
