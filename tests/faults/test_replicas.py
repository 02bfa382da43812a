"""Four processes on one PostgreSQL, every batch to another of them: one truth, also while they are killed by turns."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from evalstop_service.ingest import CheckpointSaved, Content, Observations, Resumed
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation

from tests.conftest import ClonePostgres
from tests.faults.retrying_clients import Caller, batch, wait_until
from tests.faults.run_records import deadlocks, history, installed, run_of, stands, undisturbed, values
from tests.faults.servers import Replicas, replicas
from tests.fixtures.certificates import get_ssl_context

pytestmark = pytest.mark.real

SEED = 20260401
KILLS = 3


@dataclass(frozen=True)
class Story:
    """What one trainer tells: phases, each begun by a resume but the first.

    `one_by_one`: the news of a phase are sent in the order given, each after the last was acknowledged; else in any
    order by several clients at once.
    """

    name: str
    policy: str
    one_by_one: bool
    phases: list[list[Content]]
    resumed: list[int]

    def in_order(self) -> list[Content]:
        """All the news as one client would send them."""
        told: list[Content] = []
        for number, phase in enumerate(self.phases):
            if number:
                told.append(Resumed(self.resumed[number - 1]))
            told += phase if self.one_by_one else sorted(phase, key=_step)
        return told

    def stored(self) -> list[tuple[int, str, int, float]]:
        """Every observation that is to be on record."""
        points = {
            (attempt, point.metric, point.step, point.value)
            for attempt, phase in enumerate(self.phases, 1)
            for news in phase
            if isinstance(news, Observations)
            for point in news.points
        }
        return sorted(points)


def _step(news: Content) -> tuple[int, int]:
    match news:
        case Observations(points):
            return points[0].step, 1
        case CheckpointSaved(step) | Resumed(step):
            return step, 0
    raise AssertionError(f"a story does not tell of {news}")


def a_story(number: int, chance: random.Random) -> Story:
    """A rise, a resume before its end, a second rise and a fall; with repeats and with points that come late."""
    one_by_one = number % 2 == 0
    policy = ("paper", "default", "watch-all-roles")[number % 3]
    resumed = chance.randint(14, 20)
    phases = []
    for first, last in ((0, 24), (resumed + 1, 48)):
        news: list[Content] = []
        for step in range(first, last, 2):
            points = [point for at in (step, step + 1) for point in _points(at, chance)]
            news.append(Observations(tuple(points)))
            if step % 3 == 0:
                news.append(CheckpointSaved(step, f"file:///{number}/{first}/{step}"))
        news += chance.sample(news, 6)  # repeats
        for index in chance.sample(range(len(news) - 5), 4):  # late
            news.insert(index + 4, news.pop(index))
        if not one_by_one:
            chance.shuffle(news)
        phases.append(news)
    return Story(f"run-{number}", policy, one_by_one, phases, [resumed])


def _points(step: int, chance: random.Random) -> list[PostedObservation]:
    gold = step if step < 34 else 68 - step
    return [
        PostedObservation("proxy", step, step + chance.gauss(0, 0.3)),
        PostedObservation("kl", step, step / 10),
        PostedObservation("loss", step, 1 / (step + 1)),
        PostedObservation("eval", step, gold / 10 + chance.gauss(0, 0.05)),
    ]


class Teller:
    """Tells stories to replicas, every piece of news to another one."""

    def __init__(self, service: Replicas, key: str, chance: random.Random) -> None:
        self._service, self._key, self._chance = service, key, chance
        self._limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._lock = threading.Lock()
        self.acknowledged = 0
        self.receipts: dict[str, list[dict[str, Any]]] = {}

    def tell(self, story: Story) -> str:
        """Tell one story to its end; gives the id of its run."""
        chance = random.Random(f"{SEED}{story.name}")
        with self._caller(chance) as caller, ThreadPoolExecutor(3) as clients:
            run_id: str = caller.post("/runs", {"name": story.name, "policy": story.policy, "mode": "enforce"})["id"]
            for number, phase in enumerate(story.phases):
                if number:
                    caller.post(f"/runs/{run_id}/resume", {"step": story.resumed[number - 1]})
                if story.one_by_one:
                    self._send(caller, run_id, phase)
                    continue
                with self._caller(chance) as second, self._caller(chance) as third:
                    parts = [(caller, phase[::3]), (second, phase[1::3]), (third, phase[2::3])]
                    for sent in [clients.submit(self._send, who, run_id, part) for who, part in parts]:
                        sent.result()
        return run_id

    def _caller(self, chance: random.Random) -> Caller:
        client = httpx.Client(verify=get_ssl_context(), timeout=60, trust_env=False, limits=self._limits)
        return Caller(self._key, lambda: self._service.any(chance), client)

    def _send(self, caller: Caller, run_id: str, news: Sequence[Content]) -> None:
        for item in news:
            match item:
                case Observations(points):
                    receipt = caller.post(f"/runs/{run_id}/observations", batch(points))
                    with self._lock:
                        self.receipts.setdefault(run_id, []).append(receipt)
                case CheckpointSaved(step, uri):
                    caller.post(f"/runs/{run_id}/checkpoints", {"step": step, "uri": uri})
            with self._lock:
                self.acknowledged += 1


def kill_by_turns(service: Replicas, teller: Teller, chance: random.Random, end: threading.Event) -> int:
    """Kill one replica at a time, each after some more news were acknowledged; gives how many were killed."""
    for killed in range(KILLS):
        goal = teller.acknowledged + chance.randint(20, 50)
        wait_until(lambda goal=goal: teller.acknowledged >= goal or end.is_set(), "news are taken in")  # type: ignore[misc]
        if end.is_set():
            return killed
        service.restart(chance.choice(service.programs))
    return KILLS


@pytest.mark.parametrize("killing", [False, True], ids=["all-up", "killed-by-turns"])
def test_one_truth(tmp_path: Path, clone_postgres: ClonePostgres, embedded_database: Database, killing: bool) -> None:
    """Sprayed over four replicas, by several clients a run, runs stand and came to stand as fed to one in order."""
    database = Database(clone_postgres())
    project, key = installed(database)
    chance = random.Random(SEED)
    stories = [a_story(number, chance) for number in range(8)]
    url = database.url.set(drivername="postgresql").render_as_string(hide_password=False)
    # With one commit at a time a replica commits what several clients sent together: many runs in each transaction.
    commits = "2" if killing else "1"
    with (
        replicas(tmp_path, url, 4, EVALSTOP_PARALLEL_COMMITS=commits) as service,
        ThreadPoolExecutor(len(stories) + 1) as threads,
    ):
        teller, end = Teller(service, key, chance), threading.Event()
        killer = threads.submit(kill_by_turns, service, teller, random.Random(SEED), end) if killing else None
        try:
            run_ids = list(threads.map(teller.tell, stories))
        finally:
            end.set()
        assert killer is None or killer.result() > 0
        service.end()
    for story, run_id in zip(stories, run_ids, strict=True):
        run = run_of(project, run_id)
        other, expected = undisturbed(embedded_database, story.in_order(), story.policy)
        assert stands(run) == stands(expected)
        assert values(project, run) == story.stored()
        if story.one_by_one:
            assert history(project, run) == history(other, expected)
        receipts = teller.receipts[run_id]
        counts = [sum(receipt[name] for receipt in receipts) for name in ("accepted", "duplicates", "conflict_count")]
        sent = sum(len(news.points) for phase in story.phases for news in phase if isinstance(news, Observations))
        if killing:  # what was stored and never acknowledged is a duplicate when it is sent again
            assert counts[0] <= len(story.stored())
            assert (sum(counts), counts[2]) == (sent, 0)
        else:
            assert counts == [len(story.stored()), sent - len(story.stored()), 0]
    assert deadlocks(database) == 0
    database.close()
