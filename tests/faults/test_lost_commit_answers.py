"""A commit whose answer is lost, at the service or at the client: the observations are stored once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import pytest
from evalstop_service.store.database import Database

from tests.conftest import ClonePostgres
from tests.faults.commit_proxy import CommitProxy, start_commit_proxy
from tests.faults.conftest import NEEDS_OWN_POSTGRES
from tests.faults.retrying_clients import RetryingClient, build_batch, create_observations
from tests.faults.run_records import assert_nothing_lost, create_project_and_key
from tests.faults.servers import Replicas, start_replica
from tests.service.project_fixture import ProjectFixture

pytestmark = pytest.mark.real

STEPS = 45
TERMS = {"policy": "paper", "mode": "enforce"}


@dataclass(frozen=True)
class ProxiedService:
    """A service whose connections to its database go through a commit proxy, and a client of the service."""

    project: ProjectFixture
    service: Replicas
    proxy: CommitProxy
    client: RetryingClient


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory, clone_postgres: ClonePostgres) -> Iterator[ProxiedService]:
    if "TEST_DATABASE_URL" in os.environ:
        pytest.skip(NEEDS_OWN_POSTGRES)
    url = clone_postgres()
    with ExitStack() as stack:
        database = Database(url)
        stack.callback(database.close)
        project, key = create_project_and_key(database)
        proxy, proxied_url = stack.enter_context(start_commit_proxy(url))
        service = stack.enter_context(start_replica(tmp_path_factory.mktemp("service"), proxied_url))
        yield ProxiedService(project, service, proxy, stack.enter_context(RetryingClient(key, lambda: service.url)))


def test_commit_without_an_answer_counts_observations_once(
    proxied: ProxiedService, embedded_database: Database
) -> None:
    """If the service gets no answer to its commit, its retry reports duplicates and the run is as without a fault."""
    run_id = proxied.client.post("/runs", TERMS | {"name": "answer-lost"})["id"]
    cuts_before = proxied.proxy.cut_count
    for step in range(STEPS):
        # Before the stop at step 32: what follows a stop changes the run too, and a save that finds it changed stores
        # nothing. Losing the answer to that one is no fault.
        answer_lost = step in range(3, 32, 6)
        if answer_lost:
            proxied.proxy.arm()
        receipt = proxied.client.post(f"/runs/{run_id}/observations", build_batch(create_observations(step)))
        assert (receipt["accepted"], receipt["duplicates"]) == ((0, 3) if answer_lost else (3, 0))
    assert proxied.proxy.cut_count == cuts_before + 5
    assert proxied.client.refusals == []
    assert_nothing_lost(
        proxied.project, run_id, [create_observations(step) for step in range(STEPS)], embedded_database
    )


def test_replica_killed_after_its_commit_loses_nothing(proxied: ProxiedService, embedded_database: Database) -> None:
    """If a replica is killed between commit and response, the repeated post reports duplicates and changes nothing."""
    run_id = proxied.client.post("/runs", TERMS | {"name": "killed"})["id"]
    (program,) = proxied.service.programs
    cuts_before = proxied.proxy.cut_count
    for step in range(STEPS):
        killed = step in (10, 32)  # step 32 causes the stop
        if killed:
            pid = program.pid
            proxied.proxy.arm(lambda pid=pid: os.kill(pid, signal.SIGKILL))  # type: ignore[misc]
            with pytest.raises(httpx.TransportError):
                proxied.client.post_once(f"/runs/{run_id}/observations", build_batch(create_observations(step)))
            proxied.service.restart(program)
        receipt = proxied.client.post(f"/runs/{run_id}/observations", build_batch(create_observations(step)))
        assert (receipt["accepted"], receipt["duplicates"]) == ((0, 3) if killed else (3, 0))
    assert proxied.proxy.cut_count == cuts_before + 2
    assert_nothing_lost(
        proxied.project, run_id, [create_observations(step) for step in range(STEPS)], embedded_database
    )
