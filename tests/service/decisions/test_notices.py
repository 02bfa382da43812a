"""Notices: a rule that a run meets, and an alert of its trainer, are announced once."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from evalstop_service.decisions.notices import MOST_ALERTS, check_rules, create_job, raise_alert
from evalstop_service.errors import Conflict
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from evalstop_service.webhooks.event_data import Alert

from tests.service.project_fixture import NOW, ProjectFixture


def post(project: ProjectFixture, run: Run, *values: float, start: int = 0, at: datetime = NOW) -> None:
    """Post values of the metric kl."""
    project.post_observations(
        run, [PostedObservation("kl", step, value) for step, value in enumerate(values, start)], at
    )


def load_notices(project: ProjectFixture, run: Run, event_type: str = "run.rule_met") -> list[dict[str, Any]]:
    return [json.loads(row["body"])["data"] for row in project.load_events(run, event_type)]


def check(project: ProjectFixture, now: datetime) -> None:
    check_rules(project.database, now - timedelta(seconds=45), now)


def test_spike_is_announced_once_within_the_pause(project: ProjectFixture) -> None:
    """A spike between two checks is announced, though the newest value is fine; a later one waits for the pause."""
    project.change_settings(rules=["kl > 20 every 10m"])
    run = project.open_run()
    post(project, run, 1.0, 25.0, 2.0)
    check(project, NOW)
    check(project, NOW + timedelta(seconds=15))
    (notice,) = load_notices(project, run)
    assert notice["rule"] == {
        "rule": "kl > 20 every 10m",
        "metric": "kl",
        "step": 1,
        "value": 25.0,
        "reason": "kl is 25 at step 1",
    }
    for minutes, count in ((5, 1), (10, 2)):
        at = NOW + timedelta(minutes=minutes)
        post(project, run, 30.0, start=10 + minutes, at=at)
        check(project, at)
        assert len(load_notices(project, run)) == count


def test_resent_and_ended_runs_are_not_announced(project: ProjectFixture) -> None:
    """A value that is sent again after the pause is not news, and neither is one of a run that has ended."""
    project.change_settings(rules=["kl > 20"])
    run = project.open_run()
    post(project, run, 25.0)
    check(project, NOW)
    later = NOW + timedelta(hours=2)
    post(project, run, 25.0, at=later)
    check(project, later)
    assert len(load_notices(project, run)) == 1
    ended = project.open_run()
    post(project, ended, 25.0, at=later)
    project.finish_run(ended, now=later)
    check(project, later)
    assert load_notices(project, ended) == []


def test_spike_while_no_process_ran_is_announced_once(project: ProjectFixture) -> None:
    """What was received before the job began is found at its first look, and not announced again by a restarted one."""
    project.change_settings(rules=["kl > 20 every 1m"])
    run = project.open_run()
    post(project, run, 1.0, 25.0, 2.0)
    for minutes in (30, 45):
        now = NOW + timedelta(minutes=minutes)
        create_job(project.database, lambda now=now: now).do(lambda _: False)  # type: ignore[misc]
        assert [notice["rule"]["step"] for notice in load_notices(project, run)] == [1]


def test_absent_metric_is_announced_by_the_job(project: ProjectFixture) -> None:
    """A running run whose metric has no value for so long is announced; one without rules never is."""
    run, now = project.open_run(), [NOW]
    job = create_job(project.database, lambda: now[0])
    post(project, run, 1.0)
    now[0] += timedelta(hours=1)
    job.do(lambda _: False)
    assert load_notices(project, run) == []
    project.change_settings(rules=["kl absent_for 30m", "other absent_for 90m"])
    job.do(lambda _: False)
    assert [notice["rule"]["metric"] for notice in load_notices(project, run)] == ["kl"]


def test_budget_is_a_rule_on_what_a_run_has_used(project: ProjectFixture) -> None:
    """A run that has used its hours, or GPU-hours, is announced; GPU-hours of a run without a number of GPUs never."""
    project.change_settings(rules=["evalstop/gpu_hours > 30", "evalstop/hours > 8"])
    run, unknown = project.open_run(labels={"gpus": "4"}), project.open_run()
    for hours, budgets in ((7, []), (7.6, ["evalstop/gpu_hours"]), (8.1, ["evalstop/gpu_hours", "evalstop/hours"])):
        check(project, NOW + timedelta(hours=hours))
        assert [notice["rule"]["metric"] for notice in load_notices(project, run)] == budgets
    assert {notice["rule"]["metric"] for notice in load_notices(project, unknown)} == {"evalstop/hours"}


def test_alert_counts_once_and_has_a_limit(project: ProjectFixture) -> None:
    """An alert that is sent again is one event; beyond the limit of an hour alerts are refused."""
    run = project.open_run()

    def alert(number: int, now: datetime = NOW) -> None:
        with project.database.transaction() as tx:
            raise_alert(tx, project.id, run.id, Alert(UUID(int=number), "slow", "9 s"), now)

    for _ in range(2):
        alert(0)
    assert [notice["alert"]["title"] for notice in load_notices(project, run, "run.alert")] == ["slow"]
    for number in range(1, MOST_ALERTS):
        alert(number)
    with pytest.raises(Conflict, match="20 alerts"):
        alert(MOST_ALERTS)
    alert(MOST_ALERTS, NOW + timedelta(hours=1))
    assert len(load_notices(project, run, "run.alert")) == MOST_ALERTS + 1
