"""A policy is tried on the runs of the past."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from evalstop_detectors import POLICIES, InvalidPolicy, policy_to_document
from evalstop_service.clock import utc_now
from evalstop_service.decisions import commands
from evalstop_service.errors import Conflict, Invalid
from evalstop_service.evaluation import backtests
from evalstop_service.ingest import Observations
from evalstop_service.projects import policies
from evalstop_service.store import backtests as backtest_rows
from evalstop_service.store.backtests import Backtest
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation

from tests.service.project_fixture import submit_message
from tests.service.web.dashboard.recorded_runs import (
    LEVEL_POLICY,
    Eval,
    Tenant,
    add_tenant,
    load_recorded_evals,
    open_run,
)

HACKING = load_recorded_evals("np-0044")
HEALTHY = load_recorded_evals("np-0082")

EAGER: dict[str, Any] = {"name": "eager", "members": [{"detector": "k_below_best", "params": {"k": 2}}]}
NEVER: dict[str, Any] = {"name": "never", "members": [{"detector": "k_below_best", "params": {"k": 900}}]}


@pytest.fixture
def now() -> datetime:
    return utc_now()


@pytest.fixture
def tenant(database: Database, now: datetime) -> Tenant:
    return add_tenant(database, now)


def ended(database: Database, tenant: Tenant, now: datetime, name: str, evals: tuple[Eval, ...]) -> UUID:
    run = open_run(database, tenant, now, name, labels={"gpus": "2"})
    points = [
        point
        for item in evals
        for point in (
            PostedObservation("reward/gold", item.step, item.gold, item.gold_stderr),
            PostedObservation("reward/proxy", item.step, item.proxy),
            PostedObservation("policy/kl", item.step, item.kl),
        )
    ]
    submit_message(database, tenant.project.id, run.id, Observations(tuple(points)), now)
    commands.finish_run(database, tenant.project.id, run.id, "completed", now + timedelta(hours=10))
    return run.id


def asked(database: Database, tenant: Tenant, document: dict[str, Any], runs: int = 500) -> Backtest:
    return backtests.request_backtest(database, tenant.project.id, document, runs, "dana", utc_now())


def result(database: Database, asked_for: Backtest) -> Backtest:
    with database.reading() as tx:
        found = backtest_rows.find_backtest(tx, asked_for.project_id, asked_for.id)
    assert found is not None
    return found


def test_what_a_policy_would_have_done(database: Database, tenant: Tenant, now: datetime) -> None:
    """The policy under which the runs went on comes to the same stops; others to theirs, held against what was true."""
    hacking = ended(database, tenant, now, "hacking", HACKING)
    ended(database, tenant, now, "healthy", HEALTHY)
    open_run(database, tenant, now, "still running")
    same, eager, never = (asked(database, tenant, document) for document in (LEVEL_POLICY, EAGER, NEVER))
    while backtests.run_next_backtest(database, utc_now):
        pass
    found = {finding.run_name: finding for finding in result(database, same).findings}
    assert set(found) == {"hacking", "healthy"}
    assert found["hacking"].step == found["hacking"].decided_step == 280
    assert found["hacking"].outcome == "right"
    assert 0 < (found["hacking"].hours_after or 0) < 20
    assert not any(finding.differs for finding in found.values())
    figures = backtests.summarize_findings(result(database, eager).findings)
    assert (figures.runs, figures.stops, figures.wrong) == (2, 2, 2)  # of the one that turned too early
    lax = result(database, never)
    assert backtests.summarize_findings(lax.findings).missed == 1
    assert backtests.sort_findings(lax.findings)[0].run_id == hacking
    assert (lax.state, lax.done, lax.total) == ("done", 2, 2)


def test_it_goes_on_where_a_killed_process_was(database: Database, tenant: Tenant, now: datetime) -> None:
    """A process killed in the middle costs the runs of one step; another takes over after the lease, none twice."""
    ids = []
    for number in range(2 * backtests.RUNS_AT_A_TIME + 1):
        run = open_run(database, tenant, now, f"run-{number}")
        points = tuple(PostedObservation("reward/gold", step, float(step % 7), 0.1) for step in range(20))
        submit_message(database, tenant.project.id, run.id, Observations(points), now)
        commands.finish_run(database, tenant.project.id, run.id, "completed", now)
        ids.append(run.id)
    wanted = asked(database, tenant, policy_to_document(POLICIES["cautious"]))
    command = [sys.executable, "-c", WORKER, database.url.render_as_string(hide_password=False)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"saving the second step\n"
        finally:
            worker.kill()
    left = result(database, wanted)
    assert left.state == "running"
    assert left.done == backtests.RUNS_AT_A_TIME
    assert not backtests.run_next_backtest(database, utc_now), "the lease of whoever was killed still runs"
    with database.transaction() as tx:  # time passes
        assert backtest_rows.save_progress(tx, left, replace(left, lease_until=now))
    assert backtests.run_next_backtest(database, utc_now)
    found = result(database, wanted)
    assert found.state == "done"
    assert [finding.run_id for finding in found.findings] == ids[::-1]


def test_what_cannot_be_asked_for(database: Database, tenant: Tenant, now: datetime) -> None:
    """No policy, too many runs, more backtests than may wait: each is refused with what may be."""
    with pytest.raises(InvalidPolicy):
        asked(database, tenant, {"name": "x", "members": []})
    with pytest.raises(Invalid, match="1 to 500"):
        asked(database, tenant, LEVEL_POLICY, runs=501)
    with database.reading() as tx, pytest.raises(Invalid, match="cautious"):
        policies.find_referred_policy(tx, tenant.project.id, "gone")
    for _ in range(backtests.MOST_UNFINISHED):
        asked(database, tenant, LEVEL_POLICY)
    with pytest.raises(Conflict, match="unfinished"):
        asked(database, tenant, LEVEL_POLICY)


WORKER = """
import sys, threading
from evalstop_service.evaluation import backtests
from evalstop_service.clock import utc_now
from evalstop_service.store.database import Database
calls = []
def clock():
    calls.append(utc_now())
    if len(calls) == 3:  # after those of the claim and of the first step
        print("saving the second step", flush=True)
        threading.Event().wait()
    return calls[-1]
backtests.run_next_backtest(Database(sys.argv[1]), clock)
"""
