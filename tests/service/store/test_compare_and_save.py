"""One statement writes what a transaction of several would, or nothing when a run is no longer as remembered."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta

import pytest
import sqlalchemy as sa
from evalstop_service.store import observations, runs, tables
from evalstop_service.store.compare_and_save import Stroke
from evalstop_service.store.database import Database
from evalstop_service.store.direct import Direct
from evalstop_service.store.ids import new_id
from evalstop_service.store.observations import NewObservation, Point
from evalstop_service.store.runs import Run
from msgspec.structs import replace

from tests.service.scenes import NOW, Scene, set_up
from tests.service.store.test_many_runs import STRANGE

LATER = NOW + timedelta(seconds=1)


@pytest.fixture
def scene(postgres_database: Database) -> Scene:
    return set_up(postgres_database)


def changed(run: Run) -> Run:
    """The run with everything in it that ingestion may change."""
    verdict = {"verdict": "suspect", "step": 3, "turn_step": 1, "reason": 'ü"\\', "evidence": []}
    return replace(
        run,
        version=run.version + 1,
        last_step=2**53 - 1,
        verdict=verdict,
        best_checkpoint={"step": 1, "uri": "s3://a", "score": 0.5},
        raw_maximum={"step": 2, "score": 1e-300},
        updated_at=LATER,
    )


def save(scene: Scene, held: list[Run], moved: list[Run], points: list[NewObservation]) -> bool:
    stamps = [(run.version, run.updated_at) for run in held]
    stroke = Stroke(list(zip(stamps, moved, strict=True)), points, LATER)
    saved = asyncio.run(saved_directly(scene.database, stroke))
    assert saved is not None
    return saved


async def saved_directly(database: Database, stroke: Stroke) -> bool | None:
    """What becomes of a stroke on a direct connection."""
    direct = Direct(database, 1, lambda: None)
    await direct.open()
    saved: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()
    direct.save(stroke.parameters, saved.set_result)
    try:
        return await saved
    finally:
        await direct.close()


def test_writes_what_several_statements_would(scene: Scene) -> None:
    """Rows of runs and observations are the same to the last bit, whichever way they were written."""
    one, other = scene.open(), scene.open()
    assert save(scene, [one], [changed(one)], [NewObservation(one.id, 1, point) for point in STRANGE])
    with scene.database.transaction() as tx:
        observations.add_observations(tx, [NewObservation(other.id, 1, point) for point in STRANGE], LATER, [])
        runs.save_runs(tx, [changed(other)])

    def rows(run: Run, table: sa.Table, key: str) -> list[str]:
        query = sa.select(table).where(table.c[key] == run.id).order_by(*table.primary_key)
        with scene.database.reading() as tx:
            found = [dict(row) for row in tx.execute(query).mappings()]
        return [repr({name: value for name, value in row.items() if name not in (key, "name")}) for row in found]

    for table, key in ((tables.observations, "run_id"), (tables.runs, "id")):
        assert rows(one, table, key) == rows(other, table, key) != []


def test_writes_nothing_when_one_run_moved_on(scene: Scene) -> None:
    """One stamp that is another keeps the news of all from being written, be it by version, by time or by absence."""
    here, moved = scene.open(), scene.open()
    points = [NewObservation(run.id, 1, Point("eval", 0, 1.0)) for run in (here, moved)]
    for wrong in (
        replace(moved, version=moved.version + 1),
        replace(moved, updated_at=LATER),
        replace(moved, id=new_id()),
    ):
        assert not save(scene, [here, wrong], [changed(here), changed(wrong)], points)
    assert scene.rows(tables.observations, here) == scene.rows(tables.observations, moved) == []
    with scene.database.reading() as tx:
        assert runs.find_run(tx, scene.project_id, here.id) == here
    assert save(scene, [here, moved], [changed(here), changed(moved)], points)


def test_waits_for_whoever_holds_the_run(scene: Scene) -> None:
    """A run that another transaction holds is compared as that leaves it."""
    run, kept = scene.open(), scene.open()
    answers: dict[str, bool] = {}

    def saving(mine: Run) -> threading.Thread:
        def work() -> None:
            answers[mine.name] = save(
                scene, [mine], [changed(mine)], [NewObservation(mine.id, 1, Point("eval", 0, 1.0))]
            )

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    with scene.database.transaction() as tx:
        runs.lock_runs(tx, [run.id, kept.id])
        threads = [saving(run), saving(kept)]
        wait_for_locks(scene.database, 2)
        runs.save_runs(tx, [replace(run, version=run.version + 1, updated_at=LATER)])
    for thread in threads:
        thread.join(60)
    assert answers == {run.name: False, kept.name: True}


def wait_for_locks(database: Database, count: int) -> None:
    """Return once so many transactions wait for another one."""
    waiting = "wait_event_type = 'Lock' AND datname = current_database()"
    query = sa.text(f"SELECT count(*) FROM pg_stat_activity WHERE {waiting}")
    for _ in range(6000):
        with database.reading() as tx:
            if tx.execute(query).scalar_one() >= count:
                return
        time.sleep(0.01)
    raise TimeoutError
