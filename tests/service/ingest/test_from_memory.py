"""Plain news are committed on the event loop from memory alone; all others go the thorough way, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import sqlalchemy as sa
from evalstop_service.ingest import Arrival, Limits, LiveRuns, News, Points, Receipt, Resumed, Saved
from evalstop_service.ingest.run_cache import KEEP_EVERY, SHARED_FOR
from evalstop_service.store import tables
from evalstop_service.store.database import Database
from evalstop_service.store.observations import Point
from evalstop_service.store.runs import Run

from tests.service.ingest.at_home import SceneAtHome, at_home
from tests.service.scenes import FALLING, evals, set_up


@pytest.fixture
def scene(postgres_database: Database) -> Iterator[SceneAtHome]:
    with at_home(set_up(postgres_database)) as scene:
        yield scene


def losses(count: int, start: int = 0) -> list[Point]:
    return [Point("loss", step, 1.0) for step in range(start, start + count)]


def was_direct(scene: SceneAtHome, run: Run, points: list[Point]) -> bool:
    """Post points; whether they took no transaction: each that is begun for writing leaves its mark here."""
    begun: list[sa.Connection] = []

    def mark(connection: sa.Connection) -> None:
        begun.append(connection)

    sa.event.listen(scene.database.engine, "begin", mark)
    try:
        assert scene.post(run, points).accepted == len(points)
    finally:
        sa.event.remove(scene.database.engine, "begin", mark)
    return not begun


def test_plain_news_take_no_transaction(scene: SceneAtHome) -> None:
    """What goes on where the run stood is committed directly, from its second post on."""
    run = scene.open(policy="paper")
    assert not was_direct(scene, run, evals(0.1))  # nothing is remembered of it yet
    assert was_direct(scene, run, evals(0.2, start=1))
    assert was_direct(scene, run, [*evals(0.3, start=2), *losses(1, start=2)])
    assert [row["value"] for row in scene.rows(tables.observations, run)] == [0.1, 0.2, 0.3, 1.0]


@pytest.mark.parametrize(
    ("before", "news"),
    [
        pytest.param([], losses(Limits().direct + 1, start=10), id="too much for one statement"),
        pytest.param([], evals(0.5, start=0), id="a late point"),
        pytest.param([], [Point("loss", 0, 1.0)], id="a loss from before the last eval"),
        pytest.param([], losses(KEEP_EVERY, start=10), id="a state that is to be kept"),
        pytest.param(FALLING[2:], evals(0.1, start=7), id="a run with a decision"),
    ],
)
def test_all_else_takes_one(scene: SceneAtHome, before: list[Point], news: list[Point]) -> None:
    """Whatever memory does not suffice for is taken in by a transaction, and what was remembered stays good."""
    run = scene.open(policy="watchful", mode="enforce")
    scene.post(run, evals(0.5, 0.9, start=1))
    if before:
        scene.post(run, before)
    assert not was_direct(scene, run, news)
    if not before:
        assert was_direct(scene, run, evals(1.0, start=50_000))


def test_a_verdict_is_gone_on_with(scene: SceneAtHome) -> None:
    """The eval that calls for a stop is worked in on the loop, and its decision made in a transaction, once."""
    run = scene.open(policy="paper", mode="enforce")
    scene.post(run, FALLING[:-1])
    hits = scene.count("evalstop_live_runs_total", result="hit")
    receipt = scene.post(run, FALLING[-1:])
    assert receipt.decision is not None
    assert receipt.run.verdict["verdict"] == "stop"
    assert scene.decision(run) == receipt.decision
    assert len(scene.events(run, "run.stop_requested")) == 1
    assert scene.count("evalstop_live_runs_total", result="hit") == hits + 1


def test_what_comes_after_a_verdict_waits_for_it(scene: SceneAtHome) -> None:
    """Two evals in one turn of the loop, of which the first calls for a stop, lead to one decision."""
    run = scene.open(policy="paper", mode="enforce")
    scene.post(run, FALLING[:-1])
    arrivals = [Arrival(scene.project_id, run.id, Points((point,))) for point in [*FALLING[-1:], *evals(0.1, start=9)]]
    for answer in scene.take_all(arrivals):
        assert isinstance(answer, Receipt)
        assert answer.decision == scene.decision(run) is not None
    assert len(scene.rows(tables.decisions, run)) == 1


def test_a_crowd_goes_by_halves(scene: SceneAtHome) -> None:
    """Of eight that post together again and again four are on their way while the other four are still being read."""
    runs = [scene.open(policy="paper") for _ in range(8)]

    def together(step: int) -> float:
        before = scene.count("evalstop_commit_requests_count")
        arrivals = [Arrival(scene.project_id, run.id, Points(tuple(evals(0.1, start=step)))) for run in runs]
        assert all(isinstance(answer, Receipt) for answer in scene.take_all(arrivals))
        return scene.count("evalstop_commit_requests_count") - before

    together(0)  # nothing is remembered of them yet
    together(1)
    assert [together(2), together(3)] == [2, 2]


def test_order_is_kept_between_the_ways(scene: SceneAtHome) -> None:
    """News of one run that arrive together are taken in order, whichever way each of them goes."""
    run = scene.open(policy="watchful")
    scene.post(run, evals(0.1))
    news: list[News] = [
        Points(tuple(evals(0.2, start=1))),
        Saved(1, "file:///1"),
        Points(tuple(evals(0.3, start=2))),
        Resumed(1),
        Points(tuple(evals(0.4, start=2))),
    ]
    answers = scene.take_all([Arrival(scene.project_id, run.id, item) for item in news])
    assert [answer.run.attempt for answer in answers if isinstance(answer, Receipt)] == [1, 1, 1, 2, 2]
    live = [row for row in scene.rows(tables.observations, run) if row["superseded_by"] == 0]
    assert [(row["step"], row["value"]) for row in live] == [(0, 0.1), (1, 0.2), (2, 0.4)]


def test_is_mistaken_once(scene: SceneAtHome) -> None:
    """Memory that another process made untrue costs one batch twice, and counts it once; then the run is looked at
    first, until it has been found as remembered for a while."""
    run, other = scene.open(policy="paper"), replace(scene, live=LiveRuns())

    def mistaken() -> float:
        return scene.count("evalstop_live_runs_total", result="mistaken")

    scene.post(run, evals(0.1))
    other.post(run, evals(0.2, start=1))
    assert scene.post(run, evals(0.3, start=2)).accepted == 1
    assert mistaken() == 1
    for step in range(3, 3 + SHARED_FOR):
        assert not was_direct(scene, run, evals(step / 100, start=step))
    assert was_direct(scene, run, evals(0.8, start=40))
    other.post(run, evals(0.9, start=50))
    scene.post(run, evals(1.0, start=51))
    assert mistaken() == 3  # the other one was mistaken as well
    steps = [row["step"] for row in scene.rows(tables.observations, run)]
    assert steps == [*range(3 + SHARED_FOR), 40, 50, 51]
    cold = replace(scene, live=LiveRuns())
    assert cold.post(run, evals(1.1, start=52)).run.verdict == scene.read(run).verdict


def test_a_fault_of_the_statement_goes_the_thorough_way(scene: SceneAtHome) -> None:
    """What a direct commit could not store is told by the transaction that is tried instead; its neighbors are kept."""
    good, bad = scene.open(), scene.open()
    for run in (good, bad):
        scene.post(run, evals(0.1))
    with scene.database.transaction() as tx:
        tx.exec_driver_sql("ALTER TABLE observations ADD CONSTRAINT spoiler CHECK (value <> 666)")
    arrivals = [
        Arrival(scene.project_id, run.id, Points(tuple(evals(value, start=1))))
        for run, value in ((good, 0.2), (bad, 666.0))
    ]
    taken, failed = scene.take_all(arrivals)
    assert isinstance(taken, Receipt)
    assert isinstance(failed, sa.exc.IntegrityError)
    assert [row["value"] for row in scene.rows(tables.observations, good)] == [0.1, 0.2]
    assert was_direct(scene, bad, evals(0.3, start=1)) is False
    assert was_direct(scene, bad, evals(0.4, start=2))


def test_cut_connections_are_opened_again(scene: SceneAtHome) -> None:
    """With all direct connections cut, news go through the pool, lose nothing, and soon go directly again."""
    run = scene.open(policy="paper")
    scene.post(run, evals(0.1))
    cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> %s"
    with scene.database.transaction() as tx:
        own = tx.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        tx.exec_driver_sql(cut, (own,))
    step = 1
    while step < 20 or not was_direct(scene, run, evals(0.5, start=step)):
        if step < 20:
            scene.post(run, evals(0.5, start=step))
        assert step < 100_000
        step += 1
    steps = [row["step"] for row in scene.rows(tables.observations, run)]
    assert steps == list(range(step + 1))
