"""The overview: what needs a person, most urgent first; what can be trusted; what was saved in the period."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime, timedelta
from html import unescape

import httpx
from evalstop_service.decisions import commands, stale_runs
from evalstop_service.ingest import CheckpointSaved, Observations
from evalstop_service.rules.confidence_sequences import Stratum, estimate_precision
from evalstop_service.rules.decision_lifecycle import DecisionState, Reported
from evalstop_service.store import endpoints, policies, projects, run_health
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.web.dashboard import formatting
from evalstop_service.web.dashboard.overview import estimate_needed, says_enough
from hypothesis import given
from hypothesis import strategies as st

from tests.service.case_rows import insert_cases
from tests.service.project_fixture import submit_message
from tests.service.web.dashboard.recorded_runs import Tenant, confirm, open_run, recorded, report
from tests.service.web.dashboard.serving import EMBEDDED, token_of

HACKING = recorded("np-0044")


def part(visitor: httpx.Client, name: str, path: str = "/") -> str:
    """A part of the overview, with its characters as they are read."""
    html = unescape(visitor.get(path).raise_for_status().text)
    return html.split(f'data-part="{name}"')[1].split("</section>")[0]


@EMBEDDED
def test_what_is_sent_soonest_comes_first(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Pending before failed before on hold, each with its reason and the buttons that apply; a veto takes one off."""
    failed = open_run(database, tenant, now, "failed", mode="enforce")
    decision = report(database, tenant, failed.id, HACKING, now).decision
    assert decision is not None
    said = Reported(now, DecisionState.FAILED, "receiver", "the job is owned by root", {})
    commands.record_report(database, tenant.project.id, decision.id, said)
    with database.transaction() as tx:
        projects.update_project(tx, replace(tenant.project, veto_window_seconds=900.0))
    pending = report(database, tenant, open_run(database, tenant, now, "soon", mode="enforce").id, HACKING, now)
    assert pending.decision is not None
    held = open_run(database, tenant, now, "held", mode="enforce")
    for item in HACKING:  # no checkpoint is registered
        points = (PostedObservation("reward/gold", item.step, item.gold),)
        submit_message(database, tenant.project.id, held.id, Observations(points), now)
    queue = part(visitor, "queue")
    assert re.findall(r"<bdi>(soon|failed|held)</bdi>", queue) == ["soon", "failed", "held"]
    assert "the job is owned by root" in queue
    assert "no checkpoint" in queue
    assert re.findall(r'<summary class="[a-z]+">([^<]+)</summary>', queue) == [
        "Veto",
        "Undo",
        "Veto",
        "Release",
    ]
    answer = visitor.post(
        f"/decisions/{pending.decision.id}/veto",
        data={"reason": "curriculum change", "next": "/", "csrf": token_of(visitor)},
    )
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert re.findall(r"<bdi>(soon|failed|held)</bdi>", part(visitor, "queue")) == ["failed", "held"]


@EMBEDDED
def test_a_stale_run_is_silent_since_its_last_report(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Not since the service noticed; a heartbeat of its trainer is a report."""
    begun = now - timedelta(hours=9)
    for name, heartbeat_at in (("never", None), ("once", now - timedelta(hours=5))):
        run = open_run(database, tenant, begun, name)
        report(database, tenant, run.id, HACKING[:3], begun + timedelta(hours=1))
        if heartbeat_at is not None:
            with database.transaction() as tx:
                run_health.record_heartbeat(tx, run.id, tenant.project.id, heartbeat_at)
    stale_runs.check_due_runs(database, now)
    queue = part(visitor, "queue")
    heard = [formatting.format_iso(now - timedelta(hours=hours)) for hours in (5, 8)]
    assert re.findall(r'last report <time datetime="([^"]+)"', queue) == heard


@EMBEDDED
def test_a_parked_job_can_return_or_be_stopped(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """It waits in the queue with both buttons; once it is resumed it is off the queue, and its run goes on."""
    aside = {"name": "aside", "action": "park", "members": [{"detector": "k_decline", "params": {"k": 2}}]}
    with database.transaction() as tx:
        policies.add_policy(tx, tenant.project, "aside", aside, now)
        endpoints.add_endpoint(
            tx, tenant.project.id, url="http://127.0.0.1:9/", event_types=["run.park_requested"], now=now
        )
    run = open_run(database, tenant, now, "dip", mode="enforce", policy="aside")
    submit_message(database, tenant.project.id, run.id, CheckpointSaved(2, "file:///2"), now)
    points = tuple(PostedObservation("reward/gold", step, gold) for step, gold in enumerate((0.1, 0.5, 0.9, 0.8, 0.7)))
    decision = submit_message(database, tenant.project.id, run.id, Observations(points), now).decision
    assert decision is not None
    said = Reported(now, DecisionState.PARKED, "receiver", "requeued into partition low", {"partition": "low"})
    commands.record_report(database, tenant.project.id, decision.id, said)
    queue = part(visitor, "queue")
    assert "requeued into partition low" in queue
    assert re.findall(r'<summary class="[a-z]+">([^<]+)</summary>', queue) == ["Resume", "Stop"]
    page = unescape(visitor.get(f"/runs/{run.id}").raise_for_status().text)
    assert "Parked at step 4: the job is set aside and can return." in page
    assert ">Resume</summary>" in page
    word = {"reason": "a new curriculum", "next": "/", "csrf": token_of(visitor)}
    assert visitor.post(f"/decisions/{decision.id}/undo", data=word).status_code == 303
    assert "dip" not in part(visitor, "queue")
    assert "returned" in visitor.get("/runs?status=running").text


@EMBEDDED
def test_a_label_is_asked_for_where_one_can_know(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Of a run that went on to its end, not of one that still runs or was stopped."""
    running = open_run(database, tenant, now, "running")
    report(database, tenant, running.id, HACKING, now)
    ended = open_run(database, tenant, now, "ended")
    report(database, tenant, ended.id, HACKING, now)
    commands.finish_run(database, tenant.project.id, ended.id, "completed", now)
    stopped = open_run(database, tenant, now, "stopped", mode="enforce")
    decision = report(database, tenant, stopped.id, HACKING[:29], now).decision
    assert decision is not None
    confirm(database, tenant, decision.id, now)
    recent = part(visitor, "recent")
    assert re.findall(r"<bdi>(running|ended|stopped)</bdi>", recent) == ["stopped", "ended", "running"]
    assert re.findall(r'aria-label="Was the stop of (\w+) right\?"', recent) == ["ended"]
    assert "no outcome yet" in recent


@EMBEDDED
def test_only_what_is_enforced_is_trusted(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """A policy that only records is not shown, nor is a figure of too few cases; the period chooses the cases."""
    run = open_run(database, tenant, now, "ppo")
    insert_cases(database, run, 60, now, gpus=8.0, gpu_hours=80.0)
    assert "No policy stops runs" in part(visitor, "trust")
    stopped = {"treatment": "stopped", "gpus": 8.0, "gpu_hours": 80.0}
    insert_cases(database, run, 3, now - timedelta(days=60), gpu_hours_saved=20.0, **stopped)
    trust = part(visitor, "trust")
    assert "level" in trust
    assert "100 %" in trust
    assert "too few cases (0 of about" in trust, "no healthy run has ended"
    assert "60 <small>GPU-hours</small>" in part(visitor, "saved")
    assert "Would have been saved" in part(visitor, "saved", "/?days=30")
    assert "No policy stops runs" in part(visitor, "trust", "/?days=30")
    assert visitor.get("/?days=31").status_code in (404, 422)


@given(st.integers(0, 400), st.integers(0, 400))
def test_an_estimate_says_enough_or_needs_more_cases(right: int, wrong: int) -> None:
    """What says too little needs more cases than it has, and what says enough needs no more; of nothing, a hundred."""
    found = estimate_precision([Stratum(right, wrong)])
    assert says_enough(found) == (estimate_needed(found) <= max(found.decided, 10))
    assert estimate_needed(found) <= max(found.decided, 112)
