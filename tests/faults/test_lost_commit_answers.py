"""A commit whose answer never arrives: the points are counted once, whoever is told or not told of them."""

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
from tests.faults.commit_proxy import CommitCutter, commit_cutter
from tests.faults.conftest import OWN
from tests.faults.retrying_clients import Caller, batch, told
from tests.faults.run_records import assert_nothing_lost, installed
from tests.faults.servers import Replicas, serving
from tests.service.project_fixture import ProjectFixture

pytestmark = pytest.mark.real

KNOWN_KEYS = {"EVALSTOP_KEY_CACHE_SECONDS": "600"}
"""So that between two posts nothing else commits."""

STEPS = 45
TERMS = {"policy": "paper", "mode": "enforce"}


@dataclass(frozen=True)
class Cut:
    """A service that reaches its database through a proxy that cuts it off, and a caller of it."""

    project: ProjectFixture
    service: Replicas
    cutter: CommitCutter
    caller: Caller


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory, clone_postgres: ClonePostgres) -> Iterator[Cut]:
    if "TEST_DATABASE_URL" in os.environ:
        pytest.skip(OWN)
    url = clone_postgres()
    with ExitStack() as stack:
        database = Database(url)
        stack.callback(database.close)
        project, key = installed(database)
        cutter, through = stack.enter_context(commit_cutter(url))
        service = stack.enter_context(serving(tmp_path_factory.mktemp("service"), through, **KNOWN_KEYS))
        yield Cut(project, service, cutter, stack.enter_context(Caller(key, lambda: service.url)))


def test_the_answer_to_a_commit_is_lost(cut: Cut, embedded_database: Database) -> None:
    """The service that never hears of its commit finds the points on record, and says so; the run is judged once."""
    run_id = cut.caller.post("/runs", TERMS | {"name": "cut off"})["id"]
    cuts = cut.cutter.cuts
    for step in range(STEPS):
        unheard = step % 4 == 3
        if unheard:
            cut.cutter.arm()
        receipt = cut.caller.post(f"/runs/{run_id}/observations", batch(told(step)))
        assert (receipt["accepted"], receipt["duplicates"]) == ((0, 3) if unheard else (3, 0))
    assert cut.cutter.cuts == cuts + STEPS // 4
    assert cut.caller.refusals == []
    assert_nothing_lost(cut.project, run_id, [told(step) for step in range(STEPS)], embedded_database)


def test_a_replica_is_killed_behind_its_commit(cut: Cut, embedded_database: Database) -> None:
    """Killed when the points are stored and nobody was told: sent again, they are known and change nothing."""
    run_id = cut.caller.post("/runs", TERMS | {"name": "killed"})["id"]
    (program,) = cut.service.programs
    cuts = cut.cutter.cuts
    for step in range(STEPS):
        killed = step in (10, 32)  # the second one decides
        if killed:
            pid = program.pid
            cut.cutter.arm(lambda pid=pid: os.kill(pid, signal.SIGKILL))  # type: ignore[misc]
            with pytest.raises(httpx.TransportError):
                cut.caller.try_once(f"/runs/{run_id}/observations", batch(told(step)))
            cut.service.restart(program)
        receipt = cut.caller.post(f"/runs/{run_id}/observations", batch(told(step)))
        assert (receipt["accepted"], receipt["duplicates"]) == ((0, 3) if killed else (3, 0))
    assert cut.cutter.cuts == cuts + 2
    assert_nothing_lost(cut.project, run_id, [told(step) for step in range(STEPS)], embedded_database)
