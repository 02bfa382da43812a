"""Backtests: a policy judged on past runs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from evalstop_detectors import POLICIES, InvalidPolicy, policy_from_document, policy_to_document
from evalstop_service.clock import utc_now
from evalstop_service.decisions import commands
from evalstop_service.domain.run import MetricFields
from evalstop_service.errors import Conflict, Invalid
from evalstop_service.evaluation import backtests
from evalstop_service.projects import policies
from evalstop_service.store import backtests as backtest_rows
from evalstop_service.store.audit import Author
from evalstop_service.store.backtests import Backtest
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation

from tests.service.project_fixture import set_up_project
from tests.service.web.pages.recorded_runs import (
    LEVEL_POLICY,
    Eval,
    Tenant,
    add_tenant,
    load_recorded_evals,
)

FALLING_RUN = load_recorded_evals("np-0044")
RISING_RUN = load_recorded_evals("np-0082")

EARLY_POLICY: dict[str, Any] = {"name": "early-stop", "members": [{"detector": "k_below_best", "params": {"k": 2}}]}
NEVER_POLICY: dict[str, Any] = {"name": "never", "members": [{"detector": "k_below_best", "params": {"k": 900}}]}


@pytest.fixture
def now() -> datetime:
    return utc_now()


@pytest.fixture
def tenant(database: Database, now: datetime) -> Tenant:
    return add_tenant(database, now)


def add_ended_run(tenant: Tenant, name: str, evals: tuple[Eval, ...]) -> UUID:
    run = tenant.open_run(name, labels={"gpus": "2"})
    observations = [
        observation
        for item in evals
        for observation in (
            PostedObservation("reward/gold", item.step, item.gold, item.gold_stderr),
            PostedObservation("reward/proxy", item.step, item.proxy),
            PostedObservation("policy/kl", item.step, item.kl),
        )
    ]
    tenant.post_observations(run, observations)
    tenant.finish_run(run, now=tenant.now + timedelta(hours=10))
    return run.id


def request_backtest(tenant: Tenant, document: dict[str, Any], runs: int = 500) -> Backtest:
    return backtests.request_backtest(tenant.database, tenant.id, document, runs, "dana", utc_now())


def load_backtest(database: Database, requested: Backtest) -> Backtest:
    with database.reading() as tx:
        return backtest_rows.load_backtest(tx, requested.project_id, requested.id)


def test_backtest_finds_stops_and_their_outcomes(database: Database, tenant: Tenant) -> None:
    """The runs' own policy finds the same stops again; other policies' stops are judged by the outcomes."""
    falling_id = add_ended_run(tenant, "hacking", FALLING_RUN)
    add_ended_run(tenant, "healthy", RISING_RUN)
    tenant.open_run("still running")
    same_policy, early_policy, never_policy = (
        request_backtest(tenant, document) for document in (LEVEL_POLICY, EARLY_POLICY, NEVER_POLICY)
    )
    while backtests.run_next_backtest(database, utc_now):
        pass
    findings = {finding.run_name: finding for finding in load_backtest(database, same_policy).findings}
    assert set(findings) == {"hacking", "healthy"}
    assert findings["hacking"].step == findings["hacking"].decided_step == 280
    assert findings["hacking"].outcome == "right"
    assert 0 < (findings["hacking"].hours_after or 0) < 20
    assert not any(finding.differs for finding in findings.values())
    figures = backtests.summarize_findings(load_backtest(database, early_policy).findings)
    assert (figures.runs, figures.stops, figures.wrong) == (2, 2, 2)  # the stop of the run that turned came too early
    never_result = load_backtest(database, never_policy)
    assert backtests.summarize_findings(never_result.findings).missed == 1
    assert backtests.sort_findings(never_result.findings)[0].run_id == falling_id
    assert (never_result.state, never_result.done, never_result.total) == ("done", 2, 2)


def test_stop_for_a_critical_eval_is_judged_by_it(database: Database, now: datetime) -> None:
    """As for recorded decisions: the mean of the evals may rise while the critical one has fallen for good."""
    project = set_up_project(database, "shadow")
    critical: dict[str, MetricFields] = {
        "math": {"role": "eval", "direction": "maximize", "weight": 100.0},
        "safety": {"role": "eval", "direction": "maximize", "critical": True},
    }
    with database.transaction() as tx:
        policies.create_policy(tx, Author(project.id, "dana", now), policy_from_document(NEVER_POLICY))
    run = project.open_run(metrics=critical, policy="never")
    safety = [0.1, 0.4, 0.7, 0.9, 1.0, 0.9, 0.8, 0.7, *[0.2] * 12]
    for step, value in enumerate(safety):
        project.post_observations(
            run, [PostedObservation("math", step, float(step)), PostedObservation("safety", step, value)]
        )
    commands.finish_run(database, project.id, run.id, "completed", now)
    assert project.find_decision(run) is None
    backtest = backtests.request_backtest(
        database, project.id, policy_to_document(POLICIES["paper"]), 500, "dana", utc_now()
    )
    assert backtests.run_next_backtest(database, utc_now)
    (finding,) = load_backtest(database, backtest).findings
    assert (finding.step, finding.run_outcome, finding.outcome) == (7, "healthy", "right")


@pytest.mark.nightly
@pytest.mark.real
def test_backtest_of_a_killed_process_is_continued(database: Database, tenant: Tenant, now: datetime) -> None:
    """After a kill another process continues once the lease has ended, and no run is judged twice."""
    run_ids = []
    for number in range(2 * backtests.RUNS_AT_A_TIME + 1):
        run = tenant.open_run(f"run-{number}")
        observations = tuple(PostedObservation("reward/gold", step, float(step % 7), 0.1) for step in range(20))
        tenant.post_observations(run, observations)
        tenant.finish_run(run)
        run_ids.append(run.id)
    requested = request_backtest(tenant, policy_to_document(POLICIES["cautious"]))
    command = [sys.executable, "-c", WORKER, database.url.render_as_string(hide_password=False)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"the first step is saved\n"
        finally:
            worker.kill()
    interrupted = load_backtest(database, requested)
    assert interrupted.state == "running"
    assert interrupted.done == backtests.RUNS_AT_A_TIME
    assert not backtests.run_next_backtest(database, utc_now), "the lease of the killed process has not ended"
    with database.transaction() as tx:  # let the lease end
        assert backtest_rows.save_progress(tx, interrupted, replace(interrupted, lease_until=now))
    assert backtests.run_next_backtest(database, utc_now)
    continued = load_backtest(database, requested)
    assert continued.state == "done"
    assert [finding.run_id for finding in continued.findings] == run_ids[::-1]


def test_step_longer_than_the_lease_is_saved_once(database: Database, tenant: Tenant, now: datetime) -> None:
    """Of two processes that replay the same runs, because the lease was too short for them, the first to end saves
    them: otherwise each would lose its work to the next."""
    request_backtest(tenant, EARLY_POLICY)
    with database.transaction() as tx:
        expired = backtest_rows.claim_backtest(tx, now, now)
        taken_over = backtest_rows.claim_backtest(tx, now, now + timedelta(minutes=1))
        assert expired is not None
        assert taken_over is not None
        assert expired.id == taken_over.id
        assert backtest_rows.save_progress(tx, expired, replace(expired, done=1))
        assert not backtest_rows.save_progress(tx, taken_over, replace(taken_over, done=1))


def test_invalid_backtest_is_refused(database: Database, tenant: Tenant) -> None:
    """An invalid policy, too many runs, or too many waiting backtests are refused."""
    with pytest.raises(InvalidPolicy):
        request_backtest(tenant, {"name": "x", "members": []})
    with pytest.raises(Invalid, match="1 to 500"):
        request_backtest(tenant, LEVEL_POLICY, runs=501)
    with database.reading() as tx, pytest.raises(Invalid, match="cautious"):
        policies.find_referred_policy(tx, tenant.id, "gone")
    for _ in range(backtests.MOST_UNFINISHED):
        request_backtest(tenant, LEVEL_POLICY)
    with pytest.raises(Conflict, match="unfinished"):
        request_backtest(tenant, LEVEL_POLICY)


WORKER = """
import sys, threading
from evalstop_service.evaluation import backtests
from evalstop_service.clock import utc_now
from evalstop_service.store.database import Database
def pause(seconds):
    print("the first step is saved", flush=True)
    threading.Event().wait()
backtests.run_next_backtest(Database(sys.argv[1]), utc_now, pause)
"""
