"""Many decisions while services, workers, receivers and roads fail: each job ends once, or is left alone."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from evalstop_lab.benchmarks.processes import find_free_port
from evalstop_service.clock import utc_now
from evalstop_service.projects import api_keys
from evalstop_service.rules.decision_lifecycle import DecisionState
from evalstop_service.store import projects, tables
from evalstop_service.store.database import Database

from tests.acceptance.programs import Program
from tests.clients.programs import running_program
from tests.conftest import ClonePostgres
from tests.faults.fake_cluster import FakeCluster, FakeJob
from tests.faults.retrying_clients import Caller, wait_until
from tests.faults.unreliable_proxy import TROUBLE, Road
from tests.fixtures.projects import create_project

pytestmark = pytest.mark.real

SEED = 20261121
WITHIN_BOUNDS = 5
WINDOW_SECONDS = 4.0
"""For a checkpoint, from the call for it to the cancel."""
WRITTEN_SECONDS = 1.0
"""The trainer tells the service before it writes to the cluster's folder that it has saved."""
CONFIRM_SECONDS = 20.0
ENDED = {DecisionState.CONFIRMED, DecisionState.VETOED, DecisionState.MOOT}
SCOPES = ("ingest", "read", "operate", "admin")
FAST = {
    "EVALSTOP_WEBHOOK_NETWORKS": "127.0.0.0/8",
    "EVALSTOP_DELIVERY_FIRST_PAUSE_SECONDS": "0.2",
    "EVALSTOP_DELIVERY_LONGEST_PAUSE_SECONDS": "2",
    "EVALSTOP_DELIVERY_TIMEOUT_SECONDS": "5",
    "EVALSTOP_DELIVERY_LEASE_SECONDS": "8",
}


@dataclass
class Tenant:
    """A project with a key to all of it and, behind a bad road, `evalstop-receiver command` in front of the cluster."""

    name: str
    key: str
    folder: Path
    runs: dict[str, str] = field(default_factory=dict)
    url: str = ""
    secret: str = ""
    process: subprocess.Popen[str] | None = None

    def start(self, stack: ExitStack, cluster: FakeCluster, service: str) -> None:
        """Start the receiver, or start it again where the one before was killed."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        script = f"sh {cluster.script}"
        command = [sys.executable, "-m", "evalstop_client.receivers.cli", "command", "--url", service]
        command += ["--run", f"{script} cancel {{job_id}}", "--check", f"{script} check {{job_id}}"]
        command += ["--signal", f"{script} save {{job_id}}", "--checkpoint-grace-seconds", str(WINDOW_SECONDS)]
        command += ["--poll-seconds", "1", "--state", str(self.folder / "state"), "--pattern", "job_id=[A-Za-z0-9_-]+"]
        command += ["--listen", "127.0.0.1:0", "--ready-file", str(ready)]
        environment = {"EVALSTOP_WEBHOOK_SECRET": self.secret, "EVALSTOP_KEY": self.key}
        self.process = stack.enter_context(running_program(command, **environment))
        wait_until(ready.exists, "the receiver listens")
        self.url = str(json.loads(ready.read_text())["url"])

    def decisions(self, caller: Caller, state: DecisionState) -> list[str]:
        """The decisions of the project in this state, at most a hundred."""
        return [one["id"] for one in caller.get("/decisions", state=state, limit="100")["items"]]


def tenant(
    database: Database, folder: Path, name: str, veto_window_seconds: float, stops_per_hour: int | None
) -> Tenant:
    """A new project."""
    project = create_project(database, name, "enforce", veto_window_seconds, utc_now(), "paper")
    with database.transaction() as tx:
        bounded = replace(project, stops_per_hour=stops_per_hour, stops_share=None, confirm_seconds=CONFIRM_SECONDS)
        projects.update_project(tx, bounded)
    (folder / name).mkdir()
    return Tenant(name, api_keys.create_named_key(database, name, "all", SCOPES, utc_now())[1], folder / name)


def train(caller: Caller, one: Tenant, name: str) -> None:
    """A run that gets better, saves its best, and gets worse three times."""
    run_id = caller.post("/runs", {"name": name, "labels": {"job_id": name}})["id"]
    one.runs[name] = run_id
    caller.post(f"/runs/{run_id}/observations", scores(0, 1.0, 2.0, 3.0))
    caller.post(f"/runs/{run_id}/checkpoints", {"step": 2, "uri": f"file:///{name}/2"})
    assert caller.post(f"/runs/{run_id}/observations", scores(3, 2.0, 1.0, 0.0))["verdict"]["verdict"] == "stop"


def scores(first: int, *values: float) -> dict[str, Any]:
    points = enumerate(values, first)
    return {"observations": [{"metric": "eval", "step": step, "value": value} for step, value in points]}


def states(database: Database) -> Counter[str]:
    """How many decisions are in each state."""
    with database.reading() as tx:
        counted = sa.select(tables.decisions.c.state, sa.func.count()).group_by(tables.decisions.c.state)
        return Counter(dict(tx.execute(counted).all()))


@pytest.fixture
def database(clone_postgres: ClonePostgres) -> Iterator[Database]:
    database = Database(clone_postgres())
    yield database
    database.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("count", "calm"), [(80, 12), pytest.param(1000, 25, marks=pytest.mark.chaos)])
def test_many_stops(tmp_path: Path, database: Database, count: int, calm: int) -> None:
    """Every job that was to end ended once, and after its checkpoint; none did that was vetoed or out of bounds.

    `calm`: so many jobs are asked to save between two faults, on a slow machine as on a quick one.
    """
    stopped, vetoed, limited = count * 8 // 10, count // 10, count // 10
    chance = random.Random(SEED)
    hot = tenant(database, tmp_path, "hot", 0.0, None)
    careful = tenant(database, tmp_path, "careful", 86_400.0, None)
    bounded = tenant(database, tmp_path, "bounded", 0.0, WITHIN_BOUNDS)
    tenants = (hot, careful, bounded)
    url = database.url.set(drivername="postgresql").render_as_string(hide_password=False)
    environment = {"EVALSTOP_DATABASE_URL": url, "EVALSTOP_DATABASE_CONNECTIONS": "8", **FAST}
    ports = [str(find_free_port()) for _ in range(2)]
    serving = [
        Program(tmp_path / f"serve-{port}.log", "serve", "--json", "--port", port, **environment) for port in ports
    ]
    delivering = [Program(tmp_path / f"deliver-{number}.log", "deliver", **environment) for number in range(2)]

    with ExitStack() as stack:
        for process in (*serving, *delivering):
            stack.callback(process.kill)
            process.start()
        services = [f"http://127.0.0.1:{port}" for port in ports]
        callers = {one.name: stack.enter_context(Caller(one.key, lambda: chance.choice(services))) for one in tenants}

        def saved(name: str) -> None:
            one = next(one for one in tenants if name in one.runs)
            callers[one.name].post(f"/runs/{one.runs[name]}/checkpoints", {"step": 5, "uri": f"file:///{name}/5"})

        cluster = stack.enter_context(FakeCluster(tmp_path, random.Random(SEED), saved))
        roads = []
        for one in tenants:
            road = stack.enter_context(Road(random.Random(SEED), partial(getattr, one, "url"), slow_seconds=6.0))
            one.secret = callers[one.name].post("/endpoints", {"url": road.url})["secret"]
            one.start(stack, cluster, services[0])
            roads.append(road)

        jobs = [
            (one, f"{one.name}-{n}")
            for one, share in zip(tenants, (stopped, vetoed, limited), strict=True)
            for n in range(share)
        ]
        chance.shuffle(jobs)
        for _, name in jobs:
            cluster.submit(name)

        def wreak_havoc() -> None:
            mischief = random.Random(SEED)
            for asked in range(calm, stopped, calm):
                wait_until(partial(cluster.has_asked, asked), f"{asked} jobs are asked to save", 600)
                if mischief.random() < 0.6:
                    victim = mischief.choice((*serving, *delivering))
                    victim.kill()
                    victim.start()
                else:
                    mischief.choice(tenants).start(stack, cluster, services[0])

        havoc = threading.Thread(target=wreak_havoc, name="havoc")
        havoc.start()
        with ThreadPoolExecutor(6) as trainers:
            list(trainers.map(lambda job: train(callers[job[0].name], *job), jobs))

        caller = callers["careful"]
        while pending := careful.decisions(caller, DecisionState.PENDING):
            for decision_id in pending:
                caller.post(f"/decisions/{decision_id}/veto", {"reason": "it only dips"})
        havoc.join()
        caller = callers["bounded"]
        wait_until(lambda: set(states(database)) <= ENDED | {DecisionState.ON_HOLD}, "all stops are done with", 600)
        on_hold = [run_id for name, run_id in bounded.runs.items() if cluster.jobs[name].at("asked") is None]
        for run_id in on_hold:  # their trainers come to the end of what they had to do
            caller.post(f"/runs/{run_id}/finish", {"status": "completed"})
        ended = states(database)
        assert sum(troubles[kind] for kind in TROUBLE for troubles in [road.troubles for road in roads]) > count // 20

    assert ended == {
        DecisionState.CONFIRMED: stopped + WITHIN_BOUNDS,
        DecisionState.VETOED: vetoed,
        DecisionState.MOOT: limited - WITHIN_BOUNDS,
    }
    for name, job in cluster.jobs.items():
        if name in careful.runs:
            assert (job.runs, job.ends, job.at("asked")) == (True, 0, None), name
        elif name in hot.runs or job.at("asked") is not None:
            assert (job.runs, job.ends) == (False, 1), name
            assert was_saved_first(job), name
        else:
            assert (job.runs, job.ends) == (True, 0), name
    assert sum(not cluster.jobs[name].runs for name in bounded.runs) == WITHIN_BOUNDS


def was_saved_first(job: FakeJob) -> bool:
    """Whether nobody cancelled the job before it had saved, or had had its time to."""
    asked, saved, cancelled = job.at("asked"), job.at("saved"), job.at("cancelled")
    if asked is None or cancelled is None:
        return asked is not None
    # The receiver counts from when it starts the script, which takes its time to write down that it was asked.
    waited = cancelled - asked + WRITTEN_SECONDS
    return waited >= WINDOW_SECONDS or (saved is not None and cancelled >= saved - WRITTEN_SECONDS)
