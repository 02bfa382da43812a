"""Many stops and vetoes while services, workers, receivers and connections fail.

Each stopped job ends exactly once, and each veto that was sent before the stop was handed over is heard.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from evalstop_service.clock import utc_now
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.store import projects, tables
from evalstop_service.store.database import Database

from tests.acceptance.programs import Program
from tests.clients.programs import running_program
from tests.conftest import ClonePostgres
from tests.faults.fake_cluster import FakeCluster, FakeJob
from tests.faults.retrying_clients import RetryingClient, wait_until
from tests.faults.unreliable_proxy import FAULTS, UnreliableProxy
from tests.fixtures.free_ports import find_free_ports
from tests.fixtures.projects import create_named_key, create_project

pytestmark = pytest.mark.real

SEED = 20261121
STOPS_PER_HOUR = 5
GRACE_SECONDS = 4.0
"""Time for a checkpoint, from the request to save to the cancel."""
WRITE_DELAY_SECONDS = 1.0
"""How much later than the event a job's file may be written: trainers report a checkpoint before they write `saved`."""
CONFIRM_SECONDS = 20.0
WINDOW_SECONDS = 6.0
"""The veto window; vetoes are sent in it and somewhat after it."""
VETO_ON_ITS_WAY = timedelta(seconds=WINDOW_SECONDS / 2)
"""A server that is killed before it answers a veto loses it, and a busy one hears it late; then it is repeated."""
FINAL_STATES = {DecisionState.CONFIRMED, DecisionState.VETOED, DecisionState.MOOT}
SCOPES = ("ingest", "read", "operate", "admin")
SHORT_TIMES = {
    "EVALSTOP_WEBHOOK_NETWORKS": "127.0.0.0/8",
    "EVALSTOP_DELIVERY_LONGEST_PAUSE_SECONDS": "2",
    "EVALSTOP_DELIVERY_TIMEOUT_SECONDS": "5",
}


@dataclass
class Tenant:
    """A project with a key of all scopes, and its `evalstop-receiver command` behind an unreliable proxy."""

    name: str
    key: str
    folder: Path
    runs: dict[str, str] = field(default_factory=dict)
    url: str = ""
    secret: str = ""
    process: subprocess.Popen[str] | None = None

    def start_receiver(self, stack: ExitStack, cluster: FakeCluster, service: str) -> None:
        """Start the receiver; kill the previous one first if there is one."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        script = f"sh {cluster.script}"
        command = [sys.executable, "-m", "evalstop_client.receivers.cli", "command", "--url", service]
        command += ["--run", f"{script} cancel {{job_id}}", "--check", f"{script} check {{job_id}}"]
        command += ["--signal", f"{script} save {{job_id}}", "--checkpoint-grace-seconds", str(GRACE_SECONDS)]
        command += ["--poll-seconds", "1", "--state", str(self.folder / "state"), "--pattern", "job_id=[A-Za-z0-9_-]+"]
        command += ["--listen", "127.0.0.1:0", "--ready-file", str(ready)]
        environment = {"EVALSTOP_WEBHOOK_SECRET": self.secret, "EVALSTOP_KEY": self.key}
        self.process = stack.enter_context(running_program(command, **environment))
        wait_until(ready.exists, "the receiver listens")
        self.url = str(json.loads(ready.read_text())["url"])


def create_tenant(
    database: Database, folder: Path, name: str, veto_window_seconds: float, stops_per_hour: int | None
) -> Tenant:
    """Create a project in enforce mode with these limits."""
    project = create_project(database, name, "enforce", veto_window_seconds, utc_now(), "paper")
    with database.transaction() as tx:
        changed = replace(project, stops_per_hour=stops_per_hour, stops_share=None, confirm_seconds=CONFIRM_SECONDS)
        projects.update_project(tx, changed)
    (folder / name).mkdir()
    return Tenant(name, create_named_key(database, name, "all", SCOPES, utc_now())[1], folder / name)


def train_run(client: RetryingClient, tenant: Tenant, name: str) -> str:
    """Post a run that improves, saves its best checkpoint, and then declines three times; returns its decision's id."""
    run_id = client.post("/runs", {"name": name, "labels": {"job_id": name}})["id"]
    tenant.runs[name] = run_id
    client.post(f"/runs/{run_id}/observations", build_scores(0, 1.0, 2.0, 3.0))
    client.post(f"/runs/{run_id}/checkpoints", {"step": 2, "uri": f"file:///{name}/2"})
    receipt = client.post(f"/runs/{run_id}/observations", build_scores(3, 2.0, 1.0, 0.0))
    assert receipt["verdict"]["verdict"] == "stop"
    return str(receipt["decision"]["id"])


@dataclass(frozen=True)
class SentVeto:
    """A veto of a run's stop: when it was first sent, and whether it was heard in the end."""

    run: str
    decision_id: str
    sent_at: datetime
    heard: bool


def send_veto(client: RetryingClient, run: str, decision_id: str, wait_seconds: float) -> SentVeto:
    """Veto a stop after some seconds, again and again until it is heard or the stop has been handed over."""
    time.sleep(wait_seconds)
    sent_at = utc_now()
    answer = client.post(f"/decisions/{decision_id}/veto", {"reason": "it only dips"}, (200, 409))
    return SentVeto(run, decision_id, sent_at, answer["state"] == "vetoed" if "state" in answer else False)


def build_scores(first: int, *values: float) -> dict[str, Any]:
    """The body that posts these evals at consecutive steps."""
    points = enumerate(values, first)
    return {"observations": [{"metric": "eval", "step": step, "value": value} for step, value in points]}


def count_states(database: Database) -> Counter[str]:
    """Count the decisions by state."""
    with database.reading() as tx:
        query = sa.select(tables.decisions.c.state, sa.func.count()).group_by(tables.decisions.c.state)
        return Counter(dict(tx.execute(query).all()))


@pytest.fixture
def database(clone_postgres: ClonePostgres) -> Iterator[Database]:
    database = Database(clone_postgres())
    yield database
    database.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("count", "jobs_per_fault"), [(60, 9), pytest.param(1000, 25, marks=pytest.mark.chaos)])
def test_every_stopped_job_ends_once_despite_faults(
    tmp_path: Path, database: Database, count: int, jobs_per_fault: int
) -> None:
    """Each job to be stopped ends once, after its checkpoint; vetoed jobs and those beyond the limit run on.

    A veto comes too late only if the stop was handed over before it was sent, or while it was on its way.
    A fault happens each time that `jobs_per_fault` more jobs have been asked to save, whatever the machine's speed.
    """
    stopped_count, vetoing_count, limited_count = count // 2, count * 4 // 10, count // 10
    rng = random.Random(SEED)
    immediate = create_tenant(database, tmp_path, "immediate", 0.0, None)
    vetoing = create_tenant(database, tmp_path, "vetoing", WINDOW_SECONDS, None)
    limited_tenant = create_tenant(database, tmp_path, "limited", 0.0, STOPS_PER_HOUR)
    tenants = (immediate, vetoing, limited_tenant)
    url = database.url.set(drivername="postgresql").render_as_string(hide_password=False)
    environment = {"EVALSTOP_DATABASE_URL": url, "EVALSTOP_DATABASE_CONNECTIONS": "8", **SHORT_TIMES}
    ports = [str(port) for port in find_free_ports(2)]
    servers = [
        Program(tmp_path / f"serve-{port}.log", "serve", "--json", "--port", port, **environment) for port in ports
    ]
    workers = [Program(tmp_path / f"deliver-{number}.log", "deliver", **environment) for number in range(2)]

    with ExitStack() as stack:
        for process in (*servers, *workers):
            stack.callback(process.kill)
            process.start()
        services = [f"http://127.0.0.1:{port}" for port in ports]
        clients = {
            tenant.name: stack.enter_context(RetryingClient(tenant.key, lambda: rng.choice(services)))
            for tenant in tenants
        }

        def report_checkpoint(name: str) -> None:
            tenant = next(tenant for tenant in tenants if name in tenant.runs)
            clients[tenant.name].post(f"/runs/{tenant.runs[name]}/checkpoints", {"step": 5, "uri": f"file:///{name}/5"})

        cluster = stack.enter_context(FakeCluster(tmp_path, random.Random(SEED), report_checkpoint))
        proxies = []
        for tenant in tenants:
            proxy = stack.enter_context(
                UnreliableProxy(random.Random(SEED), partial(getattr, tenant, "url"), slow_seconds=6.0)
            )
            tenant.secret = clients[tenant.name].post("/endpoints", {"url": proxy.url})["secret"]
            tenant.start_receiver(stack, cluster, services[0])
            proxies.append(proxy)

        jobs = [
            (tenant, f"{tenant.name}-{n}")
            for tenant, share in zip(tenants, (stopped_count, vetoing_count, limited_count), strict=True)
            for n in range(share)
        ]
        rng.shuffle(jobs)
        for _, name in jobs:
            cluster.submit_job(name)

        programs = (*servers, *workers)
        faults = stack.enter_context(ThreadPoolExecutor(1)).submit(
            inject_faults,
            cluster,
            programs,
            partial(check_running, programs, tenants),
            lambda rng: rng.choice(tenants).start_receiver(stack, cluster, services[0]),
            range(jobs_per_fault, stopped_count, jobs_per_fault),
        )
        people = stack.enter_context(ThreadPoolExecutor(64))
        vetoes: list[Future[SentVeto]] = []

        def train(job: tuple[Tenant, str]) -> None:
            tenant, name = job
            client = clients[tenant.name]
            decision_id = train_run(client, tenant, name)
            if tenant is vetoing:
                wait_seconds = rng.uniform(0.0, 1.5 * WINDOW_SECONDS)
                vetoes.append(people.submit(send_veto, client, name, decision_id, wait_seconds))

        with ThreadPoolExecutor(6) as trainers:
            list(trainers.map(train, jobs))

        sent = [veto.result() for veto in vetoes]
        faults.result()
        client = clients["limited"]

        def all_finished() -> bool:
            check_running(programs, tenants)
            return set(count_states(database)) <= FINAL_STATES | {DecisionState.ON_HOLD}

        wait_until(all_finished, "all stops are finished", 600)
        on_hold = [
            run_id for name, run_id in limited_tenant.runs.items() if cluster.jobs[name].time_of("asked") is None
        ]
        for run_id in on_hold:  # their trainers complete
            client.post(f"/runs/{run_id}/finish", {"status": "completed"})
        final_states = count_states(database)
        assert sum(proxy.fault_counts[kind] for kind in FAULTS for proxy in proxies) > count // 20

    late = [veto for veto in sent if not veto.heard]
    assert final_states == {
        DecisionState.CONFIRMED: stopped_count + STOPS_PER_HOUR + len(late),
        DecisionState.VETOED: vetoing_count - len(late),
        DecisionState.MOOT: limited_count - STOPS_PER_HOUR,
    }
    handed_over_at = load_times_of_hand_over(database)
    for veto in late:
        assert handed_over_at[veto.decision_id] <= veto.sent_at + VETO_ON_ITS_WAY, veto
    check_jobs(cluster, {veto.run for veto in sent if veto.heard}, limited_tenant)


def check_running(programs: Iterable[Program], tenants: Iterable[Tenant]) -> None:
    """Fail if a program or a receiver has ended by itself."""
    for program in programs:
        program.check_running()
    for tenant in tenants:
        assert tenant.process is None or tenant.process.poll() is None, f"the receiver of {tenant.name} has ended"


def inject_faults(
    cluster: FakeCluster,
    programs: Sequence[Program],
    check: Callable[[], None],
    restart_receiver: Callable[[random.Random], None],
    asked_counts: Iterable[int],
) -> None:
    """Restart a random program or receiver each time that so many jobs have been asked to save, and check meanwhile."""
    rng = random.Random(SEED)
    for asked_count in asked_counts:

        def has_asked_jobs(count: int = asked_count) -> bool:
            check()
            return cluster.has_asked_jobs(count)

        wait_until(has_asked_jobs, f"{asked_count} jobs are asked to save", 600)
        if rng.random() < 0.6:
            program = rng.choice(programs)
            program.kill()
            program.start()
        else:
            restart_receiver(rng)


def load_times_of_hand_over(database: Database) -> dict[str, datetime]:
    """When each stop that went out was first handed over, by decision."""
    columns = tables.decisions.c
    with database.reading() as tx:
        query = sa.select(columns.id, columns.handed_over_at).where(columns.handed_over_at.is_not(None))
        return {str(decision_id): at for decision_id, at in tx.execute(query)}


def check_jobs(cluster: FakeCluster, vetoed: Collection[str], limited: Tenant) -> None:
    """Check for each job whether it runs, how often it ended, and whether it could save first."""
    for name, job in cluster.jobs.items():
        if name in vetoed:
            assert (job.is_running, job.end_count, job.time_of("asked")) == (True, 0, None), name
        elif name not in limited.runs or job.time_of("asked") is not None:
            assert (job.is_running, job.end_count) == (False, 1), name
            assert was_saved_first(job), name
        else:
            assert (job.is_running, job.end_count) == (True, 0), name
    assert sum(not cluster.jobs[name].is_running for name in limited.runs) == STOPS_PER_HOUR


def was_saved_first(job: FakeJob) -> bool:
    """Whether the job was cancelled only after it had saved or its grace time was over."""
    asked, saved, cancelled = job.time_of("asked"), job.time_of("saved"), job.time_of("cancelled")
    if asked is None or cancelled is None:
        return asked is not None
    # The receiver counts from the start of the script, which writes `asked` a little later.
    waited = cancelled - asked + WRITE_DELAY_SECONDS
    return waited >= GRACE_SECONDS or (saved is not None and cancelled >= saved - WRITE_DELAY_SECONDS)
