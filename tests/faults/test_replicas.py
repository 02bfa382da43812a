"""Three replicas on one PostgreSQL, each message to a random one: runs end up as with one process, also under kills."""

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
from tests.faults.retrying_clients import RetryingClient, build_batch, wait_until
from tests.faults.run_records import (
    count_deadlocks,
    create_project_and_key,
    find_run,
    ingest_without_faults,
    load_history,
    load_observations,
    summarize_run,
)
from tests.faults.servers import Replicas, start_replicas
from tests.fixtures.certificates import get_ssl_context

pytestmark = pytest.mark.real

SEED = 20260401
KILLS = 3


@dataclass(frozen=True)
class TrainerScript:
    """The messages of one trainer, in phases; each phase but the first starts with a resume.

    `one_by_one`: the messages of a phase are sent in this order, each after the previous one was acknowledged.
    Otherwise several clients send them at the same time.
    """

    name: str
    policy: str
    one_by_one: bool
    phases: list[list[Content]]
    resumed: list[int]

    def order_messages(self) -> list[Content]:
        """All messages in the order in which one client would send them."""
        messages: list[Content] = []
        for number, phase in enumerate(self.phases):
            if number:
                messages.append(Resumed(self.resumed[number - 1]))
            messages += phase if self.one_by_one else sorted(phase, key=_order_by_step)
        return messages

    def expected_observations(self) -> list[tuple[int, str, int, float]]:
        """The observations that must be stored, as (attempt, metric, step, value)."""
        points = {
            (attempt, point.metric, point.step, point.value)
            for attempt, phase in enumerate(self.phases, 1)
            for message in phase
            if isinstance(message, Observations)
            for point in message.points
        }
        return sorted(points)


def _order_by_step(message: Content) -> tuple[int, int]:
    match message:
        case Observations(points):
            return points[0].step, 1
        case CheckpointSaved(step) | Resumed(step):
            return step, 0
    raise AssertionError(f"unexpected message {message}")


def create_script(number: int, rng: random.Random) -> TrainerScript:
    """A rise, a resume from an earlier step, a second rise and a decline, with repeated and late messages."""
    one_by_one = number % 2 == 0
    policy = ("paper", "default", "watch-all-roles")[number % 3]
    resumed = rng.randint(14, 20)
    phases = []
    for first, last in ((0, 24), (resumed + 1, 48)):
        messages: list[Content] = []
        for step in range(first, last, 2):
            points = _create_observations(step, rng) + _create_observations(step + 1, rng)
            messages.append(Observations(tuple(points)))
            if step % 3 == 0:
                messages.append(CheckpointSaved(step, f"file:///{number}/{first}/{step}"))
        messages += rng.sample(messages, 6)  # repeats
        for index in rng.sample(range(len(messages) - 5), 4):  # late
            messages.insert(index + 4, messages.pop(index))
        if not one_by_one:
            rng.shuffle(messages)
        phases.append(messages)
    return TrainerScript(f"run-{number}", policy, one_by_one, phases, [resumed])


def _create_observations(step: int, rng: random.Random) -> list[PostedObservation]:
    score = step if step < 34 else 68 - step
    return [
        PostedObservation("proxy", step, step + rng.gauss(0, 0.3)),
        PostedObservation("kl", step, step / 10),
        PostedObservation("loss", step, 1 / (step + 1)),
        PostedObservation("eval", step, score / 10 + rng.gauss(0, 0.05)),
    ]


class ScriptPlayer:
    """Sends the messages of scripts to replicas, each to a random one."""

    def __init__(self, service: Replicas, key: str, rng: random.Random) -> None:
        self._service, self._key, self._rng = service, key, rng
        self._limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._lock = threading.Lock()
        self.acknowledged = 0
        self.receipts: dict[str, list[dict[str, Any]]] = {}

    def play(self, script: TrainerScript) -> str:
        """Send all messages of a script; returns the id of its run."""
        rng = random.Random(f"{SEED}{script.name}")
        with self._open_client(rng) as client, ThreadPoolExecutor(3) as threads:
            run_id: str = client.post("/runs", {"name": script.name, "policy": script.policy, "mode": "enforce"})["id"]
            for number, phase in enumerate(script.phases):
                if number:
                    client.post(f"/runs/{run_id}/resume", {"step": script.resumed[number - 1]})
                if script.one_by_one:
                    self._send(client, run_id, phase)
                    continue
                with self._open_client(rng) as second, self._open_client(rng) as third:
                    parts = [(client, phase[::3]), (second, phase[1::3]), (third, phase[2::3])]
                    for future in [threads.submit(self._send, sender, run_id, part) for sender, part in parts]:
                        future.result()
        return run_id

    def _open_client(self, rng: random.Random) -> RetryingClient:
        http_client = httpx.Client(verify=get_ssl_context(), timeout=60, trust_env=False, limits=self._limits)
        return RetryingClient(self._key, lambda: self._service.choose_url(rng), http_client)

    def _send(self, client: RetryingClient, run_id: str, messages: Sequence[Content]) -> None:
        for message in messages:
            match message:
                case Observations(points):
                    receipt = client.post(f"/runs/{run_id}/observations", build_batch(points))
                    with self._lock:
                        self.receipts.setdefault(run_id, []).append(receipt)
                case CheckpointSaved(step, uri):
                    client.post(f"/runs/{run_id}/checkpoints", {"step": step, "uri": uri})
            with self._lock:
                self.acknowledged += 1


def kill_replicas(service: Replicas, player: ScriptPlayer, rng: random.Random, end: threading.Event) -> int:
    """Kill replicas one at a time, after some more messages were acknowledged; returns how many were killed."""
    for killed in range(KILLS):
        goal = player.acknowledged + rng.randint(20, 50)
        wait_until(lambda goal=goal: player.acknowledged >= goal or end.is_set(), "more messages are acknowledged")  # type: ignore[misc]
        if end.is_set():
            return killed
        service.restart(rng.choice(service.programs))
    return KILLS


@pytest.mark.parametrize(
    "killing", [pytest.param(False, id="all-up", marks=pytest.mark.nightly), pytest.param(True, id="replicas-killed")]
)
def test_replicas_agree_with_a_single_process(
    tmp_path: Path, clone_postgres: ClonePostgres, embedded_database: Database, killing: bool
) -> None:
    """Runs whose messages go to random replicas have the state and history that one process gives them in order."""
    database = Database(clone_postgres())
    project, key = create_project_and_key(database)
    rng = random.Random(SEED)
    scripts = [create_script(number, rng) for number in range(6)]  # each policy with each order of sending
    url = database.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with (
        start_replicas(tmp_path, url, 3) as service,
        ThreadPoolExecutor(len(scripts) + 1) as threads,
    ):
        player, end = ScriptPlayer(service, key, rng), threading.Event()
        killer = threads.submit(kill_replicas, service, player, random.Random(SEED), end) if killing else None
        try:
            run_ids = list(threads.map(player.play, scripts))
        finally:
            end.set()
        assert killer is None or killer.result() > 0
        service.stop()
    for script, run_id in zip(scripts, run_ids, strict=True):
        run = find_run(project, run_id)
        other, expected = ingest_without_faults(embedded_database, script.order_messages(), script.policy)
        assert summarize_run(run) == summarize_run(expected)
        assert load_observations(project, run) == script.expected_observations()
        if script.one_by_one:
            assert load_history(project, run) == load_history(other, expected)
        receipts = player.receipts[run_id]
        counts = [sum(receipt[name] for receipt in receipts) for name in ("accepted", "duplicates", "conflict_count")]
        sent = sum(
            len(message.points) for phase in script.phases for message in phase if isinstance(message, Observations)
        )
        if killing:  # observations stored but not acknowledged are duplicates when they are sent again
            assert counts[0] <= len(script.expected_observations())
            assert (sum(counts), counts[2]) == (sent, 0)
        else:
            assert counts == [len(script.expected_observations()), sent - len(script.expected_observations()), 0]
    assert count_deadlocks(database) == 0
    database.close()
