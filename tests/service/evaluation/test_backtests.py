"""Backtests: a policy judged on past runs."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from evalstop_detectors import POLICIES, InvalidPolicy, policy_from_document, policy_to_document
from evalstop_service.clock import utc_now
from evalstop_service.decisions import commands
from evalstop_service.domain.run import MetricFields
from evalstop_service.errors import Invalid
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

EARLY_POLICY: dict[str, Any] = {"name": "early-stop", "members": [{"detector": "k_decline", "params": {"k": 1}}]}
NEVER_POLICY: dict[str, Any] = {"name": "never", "members": [{"detector": "k_decline", "params": {"k": 900}}]}


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


def run_backtest(tenant: Tenant, document: dict[str, Any], runs: int = 500) -> Backtest:
    """Run a backtest, and load what it stored."""
    run = backtests.run_backtest(tenant.database, tenant.id, document, runs, "dana", utc_now())
    with tenant.database.reading() as tx:
        stored = backtest_rows.load_backtest(tx, tenant.id, run.id)
    assert stored == run
    return stored


def test_backtest_finds_stops_and_their_outcomes(tenant: Tenant) -> None:
    """The runs' own policy finds the same stops again; other policies' stops are judged by the outcomes."""
    falling_id = add_ended_run(tenant, "hacking", FALLING_RUN)
    add_ended_run(tenant, "healthy", RISING_RUN)
    tenant.open_run("still running")
    same_policy, early_policy, never_policy = (
        run_backtest(tenant, document) for document in (LEVEL_POLICY, EARLY_POLICY, NEVER_POLICY)
    )
    findings = {finding.run_name: finding for finding in same_policy.findings}
    assert set(findings) == {"hacking", "healthy"}
    assert findings["hacking"].step == findings["hacking"].decided_step == 270
    assert findings["hacking"].outcome == "right"
    assert 0 < (findings["hacking"].hours_after or 0) < 20
    assert not any(finding.differs for finding in findings.values())
    figures = backtests.summarize_findings(early_policy.findings)
    assert (figures.stops, figures.wrong) == (2, 2)  # the stop of the run that turned came too early
    assert backtests.summarize_findings(never_policy.findings).missed == 1
    assert backtests.sort_findings(never_policy.findings)[0].run_id == falling_id
    assert (never_policy.replayed, never_policy.cut_short) == (2, False)


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
    paper = policy_to_document(POLICIES["paper"])
    (finding,) = backtests.run_backtest(database, project.id, paper, 500, "dana", utc_now()).findings
    assert (finding.step, finding.run_outcome, finding.outcome) == (7, "healthy", "right")


def test_backtest_replays_the_newest_runs(tenant: Tenant) -> None:
    """Each of them once, over several pages of runs, and no more than asked for."""
    run_ids = []
    for number in range(backtests.RUNS_AT_A_TIME + 3):
        run = tenant.open_run(f"run-{number}")
        tenant.post_observations(
            run, [PostedObservation("reward/gold", step, float(step % 7), 0.1) for step in range(9)]
        )
        tenant.finish_run(run)
        run_ids.append(run.id)
    newest = run_ids[::-1]
    assert [finding.run_id for finding in run_backtest(tenant, EARLY_POLICY).findings] == newest
    assert [finding.run_id for finding in run_backtest(tenant, EARLY_POLICY, runs=11).findings] == newest[:11]


def test_invalid_backtest_is_refused(database: Database, tenant: Tenant) -> None:
    """An invalid policy and too many runs are refused."""
    with pytest.raises(InvalidPolicy):
        run_backtest(tenant, {"name": "x", "members": []})
    with pytest.raises(Invalid, match="1 to 500"):
        run_backtest(tenant, LEVEL_POLICY, runs=501)
    with database.reading() as tx, pytest.raises(Invalid, match="cautious"):
        policies.find_referred_policy(tx, tenant.id, "gone")
