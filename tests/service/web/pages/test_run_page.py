"""The run page beside its charts: what-if replays, stops, extra evals, exports, and charts of other metrics."""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import replace
from datetime import datetime, timedelta
from urllib.parse import quote

import httpx
import pytest
from evalstop_detectors import POLICIES, advance, start
from evalstop_service.decisions import stale_runs
from evalstop_service.domain.decision_commands import Undone, Vetoed
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.domain.statuses import RunStatus
from evalstop_service.ingest import CheckpointSaved, EvalAnswered, Resumed
from evalstop_service.runs.watched_metrics import PAIRED_METRIC, WatchedMetrics
from evalstop_service.store import observations, runs
from evalstop_service.store.database import Database
from evalstop_service.store.decisions import Decision, DecisionChange
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from evalstop_service.web.pages import run_page
from evalstop_service.web.pages.run_page import EXPORT_BATCH, list_states
from msgspec import structs

from tests.service.web.pages.recorded_runs import (
    Tenant,
    add_tenant,
    load_recorded_evals,
)
from tests.service.web.pages.serving import SQLITE_ONLY, get_html, sign_in_by_link

HACKING = load_recorded_evals("np-0044")


def find_stop_step(database: Database, run: Run, name: str) -> int | None:
    """The step at which a shipped policy stops a run, computed by the detectors."""
    policy = POLICIES[name]
    watched = WatchedMetrics(run, policy)
    with database.reading() as tx:
        series = observations.load_series(tx, run.id, watched.metrics)
    _, verdicts = advance(policy, start(policy), watched.observations(series))
    return next((verdict.step for verdict in verdicts if verdict.stops), None)


@pytest.mark.slow
@SQLITE_ONLY
def test_what_if_replays_each_shipped_policy(visitor: httpx.Client, database: Database, tenant: Tenant) -> None:
    """Each shipped policy is replayed on the run, and one sentence says where it would have stopped."""
    run, _ = tenant.open_stopped_run("ppo", HACKING, total_steps=600)
    page = get_html(visitor, f"/runs/{run.id}")
    stops = set()
    for name in POLICIES:
        assert f'<input type="checkbox" value="{name}@1">' in page
        answer = visitor.get(f"/runs/{run.id}/what-if.json", params={"policy": f"{name}@1"}).json()
        assert answer["step"] == find_stop_step(database, run, name)
        stops.add(answer["step"])
        assert answer["sentence"].startswith(
            f"{name} would have {'parked' if name == 'reversible' else 'stopped'} this run"
        )
    assert len(stops) > 2
    assert answer["step"] is not None
    assert answer["sentence"].endswith(f"at step {answer['step']}.")


@SQLITE_ONLY
@pytest.mark.parametrize(
    ("query", "status"),
    [("policy=oracle", 404), ("policy=early@9", 404), ("", 422)],
)
def test_invalid_what_if_is_refused(visitor: httpx.Client, tenant: Tenant, query: str, status: int) -> None:
    """An unknown policy gives 404, and an invalid parameter 422, as in the API."""
    run = tenant.open_run("ppo")
    assert visitor.get(f"/runs/{run.id}/what-if.json?{query}").status_code == status


@SQLITE_ONLY
def test_confirmed_stop_shows_steps_saved_and_durations(visitor: httpx.Client, tenant: Tenant, now: datetime) -> None:
    """Once the job is gone, the chart shows the steps not run, and the decision how long each state took."""
    run, stop = tenant.open_stopped_run("ppo", HACKING[:29], total_steps=600)
    series = visitor.get(f"/runs/{run.id}/series.json").json()
    assert (series["planned_end"], series["ended"]) == (600, False)
    tenant.confirm_stop(stop, now + timedelta(seconds=4.2))
    chart = visitor.get(f"/runs/{run.id}/series.json").json()
    assert (chart["last_step"], chart["planned_end"]) == (280, 600)
    decision = get_html(visitor, f"/runs/{run.id}").split('data-part="decisions"')[1].split("</article>")[0]
    assert re.findall(r'<span class="figure">(.*?)</span>', decision) == ["stop requested", "stop confirmed"]
    assert re.findall(r'<span class="lasted">(.*?)</span>', decision) == ["4.2s"]
    assert "4.2s from “stop requested” to “stop confirmed”." in decision


@SQLITE_ONLY
@pytest.mark.parametrize(
    ("command", "window", "change"), [(Undone, 0, "undone"), (Vetoed, 3600, "vetoed")], ids=["undone", "vetoed"]
)
def test_run_that_completed_after_its_stop_was_taken_back_is_not_said_to_continue(
    visitor: httpx.Client, database: Database, now: datetime, command: type[Undone | Vetoed], window: float, change: str
) -> None:
    """The summary says that the run may continue while it runs, and that it completed once it has."""
    tenant = add_tenant(database, now, change, veto_window_seconds=window)
    sign_in_by_link(visitor, tenant.key)
    run, decision = tenant.open_stopped_run("ppo", HACKING[:29])
    tenant.apply_command(decision, command(now, "ada", "a known dip"))
    assert re.search(f"was {change}. The run (may )?continue", get_html(visitor, f"/runs/{run.id}"))
    tenant.finish_run(run, RunStatus.COMPLETED, obeyed=None, actor="trainer")
    assert f"was {change}. The run completed." in get_html(visitor, f"/runs/{run.id}")


@SQLITE_ONLY
def test_plan_that_the_run_completed_in_half_of_is_asked_about(visitor: httpx.Client, tenant: Tenant) -> None:
    """The page asks about such a plan, and says nothing of one that was reached."""
    for total_steps, is_asked in ((2000, True), (290, False)):
        run = tenant.open_run("planned", total_steps=total_steps)
        tenant.post_evals(run, HACKING[:29])
        tenant.finish_run(run, RunStatus.COMPLETED, obeyed=None, actor="trainer")
        assert (
            "an early end, or is the plan in another unit than the steps?" in get_html(visitor, f"/runs/{run.id}")
        ) == is_asked


@SQLITE_ONLY
def test_stale_run_shows_a_notice_above_its_name(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """The notice says how long the run has been silent and what follows; a run that is not stale has none."""
    stale = tenant.open_run("stale", now - timedelta(minutes=10))
    healthy = tenant.open_run("healthy")
    stale_runs.check_due_runs(database, now)
    page = get_html(visitor, f"/runs/{stale.id}")
    assert page.index("Stale: no report for 10m") < page.index("<h1")
    assert "the run counts as lost after 1h without a report" in page
    assert "Stale:" not in get_html(visitor, f"/runs/{healthy.id}")


@SQLITE_ONLY
def test_other_metrics_have_small_charts(visitor: httpx.Client, tenant: Tenant) -> None:
    """Metrics that the main chart leaves out get small charts, 48 at most; one without finite values says so."""
    run = tenant.open_run("ppo")
    tenant.post_evals(run, HACKING[:3])
    names = [f"train/<b>{number:02}" for number in range(run_page.MOST_CHARTS + 2)]
    points = [PostedObservation(name, step, step * 0.5) for name in names for step in range(4)]
    points.append(PostedObservation("a/nan", 0, float("nan")))
    tenant.post_observations(run, points)
    first = get_html(visitor, f"/runs/{run.id}/metric-charts")
    assert (first.count("<li "), first.count("<polyline points"), first.count("No finite value")) == (48, 47, 1)
    assert "train/&lt;b&gt;00" in first
    assert "reward/gold" not in first
    assert "3 more metrics" in first


def test_evidence_lists_every_detector_of_the_policy(visitor: httpx.Client, tenant: Tenant) -> None:
    """Observers are listed with their evidence and first call; deciding detectors without evidence only by name."""
    run = tenant.open_run("ppo", policy="default", total_steps=600)
    tenant.post_evals(run, HACKING[:29])
    bearer = {"authorization": f"Bearer {tenant.secret}"}
    called = visitor.get(f"/api/v1/runs/{run.id}/calls", headers=bearer).json()["items"]
    shown, _, silent = get_html(visitor, f"/runs/{run.id}").partition('aria-label="Evidence"')[2].partition("</table>")
    rows = dict(re.findall(r'<span class="figure">([^<]*)</span> (decides|observes)', shown))
    assert rows == {
        item["detector"]: "observes" if item["observes"] else "decides"
        for item in called
        if item["evidence"] or item["observes"]
    }
    assert "k_decline" in rows
    (step,) = (item["step"] for item in called if item["detector"] == "k_decline")
    assert f"step {step:,}" in shown
    assert all(item["detector"] in silent.partition("</p>")[0] for item in called if item["detector"] not in rows)


def test_page_and_api_say_that_a_run_is_not_judged(visitor: httpx.Client, database: Database, tenant: Tenant) -> None:
    """They show why the detectors failed, as text."""
    run = tenant.open_run("ppo")
    with database.transaction() as tx:
        runs.save_run(tx, structs.replace(run, detector_failure="a detector failed at step 3: ValueError('<b>')"))
    page = get_html(visitor, f"/runs/{run.id}")
    assert "not judged" in page
    assert "a detector failed at step 3: ValueError(&#39;&lt;b&gt;&#39;)" in page
    bearer = {"authorization": f"Bearer {tenant.secret}"}
    answer = visitor.get(f"/api/v1/runs/{run.id}", headers=bearer).json()
    assert answer["health"]["detector_failure"] == "a detector failed at step 3: ValueError('<b>')"


@pytest.fixture
def decision(tenant: Tenant) -> Decision:
    return tenant.open_stopped_run("run", load_recorded_evals("np-0044")[:29])[1]


@SQLITE_ONLY
def test_each_state_lasts_until_the_next(decision: Decision) -> None:
    """A state lasts until the next begins; a last one that waits for a person has no end, a veto window has."""
    at = decision.created_at
    seconds = {DecisionState.PENDING: 0, DecisionState.ON_HOLD: 30, DecisionState.REQUESTED: 90}
    changes = [
        DecisionChange(place, state, "dana", "why", {}, at + timedelta(seconds=later))
        for place, (state, later) in enumerate(seconds.items())
    ]
    assert [(state.name, state.seconds) for state in list_states(decision, changes)] == [
        *(("veto window", 30.0), ("stop on hold", 60.0), ("stop requested", None)),
    ]
    deadline = replace(decision, deadline_at=at + timedelta(hours=1))
    ends = [list_states(deadline, changes[: place + 1])[-1].until for place in range(3)]
    assert ends == [decision.due_at, None, deadline.deadline_at]


def test_page_shows_eval_request_and_answer(visitor: httpx.Client, tenant: Tenant) -> None:
    """The page shows the step, checkpoint and probability of a request, then the answer."""
    run = tenant.open_run(metrics=None, policy="early", total_steps=90, eval_share=0.0)
    assert "Requested evaluations" not in visitor.get(f"/runs/{run.id}").text
    tenant.submit(run, CheckpointSaved(30, "file:///30"))
    request = None
    for step in range(60):
        value = min(step, 30.0) - 0.3 * max(0, step - 30) + 4.0 * ((step * step * 7) % 11) / 11
        request = request or tenant.post_observations(run, [PostedObservation("eval", step, value)]).eval_request
    assert request is not None
    assert request.probability is not None
    page = visitor.get(f"/runs/{run.id}").text
    assert f"step {request.step} against the best, step 30" in page
    assert f"{100 * request.probability:.1f}" in page
    assert "No answer yet" in page
    point = PostedObservation(PAIRED_METRIC, request.step, -2.5, 0.25)
    tenant.submit(run, EvalAnswered(request.id, 1, point, 800, "<i>key</i>"))
    page = visitor.get(f"/runs/{run.id}").text
    assert "No answer yet" not in page
    assert "on 800 prompts" in page
    assert "answers to requested evaluations" in page
    assert "not watched" not in page
    assert "&lt;i&gt;key" in page


FORMULA_METRIC = "=SUM(A1)"


def add_run_with(tenant: Tenant, *points: PostedObservation) -> Run:
    """Open a run with these observations."""
    run = tenant.open_run("weird/../name \u202e")
    tenant.post_observations(run, points)
    return run


def read_rows(export: httpx.Response) -> list[dict[str, str]]:
    """The rows of an export, by column."""
    return list(csv.DictReader(io.StringIO(export.text)))


@pytest.mark.slow
def test_export_holds_every_observation(visitor: httpx.Client, tenant: Tenant) -> None:
    """The export holds every observation at full precision, superseded ones included, over several batches."""
    steps = EXPORT_BATCH + 7
    points = [PostedObservation("reward/gold", step, 0.1 + step / 3, 0.1) for step in range(steps)]
    points_not_finite = [
        PostedObservation(FORMULA_METRIC, 3, math.nan),
        PostedObservation(FORMULA_METRIC, 4, -math.inf),
    ]
    run = add_run_with(tenant, *points, *points_not_finite)
    tenant.submit(run, Resumed(steps - 3))
    answer = visitor.get(f"/runs/{run.id}/export.csv")
    disposition = answer.headers["content-disposition"]
    assert disposition == f"attachment; filename*=UTF-8''{quote(f'{run.name}.csv', safe='')}"
    rows = read_rows(answer)
    gold = [row for row in rows if row["metric"] == "reward/gold"]
    assert [float(row["value"]) for row in gold] == [point.value for point in points]
    assert [row["superseded_by"] for row in gold][-3:] == ["", "2", "2"]
    assert [row["value"] for row in rows if row["metric"] == f"'{FORMULA_METRIC}"] == ["NaN", "-Infinity"]
    assert len(rows) == len(points) + 2


def test_export_holds_metrics_that_were_superseded_as_a_whole(visitor: httpx.Client, tenant: Tenant) -> None:
    """A metric all of whose observations were superseded is exported, too."""
    run = add_run_with(tenant, PostedObservation("kept", 1, 0.5), PostedObservation("late", 9, 0.5))
    tenant.submit(run, Resumed(5))
    rows = read_rows(visitor.get(f"/runs/{run.id}/export.csv"))
    assert [(row["metric"], row["superseded_by"]) for row in rows] == [("kept", ""), ("late", "2")]


@SQLITE_ONLY
def test_run_without_observations_has_an_empty_export(visitor: httpx.Client, tenant: Tenant) -> None:
    """The export has its header alone."""
    run = tenant.open_run("empty")
    assert read_rows(visitor.get(f"/runs/{run.id}/export.csv")) == []
