"""The junction: identity, resume, decisions and their announcement, each in one transaction."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from evalstop_service import responses
from evalstop_service.errors import Conflict, Invalid, NotFound
from evalstop_service.ingest import Points, Resumed, Saved
from evalstop_service.lifecycle import State
from evalstop_service.store import decisions, endpoints, leases, tables
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.observations import Point
from evalstop_service.store.runs import Run

from tests.service.scenes import NOW, Scene, evals, set_up, take

FALLING = evals(0.5, 0.9, 0.8, 0.7, 0.6)
"""Three declines: the paper's rule stops at step 4, the turn was at step 1."""

LATER = NOW + timedelta(hours=1)


@pytest.fixture
def scene(database: Database) -> Scene:
    return set_up(database)


@pytest.fixture
def graceful(database: Database) -> Scene:
    """A project whose stops wait a minute for a veto, with a subscribed endpoint."""
    scene = set_up(database, grace_seconds=60.0)
    with database.transaction() as tx:
        endpoints.add(tx, scene.project_id, url="http://127.0.0.1:9/", event_types=["*"], now=NOW)
    return scene


def deliveries_of_stops(scene: Scene) -> list[str]:
    query = sa.select(tables.deliveries.c.state).join(tables.events, tables.events.c.id == tables.deliveries.c.event_id)
    query = query.where(tables.events.c.project_id == scene.project_id, tables.events.c.type == "run.stop_requested")
    with scene.database.reading() as tx:
        return list(tx.execute(query).scalars())


def at_once(*calls: Callable[[], object]) -> list[BaseException]:
    """Run calls in threads that start together; gives what they raised."""
    barrier, failures = threading.Barrier(len(calls)), list[BaseException]()

    def run(call: Callable[[], object]) -> None:
        barrier.wait()
        try:
            call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def waiting_for_a_lock(database: Database) -> int:
    """The PostgreSQL process that waits for a lock in this database, once there is one."""
    query = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with database.reading() as tx:
            pid: int | None = tx.exec_driver_sql(query).scalar()
        if pid is not None:
            return pid
    raise AssertionError("nobody waits for a lock")


def test_counts_repeats(scene: Scene) -> None:
    """A point that is sent again is a duplicate, within a batch and across batches, and is stored once."""
    run = scene.open()
    receipt = scene.post(run, [*evals(0.1, 0.2), *evals(0.1)])
    assert (receipt.accepted, receipt.duplicates, receipt.contradictions) == (2, 1, ())
    receipt = scene.post(run, evals(0.1, 0.2, 0.3))
    assert (receipt.accepted, receipt.duplicates, receipt.contradictions) == (1, 2, ())
    assert len(scene.rows(tables.observations, run)) == 3


@pytest.mark.parametrize("other", [0.2, math.nan, math.inf])
def test_first_value_stands(scene: Scene, other: float) -> None:
    """Another value of a point on record is a conflict, named with both values; the first one stands."""
    run = scene.open()
    receipt = scene.post(run, [*evals(0.1), Point("eval", 0, other)])
    assert (receipt.accepted, receipt.duplicates) == (1, 0)
    assert [item.stored_value for item in receipt.contradictions] == [0.1]
    again = scene.post(run, [Point("eval", 0, other)])
    assert (again.accepted, again.duplicates, len(again.contradictions)) == (0, 0, 1)
    assert [row["value"] for row in scene.rows(tables.observations, run)] == [0.1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_repeats_what_is_not_finite(scene: Scene, value: float) -> None:
    """NaN repeats NaN, an infinity itself; a number in its place is a conflict."""
    run = scene.open()
    assert scene.post(run, [Point("eval", 0, value)] * 2).duplicates == 1
    assert scene.post(run, [Point("eval", 0, value)]).duplicates == 1
    assert len(scene.post(run, [Point("eval", 0, 1.0)]).contradictions) == 1


def test_repeats_do_not_count_as_declines(scene: Scene) -> None:
    """A client that sends each eval three times is not stopped for it."""
    run = scene.open()
    for point in evals(0.5, 0.4, 0.3):
        for _ in range(3):
            receipt = scene.post(run, [point])
    assert receipt.run.verdict["verdict"] == "suspect"
    assert receipt.decision is None


def test_takes_a_large_batch(scene: Scene) -> None:
    """Ten thousand points of many metrics in one batch are all stored, and all known when they come again."""
    run = scene.open()
    points = [Point(f"metric/{index % 7}", index, float(index)) for index in range(10_000)]
    assert scene.post(run, points).accepted == 10_000
    assert scene.post(run, points).duplicates == 10_000


def test_resume_supersedes(scene: Scene) -> None:
    """What was observed and saved past the resumed step no longer counts, stays on record, and can come anew."""
    run = scene.open()
    scene.take(run, Saved(1, "file:///1"))
    scene.take(run, Saved(3, "file:///3"))
    scene.post(run, evals(0.5, 0.6, 0.4, 0.9))
    assert pointer(scene.read(run)) == {"step": 3, "uri": "file:///3", "score": 0.9, "chosen_by": "smoothed_maximum"}
    receipt = scene.take(run, Resumed(1))
    assert (receipt.superseded, receipt.run.attempt, receipt.run.last_step) == (2, 2, 1)
    assert pointer(receipt.run) == {"step": 1, "uri": "file:///1", "score": 0.6, "chosen_by": "smoothed_maximum"}
    assert scene.post(run, evals(0.7, 0.8, start=2)).accepted == 2
    assert scene.take(run, Saved(3, "file:///elsewhere")).created
    kept = {(row["step"], row["superseded_by"]): row["value"] for row in scene.rows(tables.observations, run)}
    assert kept == {(0, 0): 0.5, (1, 0): 0.6, (2, 2): 0.4, (3, 2): 0.9, (2, 0): 0.7, (3, 0): 0.8}


def pointer(run: Run) -> dict[str, Any] | None:
    best = run.best_checkpoint
    return best and {key: best[key] for key in ("step", "uri", "score", "chosen_by")}


def test_resume_can_be_sent_again(scene: Scene) -> None:
    """The same resume, sent again with nothing in between, changes nothing; after news it begins another attempt."""
    run = scene.open()
    scene.post(run, evals(0.5, 0.6, 0.4))
    assert scene.take(run, Resumed(1)).run.attempt == 2
    assert scene.take(run, Resumed(1)).run.attempt == 2
    assert scene.take(run, Resumed(0)).run.attempt == 3
    scene.take(run, Saved(2, "file:///2"))
    assert scene.take(run, Resumed(0)).run.attempt == 4
    scene.post(run, evals(0.1, start=5))
    assert scene.take(run, Resumed(0)).run.attempt == 5


def test_resume_wakes_a_run_that_ended(scene: Scene) -> None:
    """A job that failed right after it was resumed, and is resumed from the same step again, is watched again."""
    run = scene.open()
    scene.post(run, evals(0.5))
    scene.take(run, Resumed(0))
    responses.finish(scene.database, scene.project_id, run.id, "failed", NOW)
    receipt = scene.take(run, Resumed(0))
    assert (receipt.run.status, receipt.run.ended_at) == ("running", None)
    assert scene.post(run, evals(0.4, 0.3, 0.2, start=1)).decision is not None


def test_decides_once_an_attempt(scene: Scene) -> None:
    """An attempt is decided once, however long it goes on falling; a resumed one can be decided anew."""
    run = scene.open()
    first = scene.post(run, FALLING).decision
    assert first is not None
    assert (first.state, first.step, first.attempt) == (State.REQUESTED, 4, 1)
    again = scene.post(run, evals(0.5, 0.4, start=5)).decision
    assert again is not None
    assert again.id == first.id
    assert scene.take(run, Resumed(1)).decision is None
    second = scene.post(run, evals(0.8, 0.7, 0.6, start=2)).decision
    assert second is not None
    assert (second.attempt, second.step) == (2, 4)
    assert len(scene.events(run, "run.stop_requested")) == 2


def test_late_news_does_not_take_a_decision_back(scene: Scene) -> None:
    """A late eval changes the verdict to what it would have been; what was decided stays on record."""
    run = scene.open()
    scene.post(run, [*FALLING[:3], *FALLING[4:], *evals(0.5, start=5)])
    receipt = scene.post(run, evals(0.95, start=3))
    assert receipt.run.verdict["verdict"] == "suspect"
    assert receipt.decision is not None
    assert [row["document"]["verdict"] for row in scene.rows(tables.verdicts, run)] == ["suspect", "stop", "suspect"]


def test_an_ended_run_is_not_stopped(scene: Scene) -> None:
    """A run that ended by itself gets a verdict, but no decision."""
    run = scene.open()
    responses.finish(scene.database, scene.project_id, run.id, "completed", NOW)
    receipt = scene.post(run, FALLING)
    assert receipt.run.verdict["verdict"] == "stop"
    assert receipt.decision is None


def test_shadow_tells_nobody(database: Database) -> None:
    """In shadow mode a stop is recorded and not announced."""
    scene = set_up(database, mode="shadow", grace_seconds=60)
    run = scene.open()
    decision = scene.post(run, FALLING).decision
    assert decision is not None
    assert decision.state == State.SHADOW
    assert not decision.stops(LATER)
    assert scene.events(run, "run.stop_requested") == []


def test_announces_what_was_decided(scene: Scene) -> None:
    """The event carries the verdict, the decision and the best checkpoint as they were committed."""
    run = scene.open(labels={"slurm_job_id": "4711"})
    scene.take(run, Saved(1, "file:///1"))
    receipt = scene.post(run, FALLING)
    (event,) = scene.events(run, "run.stop_requested")
    data = json.loads(event["body"])["data"]
    assert receipt.decision is not None
    assert data["decision"]["id"] == str(receipt.decision.id)
    assert data["decision"]["state"] == "requested"
    assert data["verdict"] == receipt.run.verdict
    assert data["best_checkpoint"] == receipt.run.best_checkpoint
    assert data["run"]["labels"] == {"slurm_job_id": "4711"}


def test_suspects_aloud_once(scene: Scene) -> None:
    """The first suspicion of an attempt is announced, later ones are not."""
    run = scene.open()
    for point in evals(0.9, 0.8, 0.7, 0.9, 0.8, 0.7):
        scene.post(run, [point])
    assert len(scene.events(run, "run.suspected")) == 1
    words = [row["document"]["verdict"] for row in scene.rows(tables.verdicts, run)]
    assert words == ["suspect", "continue", "suspect"]


def test_tells_of_a_suspicion_on_the_way(scene: Scene) -> None:
    """A whole run in one batch leaves the same changes of verdict as one that came point by point."""
    one, other = scene.open(), scene.open()
    scene.post(one, FALLING)
    for point in FALLING:
        scene.post(other, [point])
    for run in (one, other):
        assert [row["document"]["verdict"] for row in scene.rows(tables.verdicts, run)] == ["suspect", "stop"]
        assert len(scene.events(run, "run.suspected")) == 1


def test_pointer_is_committed_with_what_moved_it(scene: Scene) -> None:
    """The best checkpoint moves in the transaction of the eval or the checkpoint that moves it, and that is told."""
    run = scene.open()
    assert scene.post(run, evals(0.5)).run.best_checkpoint is None
    assert scene.take(run, Saved(0, "file:///0")).run.best_checkpoint is not None
    assert scene.take(run, Saved(1, "file:///1")).run.best_checkpoint == scene.read(run).best_checkpoint
    receipt = scene.post(run, evals(0.6, start=1))
    assert scene.read(run).best_checkpoint == receipt.run.best_checkpoint
    assert receipt.run.best_checkpoint is not None
    assert receipt.run.best_checkpoint["step"] == 1
    assert len(scene.events(run, "run.best_checkpoint_changed")) == 2


def test_the_best_checkpoint_is_not_the_luckiest(scene: Scene) -> None:
    """One eval far above its neighbors is the raw maximum, and not the best checkpoint; both are shown."""
    run = scene.open()
    hill = [0.1 * min(step, 20) + 0.02 * (-1) ** step for step in range(41)]
    for step in range(41):
        scene.take(run, Saved(step, f"file:///{step}"))
    row = scene.post(run, evals(*hill[:5], 9.0, *hill[6:])).run
    assert row.raw_maximum == {"step": 5, "score": 9.0}
    assert row.best_checkpoint is not None
    assert row.best_checkpoint["step"] > 15
    assert row.best_checkpoint["score"] == hill[row.best_checkpoint["step"]]
    assert row.best_checkpoint["smoothed"] == pytest.approx(2.0, abs=0.1)
    assert row.best_checkpoint["smoothed_stderr"] > 0


def test_a_smoothed_score_that_moves_is_no_news(scene: Scene) -> None:
    """Another eval changes what is believed of the best checkpoint, and no event is sent while it is the same one."""
    run = scene.open()
    scene.take(run, Saved(1, "file:///1"))
    before = scene.post(run, evals(0.5, 0.6, 0.4, 0.5)).run.best_checkpoint
    after = scene.post(run, evals(0.2, 0.6, 0.3, start=4)).run.best_checkpoint
    assert before is not None
    assert after is not None
    assert before["smoothed"] != after["smoothed"]
    assert len(scene.events(run, "run.best_checkpoint_changed")) == 1


HILL = evals(*(1 - abs(step - 12) / 12 + 0.01 * (-1) ** step for step in range(25)))
"""Gold rises to step 12 and falls as far."""


def test_an_ended_run_tells_its_turn(scene: Scene) -> None:
    """When a run ends, all of its evals tell where gold turned; not before, and no longer once it goes on."""
    run = scene.open()
    assert scene.post(run, HILL).run.turn is None
    ended = responses.finish(scene.database, scene.project_id, run.id, "completed", NOW)
    assert ended.turn == scene.read(run).turn
    assert ended.turn is not None
    assert abs(ended.turn["step"] - 12) <= 1
    assert ended.turn["low_step"] <= 12 <= ended.turn["high_step"]
    assert ended.turn["gain"] == pytest.approx(1.0, abs=0.1)
    assert ended.turn["drop"] == pytest.approx(1.0, abs=0.1)
    assert scene.take(run, Resumed(20)).run.turn is None


def test_a_run_without_a_fall_has_no_turn(scene: Scene) -> None:
    """Of a run whose gold only rose, and of one without gold, no turn is told."""
    rising, blind = scene.open(), scene.open(metrics={"kl": {"signal": "kl", "direction": "minimize"}})
    scene.post(rising, HILL[:13])
    for run in (rising, blind):
        assert responses.finish(scene.database, scene.project_id, run.id, "completed", NOW).turn is None


def test_late_evals_move_the_turn_of_an_ended_run(scene: Scene) -> None:
    """What arrives after the end counts as it would have before."""
    late, whole = scene.open(), scene.open()
    scene.post(whole, HILL)
    scene.post(late, HILL[:13])
    for run in (late, whole):
        responses.finish(scene.database, scene.project_id, run.id, "failed", NOW)
    scene.post(late, HILL[13:])
    assert scene.read(late).turn == scene.read(whole).turn
    assert scene.read(late).turn is not None


def test_a_confirmed_stop_records_the_turn(scene: Scene) -> None:
    """When the job is confirmed to be gone, the turn goes into the run and into the record of the decision."""
    run = scene.open(mode="enforce")
    decision = scene.post(run, HILL).decision
    assert decision is not None
    said = responses.Report(State.CONFIRMED, "a receiver", "gone", {"exit_status": 0})
    responses.report(scene.database, scene.project_id, decision.id, said, NOW)
    turn = scene.read(run).turn
    assert turn is not None
    with scene.database.reading() as tx:
        change = decisions.history(tx, decision)[-1]
    assert change.details == {"exit_status": 0, "turn_step": turn["step"]}


def test_a_checkpoint_does_not_move(scene: Scene) -> None:
    """The same checkpoint again changes nothing; another place for the same step is refused."""
    run = scene.open()
    assert scene.take(run, Saved(0, "file:///0")).created
    assert not scene.take(run, Saved(0, "file:///0")).created
    with pytest.raises(Conflict, match="file:///0"):
        scene.take(run, Saved(0, "file:///1"))


def test_veto_within_grace(graceful: Scene) -> None:
    """Within the grace period a person can say no, twice without harm; what waits to be sent is cancelled."""
    run = graceful.open()
    decision = graceful.post(run, FALLING).decision
    assert decision is not None
    assert decision.state == State.PENDING
    assert deliveries_of_stops(graceful) == ["waiting"]
    for _ in range(2):
        said = responses.veto(graceful.database, graceful.project_id, decision.id, "dana", "broken eval", NOW)
        assert said.state == State.VETOED
    assert deliveries_of_stops(graceful) == ["cancelled"]
    with graceful.database.transaction() as tx:
        bodies = [claimed.body for claimed in leases.claim(tx, LATER, 60.0, 10, 10)]
    assert not any("run.stop_requested" in body for body in bodies)


def test_no_veto_after_grace(graceful: Scene) -> None:
    """Once the grace period is over the stop can no longer be taken back."""
    run = graceful.open()
    decision = graceful.post(run, FALLING).decision
    assert decision is not None
    with pytest.raises(Conflict, match="grace period"):
        responses.veto(graceful.database, graceful.project_id, decision.id, "dana", "", LATER)
    assert deliveries_of_stops(graceful) == ["waiting"]


def test_resume_within_grace_withdraws(graceful: Scene) -> None:
    """A stop that still waits for its grace period does not hit the attempt that the trainer begins meanwhile."""
    run = graceful.open()
    graceful.post(run, FALLING)
    graceful.take(run, Resumed(1))
    decision = graceful.decision(run)
    assert decision is not None
    assert decision.state == State.VETOED
    assert deliveries_of_stops(graceful) == ["cancelled"]


def test_rolls_back_whole(scene: Scene) -> None:
    """When the decision cannot be stored, neither the points nor any event of the batch stay."""
    run = scene.open()
    scene.post(run, FALLING[:-1])
    with scene.database.transaction() as tx:  # takes the place of the decision, so that a real constraint refuses it
        tx.exec_driver_sql("CREATE UNIQUE INDEX spoiler ON decisions (project_id)")
    other = scene.open()
    assert scene.post(other, FALLING).decision is not None
    before = (scene.rows(tables.observations, run), scene.rows(tables.events, run), scene.read(run))
    with pytest.raises(sa.exc.IntegrityError):
        scene.post(run, FALLING[-1:])
    assert (scene.rows(tables.observations, run), scene.rows(tables.events, run), scene.read(run)) == before
    assert scene.decision(run) is None
    with scene.database.transaction() as tx:
        tx.exec_driver_sql("DROP INDEX spoiler")
    assert scene.post(run, FALLING[-1:]).decision is not None


def test_no_decision_without_its_event(scene: Scene) -> None:
    """When the event cannot be written, there is no decision either, and no point of the batch."""
    run = scene.open()
    with scene.database.transaction() as tx:
        tx.exec_driver_sql("ALTER TABLE events RENAME TO events_away")
    with pytest.raises(sa.exc.DBAPIError):
        scene.post(run, FALLING)
    with scene.database.transaction() as tx:
        tx.exec_driver_sql("ALTER TABLE events_away RENAME TO events")
    assert scene.decision(run) is None
    assert scene.rows(tables.observations, run) == []
    assert scene.post(run, FALLING).accepted == len(FALLING)
    assert len(scene.events(run, "run.stop_requested")) == 1


def test_a_lost_connection_leaves_nothing(postgres_database: Database) -> None:
    """When the connection is cut in the middle of a transaction, all of the batch is gone, and can be sent again."""
    scene = set_up(postgres_database)
    run = scene.open()
    failures: list[BaseException] = []

    def post() -> None:
        try:
            scene.post(run, FALLING)
        except BaseException as error:
            failures.append(error)

    with postgres_database.transaction() as tx:  # holds up the insertion of the event, deep inside the transaction
        tx.exec_driver_sql("LOCK TABLE events IN ACCESS EXCLUSIVE MODE")
        thread = threading.Thread(target=post)
        thread.start()
        tx.exec_driver_sql(f"SELECT pg_terminate_backend({waiting_for_a_lock(postgres_database)})")
        thread.join()
    assert [type(failure) for failure in failures] == [sa.exc.OperationalError]
    assert scene.decision(run) is None
    assert scene.rows(tables.observations, run) == []
    assert scene.post(run, FALLING).accepted == len(FALLING)


def test_many_at_once(scene: Scene) -> None:
    """Batches posted to one run from many threads lose nothing, count nothing twice, and decide once."""
    run = scene.open()
    points = [Point("eval", step, 1.0 - step / 100) for step in range(48)]
    receipts = []

    def post(number: int) -> None:
        for start in range(0, 48, 8):
            batch = points[start : start + 8]
            receipts.append(scene.post(run, batch if number % 2 else batch[::-1]))

    failures = at_once(*(lambda number=number: post(number) for number in range(6)))
    assert failures == []
    assert sum(receipt.accepted for receipt in receipts) == 48
    assert sum(receipt.duplicates for receipt in receipts) == 48 * 5
    assert len(scene.rows(tables.observations, run)) == 48
    assert len(scene.rows(tables.decisions, run)) == 1
    assert len(scene.events(run, "run.stop_requested")) == 1
    alone = scene.open()
    scene.post(alone, points)
    assert scene.read(run).verdict == scene.read(alone).verdict


def test_opened_at_once(scene: Scene) -> None:
    """A run that many trainers open by one name at the same time is one run."""
    opened = []
    failures = at_once(*(lambda: opened.append(scene.open("one", policy="default")) for _ in range(6)))
    assert failures == []
    assert len({run.id for run in opened}) == 1


def test_a_change_of_policy_hides_no_run(postgres_database: Database) -> None:
    """News that waited while the run got another policy is taken in under the new one."""
    scene = set_up(postgres_database)
    run = scene.open("one", policy="paper")
    scene.post(run, FALLING[:3])
    receipts = []
    with postgres_database.transaction() as tx:
        tx.execute(sa.select(tables.runs.c.id).where(tables.runs.c.id == run.id).with_for_update())
        thread = threading.Thread(target=lambda: receipts.append(scene.post(run, FALLING[3:])))
        thread.start()
        waiting_for_a_lock(postgres_database)
        watchful = sa.select(tables.policies.c.id).where(
            tables.policies.c.project_id == scene.project_id, tables.policies.c.name == "watchful"
        )
        policy_id = tx.execute(watchful).scalar_one()
        later = tables.runs.c.version + 1
        tx.execute(
            tables.runs.update()
            .where(tables.runs.c.id == run.id)
            .values(policy_id=policy_id, version=later, rewritten_version=later)
        )
    thread.join()
    assert [receipt.run.policy_name for receipt in receipts] == ["watchful"]


def test_a_new_policy_judges_the_past(scene: Scene) -> None:
    """A run that is opened again under another policy is judged by it from its first observation on."""
    run = scene.open("one", policy="paper")
    scene.post(run, evals(0.9, 0.8, 0.7))
    assert scene.read(run).verdict["verdict"] == "suspect"
    scene.open("one", policy="watchful")
    receipt = scene.post(run, [Point("unwatched", 0, 1.0)])
    assert receipt.run.verdict["verdict"] == "stop"
    assert receipt.decision is not None
    assert [row["document"]["verdict"] for row in scene.rows(tables.verdicts, run)] == ["suspect", "stop"]


def test_reopening(scene: Scene) -> None:
    """Opened again, a run merges its labels and keeps what is not said; other metrics are refused."""
    run = scene.open("one", labels={"job": "1", "node": "a"}, total_steps=10)
    again = scene.open("one", labels={"job": "2"})
    assert again.id == run.id
    assert again.labels == {"job": "2", "node": "a"}
    assert (again.total_steps, again.policy_name, again.mode) == (10, run.policy_name, run.mode)
    with pytest.raises(Conflict, match="metrics"):
        scene.open("one", metrics={"gold": {"signal": "eval", "direction": "maximize"}})


def test_another_projects_run(scene: Scene) -> None:
    """A run cannot be reached from another project."""
    run = scene.open()
    stranger = set_up(scene.database)
    with pytest.raises(NotFound):
        stranger.post(run, evals(0.1))
    assert scene.rows(tables.observations, run) == []


def test_an_unknown_run(scene: Scene) -> None:
    """News of a run that was never opened is refused, with what to do."""
    with pytest.raises(NotFound, match="open one"):
        take(scene.database, scene.project_id, new_id(), Points(tuple(evals(0.1))), NOW)


def test_opening_needs_a_policy_that_exists(scene: Scene) -> None:
    """A policy is named with or without its version; one that does not exist is refused with those that do."""
    assert scene.open(policy="paper@1").policy_version == 1
    for reference in ("nosuch", "paper@2", "paper@" + "9" * 30, "paper@x", "@1"):
        with pytest.raises(Invalid, match="policy"):
            scene.open(policy=reference)


def report(scene: Scene, decision_id: UUID, state: State) -> State:
    said = responses.Report(state, "receiver", "as seen", {"exit_status": -15})
    return State(responses.report(scene.database, scene.project_id, decision_id, said, LATER).state)


def test_reports_follow_the_life_of_a_decision(graceful: Scene) -> None:
    """A receiver's report ends the run and is told once; repeated it changes nothing, contradicted it is refused."""
    run = graceful.open()
    decision = graceful.post(run, FALLING).decision
    assert decision is not None
    assert report(graceful, decision.id, State.FAILED) == State.FAILED
    assert report(graceful, decision.id, State.CONFIRMED) == State.CONFIRMED
    assert report(graceful, decision.id, State.CONFIRMED) == State.CONFIRMED
    with pytest.raises(Conflict):
        report(graceful, decision.id, State.FAILED)
    assert graceful.read(run).status == "stopped"
    assert len(graceful.events(run, "run.stopped")) == 1
    states = [row["state"] for row in graceful.rows(tables.decision_changes, run)]
    assert states == ["pending", "requested", "failed", "confirmed"]
