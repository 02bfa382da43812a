"""The overview: stops that wait for a person, decisions, policies, GPU-hours saved; and the fleet's running runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from html import unescape
from typing import Any

import httpx
import pytest
from evalstop_detectors import POLICIES, policy_to_document
from evalstop_service.decisions import stale_runs
from evalstop_service.domain.confidence_sequences import StageNumbers
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.domain.statuses import ProposalKind, ProposalState, Stage
from evalstop_service.ingest import CheckpointSaved
from evalstop_service.store import policies, proposals, rollout_stages, run_details
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.proposals import Proposal
from evalstop_service.store.rollout_stages import RolloutStage
from evalstop_service.store.runs import Run
from evalstop_service.web.pages import formatting

from tests.service.case_rows import insert_cases
from tests.service.web.pages.recorded_runs import Tenant, add_tenant, load_recorded_evals
from tests.service.web.pages.serving import SQLITE_ONLY, read_csrf_token

HACKING = load_recorded_evals("np-0044")


def read_section(visitor: httpx.Client, name: str, path: str = "/") -> str:
    """A section of the overview, with its character references resolved."""
    html = unescape(visitor.get(path).raise_for_status().text)
    return html.split(f'data-part="{name}"')[1].split("</section>")[0]


@pytest.mark.slow
@SQLITE_ONLY
def test_queue_is_ordered_by_urgency(visitor: httpx.Client, tenant: Tenant, now: datetime) -> None:
    """Pending comes before failed, and failed before on hold, each with its reason and buttons; a veto removes its
    entry."""
    failed, decision = tenant.open_stopped_run("failed", HACKING)
    tenant.record_report(decision, DecisionState.FAILED, now, reason="the job is owned by root")
    tenant.post_evals(failed, [replace(HACKING[-1], step=HACKING[-1].step + 10)], now + timedelta(seconds=9))
    tenant.change_settings(veto_window_seconds=900.0)
    _, pending = tenant.open_stopped_run("soon", HACKING)
    on_hold = tenant.open_run("held", mode="enforce")  # without a checkpoint
    tenant.post_observations(on_hold, [PostedObservation("reward/gold", row.step, row.gold) for row in HACKING])
    queue = read_section(visitor, "queue")
    assert re.findall(r"<bdi>(soon|failed|held)</bdi>", queue) == ["soon", "failed", "held"]
    assert "the job is owned by root" in queue
    assert "no checkpoint" in queue
    assert "The stop failed, and the run went on, to step" in queue, "there is nothing to undo"
    buttons = ["Veto", "Veto", "Release"]
    assert re.findall(r'<summary class="[a-z]+">([^<]+)</summary>', queue) == buttons
    form = {"reason": "curriculum change", "next": "/", "csrf": read_csrf_token(visitor)}
    answer = visitor.post(f"/decisions/{pending.id}/veto", data=form)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert re.findall(r"<bdi>(soon|failed|held)</bdi>", read_section(visitor, "queue")) == ["failed", "held"]


@SQLITE_ONLY
def test_stale_run_shows_its_last_report(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """A stale run shows the time of its last observation or heartbeat, not of its detection."""
    started_at = now - timedelta(hours=9)
    for name, heartbeat_at in (("never", None), ("once", now - timedelta(hours=5))):
        run = tenant.open_run(name, started_at)
        tenant.post_evals(run, HACKING[:3], started_at + timedelta(hours=1))
        if heartbeat_at is not None:
            with database.transaction() as tx:
                run_details.record_heartbeat(tx, run.id, tenant.id, heartbeat_at)
    stale_runs.check_due_runs(database, now)
    queue = read_section(visitor, "queue")
    last_reports = [formatting.format_iso(now - timedelta(hours=hours)) for hours in (5, 8)]
    assert re.findall(r'last report <time datetime="([^"]+)"', queue) == last_reports


@SQLITE_ONLY
def test_parked_job_can_be_resumed_or_stopped(visitor: httpx.Client, tenant: Tenant, now: datetime) -> None:
    """A parked job is in the queue with Resume and Stop; resuming removes it and the run goes on."""
    members = [{"detector": "k_decline", "params": {"k": 2}}]
    tenant.add_policy({"name": "aside", "action": "park", "members": members})
    tenant.add_endpoint(["run.park_requested"])
    run = tenant.open_run("dip", mode="enforce", policy="aside")
    tenant.submit(run, CheckpointSaved(2, "file:///2"))
    golds = enumerate((0.1, 0.5, 0.9, 0.8, 0.7))
    tenant.post_observations(run, [PostedObservation("reward/gold", step, gold) for step, gold in golds])
    decision = tenant.load_decision(run)
    tenant.record_report(decision, DecisionState.PARKED, now, reason="requeued into partition low")
    queue = read_section(visitor, "queue")
    assert "requeued into partition low" in queue
    assert re.findall(r'<summary class="[a-z]+">([^<]+)</summary>', queue) == ["Resume", "Stop"]
    page = unescape(visitor.get(f"/runs/{run.id}").raise_for_status().text)
    assert "Parked at step 4: the job is set aside and can return." in page
    assert ">Resume</summary>" in page
    form = {"reason": "a new curriculum", "next": "/", "csrf": read_csrf_token(visitor)}
    assert visitor.post(f"/decisions/{decision.id}/undo", data=form).status_code == 303
    assert "dip" not in read_section(visitor, "queue")
    assert "returned" in visitor.get("/runs?status=running").text


@pytest.mark.slow
@SQLITE_ONLY
def test_only_completed_runs_can_be_labeled(visitor: httpx.Client, tenant: Tenant) -> None:
    """Of a run that went on to its end, the overview asks for a label; not of one that runs or was stopped."""
    running = tenant.open_run("running")
    tenant.post_evals(running, HACKING)
    ended = tenant.open_run("ended")
    tenant.post_evals(ended, HACKING)
    tenant.finish_run(ended)
    _, decision = tenant.open_stopped_run("stopped", HACKING[:29])
    tenant.confirm_stop(decision)
    recent = read_section(visitor, "recent")
    assert re.findall(r"<bdi>(running|ended|stopped)</bdi>", recent) == ["stopped", "ended", "running"]
    assert re.findall(r'aria-label="Was the stop of (\w+) right\?"', recent) == ["ended"]
    assert "no outcome yet" in recent


def test_tile_counts_running_runs_and_the_gpus_of_their_jobs(visitor: httpx.Client, tenant: Tenant) -> None:
    """The tile leads to the fleet; runs of one job share its GPUs, and a run that may have turned is counted."""
    for name, labels in (("a", {"gpus": "8", "slurm_job_id": "7"}), ("b", {"gpus": "8", "slurm_job_id": "7"})):
        tenant.open_run(name, labels=labels)
    tenant.post_evals(tenant.open_run("turned", labels={"gpus": "16"}), HACKING)
    tenant.open_run("unlabeled")
    tile = read_section(visitor, "running")
    assert 'href="/runs/fleet"' in tile
    assert "4 running on 24 GPUs" in tile
    assert "1 may have turned" in tile


@SQLITE_ONLY
def test_only_enforced_policies_are_listed(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """A policy in shadow mode is not listed, too few cases give no estimate, and the period selects the cases."""
    run = tenant.open_run("ppo")
    insert_cases(database, run, 60, now, gpus=8.0, gpu_hours=80.0)
    assert "No policy stops runs" in read_section(visitor, "policies")
    stopped = {"treatment": "stopped", "gpus": 8.0, "gpu_hours": 80.0}
    insert_cases(database, run, 3, now - timedelta(days=60), gpu_hours_saved=20.0, **stopped)
    measured = read_section(visitor, "policies")
    assert "level" in measured
    assert "100.0 %" in measured
    assert "0 cases: too few for a figure" in measured, "no healthy run has ended"
    assert "No policy stops runs" in read_section(visitor, "policies", "/?days=30")
    assert visitor.get("/?days=31").status_code == 422


@SQLITE_ONLY
def test_only_the_version_with_the_stage_is_listed(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Of a policy with a rollout stage, the other versions are in shadow: their cases are no stops carried out."""
    insert_cases(database, tenant.open_run("before"), 9, now)
    with database.transaction() as tx:
        policies.add_policy(tx, tenant.project, "level", policy_to_document(POLICIES["paper"]), now)
        stage = RolloutStage(tenant.id, "level", Stage.CANARY, 0.9, 0.2, now, StageNumbers(), 2)
        rollout_stages.save_stage(tx, stage)
    insert_cases(database, tenant.open_run("after", policy="level@2"), 9, now)
    assert re.findall(r">v(\d)<", read_section(visitor, "policies")) == ["2"]


@SQLITE_ONLY
def test_no_proposal_is_hidden_by_newer_ones(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Of many open proposals the overview shows the newest and says that there are more; a run's page shows its own."""
    run = tenant.open_run("proposed")
    with database.transaction() as tx:
        for subject in (str(run.id), *map(str, range(20))):
            proposal = Proposal(
                new_id(),
                tenant.id,
                ProposalKind.STOP_RUN,
                subject,
                f"Stop run {subject} now",
                "",
                "",
                "key ada",
                (),
                ProposalState.OPEN,
                now,
            )
            assert proposals.add_proposal(tx, proposal)
    queue = read_section(visitor, "queue")
    assert 'Needs you <small class="muted">20+<' in queue
    assert "More proposals are older" in queue
    assert f"Stop run {run.id} now" not in queue
    assert f"Stop run {run.id} now" in read_section(visitor, "controls", f"/runs/{run.id}")


RISING_VALUES = [0.01 * step + 0.002 * (step * 7 % 5) for step in range(40)]
TURNING_VALUES = [
    *RISING_VALUES[:25],
    *(RISING_VALUES[25] - 0.012 * step + 0.002 * (step * 7 % 5) for step in range(30)),
]


def add_running_run(
    tenant: Tenant,
    name: str,
    values: Sequence[float],
    policy: str = "default",
    **options: Any,
) -> Run:
    """Open a run, post these evals and a checkpoint at the best of them, and leave it running."""
    run = tenant.open_run(name, policy=policy, total_steps=100, **{"metrics": None} | options)
    if values:
        best = max(range(len(values)), key=lambda step: abs(values[step]))
        points = tuple(PostedObservation("eval", step, value) for step, value in enumerate(values))
        tenant.submit(run, CheckpointSaved(best, "file:///best"))
        tenant.post_observations(run, points)
    return tenant.load_run(run)


def read_rows(visitor: httpx.Client, **query: int) -> dict[str, str]:
    """The rows of the page in order, by the names of their runs."""
    html = visitor.get("/runs/fleet", params=query).raise_for_status().text
    items = html.split('<ol class="card fleet">')[1].split("</ol>")[0].split("<li>")[1:]
    return {unescape(item.split("<bdi>")[1].split("</bdi>")[0]): item for item in items}


def test_runs_are_ordered_by_probability_of_a_turn(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Running runs are ordered by stored probability, or by verdict where a policy gives none; the direction does
    not matter."""
    minimized = {"eval": {"role": "eval", "direction": "minimize"}}
    add_running_run(tenant, "without-evals", [], metrics=minimized)
    rising = add_running_run(tenant, "rising", [-value for value in RISING_VALUES], metrics=minimized)
    ended = add_running_run(tenant, "ended", TURNING_VALUES[:10])
    tenant.finish_run(ended)
    add_running_run(add_tenant(database, now, "others"), "of others", RISING_VALUES[:9])
    turned = add_running_run(tenant, "turned", [-value for value in TURNING_VALUES], metrics=minimized)
    alarmed = add_running_run(tenant, "alarmed", TURNING_VALUES, policy="paper")
    assert (alarmed.verdict.verdict, turned.verdict.verdict) == ("stop", "stop")
    rows = read_rows(visitor)
    assert list(rows)[:3] == ["alarmed", "turned", "rising"]
    assert set(rows) == {"alarmed", "turned", "rising", "without-evals"}
    assert "no probability" in rows["alarmed"]
    assert f'href="/runs/{turned.id}"' in rows["turned"]
    probability = max(item.value for item in turned.verdict.evidence if item.kind == "posterior")
    assert probability > 0.5
    assert f"{probability * 100:.1f} %" in rows["turned"]
    assert "<polyline" in rows["turned"]
    assert "no eval yet" in rows["without-evals"]
    assert rising.status == "running"


@SQLITE_ONLY
def test_empty_fleet_is_announced(visitor: httpx.Client) -> None:
    """Without a running run the page says so."""
    assert "No run is running" in visitor.get("/runs/fleet").text
