"""The run list and the run page, as HTML and JSON, on both databases."""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta
from html import escape, unescape
from urllib.parse import urlencode

import httpx
import pytest
from evalstop_service.decisions import commands, deadlines, notices, stale_runs, veto_windows
from evalstop_service.domain.decision_commands import Undone, Vetoed
from evalstop_service.domain.decision_events import Reported
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.domain.event_types import EventType
from evalstop_service.domain.metric_rules import RuleBreach
from evalstop_service.domain.run import MetricFields
from evalstop_service.evaluation import rollout_stage
from evalstop_service.evaluation.rollout_stage import StageTerms
from evalstop_service.ingest import EvalChanged, Resumed
from evalstop_service.store import projects
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.web.pages.run_list import PAGE
from evalstop_service.web.pages.run_page import MOST_POINTS
from evalstop_service.webhooks import events
from evalstop_service.webhooks.event_data import Alert

from tests.service.web.pages.recorded_runs import (
    Tenant,
    add_tenant,
    load_recorded_evals,
)
from tests.service.web.pages.serving import SQLITE_ONLY, get_html, read_csrf_token, sign_in_by_link

HACKING = load_recorded_evals("np-0044")


@SQLITE_ONLY
def test_empty_project_shows_how_to_connect(visitor: httpx.Client, address: str, tenant: Tenant) -> None:
    """An empty project shows a program that connects a trainer to this server, and it runs as shown."""
    html = get_html(visitor, "/runs")
    assert [words in html for words in ("No runs yet", "Connect a trainer", "load examples")] == [True] * 3
    (code,) = re.findall(r'data-copy="(import evalstop[^"]*)"', html)
    program = unescape(code)
    assert f'url="{address}"' in program
    exec(program.replace("esk_...", tenant.secret), {"train_and_evaluate": lambda step: (step / 10_000, 0.1)})
    assert "my-first-run" in get_html(visitor, "/runs?status=completed")


def test_stopped_run_shows_reason_and_checkpoint(visitor: httpx.Client, tenant: Tenant, now: datetime) -> None:
    """List and page show the stop, its reason, the receiver's report and the checkpoint to ship."""
    run, decision = tenant.open_stopped_run("ppo", HACKING[:29], labels={"job": "4711"}, total_steps=600)
    assert decision.best_checkpoint is not None
    tenant.confirm_stop(decision, now + timedelta(seconds=5))
    run_list = get_html(visitor, "/runs")
    for words in ("ppo", "stopped", "stop confirmed", "level", "enforce", "spark-line", "spark-best", "spark-stop"):
        assert words in run_list
    html = get_html(visitor, f"/runs/{run.id}")
    assert f"Stopped at step {decision.step}. The job is confirmed to be gone." in html
    assert escape(decision.best_checkpoint.uri) in html
    for words in ("evalstop-receiver process", "exit_status", "k_decline", "4711", "verdict: stop", "stop requested"):
        assert words in html


def test_eval_change_is_shown(visitor: httpx.Client, tenant: Tenant) -> None:
    """Page and chart show the step and reason of a changed eval; an unknown length of the run is shown, too."""
    run = tenant.open_run("ppo")
    tenant.post_evals(run, HACKING[:9])
    tenant.submit(run, EvalChanged(50, "a <stricter> grader", None, "key trainer"))
    html = get_html(visitor, f"/runs/{run.id}")
    for words in ("eval changed at step 50", "a &lt;stricter&gt; grader", "length unknown: decisions come later"):
        assert words in html
    chart = visitor.get(f"/runs/{run.id}/series.json").json()
    assert chart["eval_changes"] == [{"step": 50, "reason": "a <stricter> grader"}]


def test_several_evals_show_their_mean(visitor: httpx.Client, tenant: Tenant) -> None:
    """Of several evals the chart shows the mean, and each has a chart of its own."""
    metrics: dict[str, MetricFields] = {
        "math": {"role": "eval", "direction": "maximize", "critical": True},
        "<code>": {"role": "eval", "direction": "maximize", "weight": 2.0},
    }
    run = tenant.open_run(metrics=metrics)
    rising = [PostedObservation(metric, step, float(step)) for metric in metrics for step in range(6)]
    falling = [PostedObservation("math", step, 10.0 - step) for step in range(6, 12)]
    tenant.post_observations(run, [*rising, *falling])
    html = get_html(visitor, f"/runs/{run.id}")
    charts = get_html(visitor, f"/runs/{run.id}/metric-charts")
    assert all(name in charts for name in ("math", "&lt;code&gt;"))
    assert "the weighted mean of the evals" in html
    (series,) = visitor.get(f"/runs/{run.id}/series.json").json()["series"]
    assert (series["metric"], series["role"], len(series["steps"])) == ("evalstop/score", "eval", 11)


@SQLITE_ONLY
def test_alerts_met_rules_and_required_evals_are_shown(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """The page lists what a trainer and the rules of the project told people, and which evals have to turn together."""
    metrics: dict[str, MetricFields] = {
        metric: {"role": "eval", "direction": "maximize", "required": True} for metric in ("math", "code")
    }
    run = tenant.open_run(metrics=metrics)
    tenant.post_observations(
        run, [PostedObservation(metric, step, step / 2) for metric in metrics for step in range(6)]
    )
    breach = RuleBreach("kl > 20", "kl", 5, 23.1, "kl is <23.1> at step 5")
    with database.transaction() as tx:
        project = projects.get_project(tx, run.project_id)
        notices.raise_alert(tx, project.id, run.id, Alert(run.id, "slow <grader>", "9 s"), now)
        events.announce_run_event(tx, EventType.RULE_MET, project, run, now, rule=breach)
    html = get_html(visitor, f"/runs/{run.id}")
    listed = html.split('data-part="notices"')[1].split("</ol>")[0]
    for words in ("slow &lt;grader&gt;", "9 s", "kl &gt; 20", "kl is &lt;23.1&gt; at step 5", "rule met"):
        assert words in listed
    assert html.split('data-part="metrics"')[1].split("</table>")[0].count(", required") == 2


def test_stale_and_lost_runs_and_those_without_data_are_marked(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """List and pages mark stale and lost runs, and runs whose eval is not reported any more, with the metric."""
    stale = tenant.open_run("stale", now - timedelta(minutes=10))
    healthy = tenant.open_run("healthy")
    renamed = tenant.open_run("renamed", now - timedelta(minutes=6))
    tenant.post_observations(renamed, [PostedObservation("reward/gold", 1, 0.5)], now - timedelta(minutes=6))
    tenant.post_observations(renamed, [PostedObservation("reward/new", 900, 0.5)])
    stale_runs.check_due_runs(database, now)
    html = get_html(visitor, "/runs")
    assert (html.count("health-stale"), html.count("health-no-data")) == (1, 1)
    assert "health-stale" in get_html(visitor, f"/runs/{stale.id}")
    assert "reward/gold: it was last reported at step 1, and other" in get_html(visitor, f"/runs/{renamed.id}")
    assert "health-" not in get_html(visitor, f"/runs/{healthy.id}")
    stale_runs.check_due_runs(database, now + timedelta(hours=2))
    assert "status-lost" in get_html(visitor, "/runs?status=lost")


@pytest.mark.slow
@SQLITE_ONLY
def test_every_decision_state_has_its_text(visitor: httpx.Client, database: Database, now: datetime) -> None:
    """Each state from shadow to moot has its own text on the run's page."""
    tenant = add_tenant(database, now, "with-veto-window", veto_window_seconds=3600)
    sign_in_by_link(visitor, tenant.key)
    shadow = tenant.open_run("shadow", mode="shadow")
    tenant.post_evals(shadow, HACKING[:29])
    html = get_html(visitor, f"/runs/{shadow.id}")
    assert "Would have been stopped at step 270. The run is in shadow: recorded, not carried out." in html
    with database.transaction() as tx:
        rollout_stage.set_rollout_stage(tx, tenant.id, "early", 1, StageTerms(0.9, 0.2), now)
    staged, _ = tenant.open_stopped_run("staged", HACKING, policy="early")
    html = unescape(get_html(visitor, f"/runs/{staged.id}"))
    assert "The project's highest mode or the policy's rollout stage limits it: recorded, not carried out." in html
    run, decision = tenant.open_stopped_run("pending", HACKING[:29])
    assert "unless vetoed before" in get_html(visitor, f"/runs/{run.id}")
    tenant.apply_command(decision, Vetoed(now, "ada", "a known dip"))
    html = get_html(visitor, f"/runs/{run.id}")
    assert "The stop at step 270 was vetoed" in html
    assert "a known dip" in html
    tenant.change_settings(paused_at=now, paused_by="<ada>")
    on_hold, _ = tenant.open_stopped_run("held", HACKING[:29])
    html = get_html(visitor, f"/runs/{on_hold.id}")
    assert "Stop on hold: the project was paused by &lt;ada&gt;. Called at step 270" in html
    tenant.change_settings(paused_at=None, paused_by=None)
    late, decision = tenant.open_stopped_run("late", HACKING[:29], now - timedelta(hours=2))
    veto_windows.request_stops(database, now, lambda _: now)
    assert "No scheduler has confirmed yet" in get_html(visitor, f"/runs/{late.id}")
    report = Reported(now, DecisionState.ACKNOWLEDGED, "receiver", "found", {"guards": "worn", "job": "4711"}, 60.0)
    commands.record_report(database, tenant.id, decision.id, report)
    html = get_html(visitor, f"/runs/{late.id}")
    assert "A receiver is carrying out the stop" in html
    assert "worn" in html
    deadlines.process_overdue(database, now + timedelta(hours=1))
    assert "was repeated" in get_html(visitor, f"/runs/{late.id}")
    tenant.apply_command(decision, Undone(now, "ada", "broken eval"))
    assert "was undone" in get_html(visitor, f"/runs/{late.id}")
    ended, _ = tenant.open_stopped_run("ended", HACKING[:29])
    tenant.finish_run(ended)
    assert "was not carried out: the run ended by itself" in get_html(visitor, f"/runs/{ended.id}")


def test_search_filter_and_paging(visitor: httpx.Client, tenant: Tenant) -> None:
    """Runs are found by a part of their name and by status; a full page links to the next."""
    for index in range(PAGE + 3):
        tenant.open_run(f"run-{index:03d}")
    done = tenant.open_run("100% done_")
    tenant.finish_run(done)
    html = get_html(visitor, "/runs")
    assert html.count('class="row-link"') == PAGE
    older = html.split('rel="next" href="')[1].split('"')[0].replace("&amp;", "&")
    second_page = get_html(visitor, older)
    assert second_page.count('class="row-link"') == 4
    assert 'rel="next"' not in second_page
    for parameters, count in (
        ({"name": "RUN-00"}, 10),
        ({"name": "100%"}, 1),
        ({"name": "e_"}, 1),
        ({"name": "%"}, 1),
        ({"name": "\x00run-007\n"}, 1),
        ({"status": "completed"}, 1),
        ({"status": "completed", "name": "run"}, 0),
        ({"name": "nowhere"}, 0),
    ):
        html = visitor.get("/runs", params=parameters).text
        assert html.count('class="row-link"') == count, parameters
        assert ("No run matches" in html) == (count == 0)


@SQLITE_ONLY
def test_note_at_a_step_is_added_drawn_and_removed(visitor: httpx.Client, tenant: Tenant) -> None:
    """A note from the page's form is listed with its author, drawn at its step, and goes when it is removed."""
    run = tenant.open_run("noted")
    form = {"csrf": read_csrf_token(visitor), "step": "12", "text": "the <grader> was restarted"}
    assert visitor.post(f"/runs/{run.id}/notes", data=form).status_code == 303
    assert visitor.get(f"/runs/{run.id}/series.json").json()["notes"] == [{"step": 12, "text": form["text"]}]
    page = visitor.get(f"/runs/{run.id}").text
    assert "the &lt;grader&gt; was restarted" in page
    assert visitor.post(f"/runs/{run.id}/notes", data=form | {"step": ""}).status_code == 422
    (path,) = re.findall(r'action="(/runs/[^"]+/notes/[^"]+/remove)"', page)
    assert visitor.post(path, data=form).status_code == 303
    assert visitor.get(f"/runs/{run.id}/series.json").json()["notes"] == []


def test_run_description_is_saved_shown_and_searched(visitor: httpx.Client, tenant: Tenant, now: datetime) -> None:
    """The form on a run's page sets owner, group, tags and notes, and the list filters by them."""
    tenant.open_run("other")
    form = {"owner": " dana@example.org ", "group": "seeds & co", "tags": "a, c\r\n b \r\n", "notes": "one\r\n<two>"}
    for name in ("seed-1", "seed-2"):
        run = tenant.open_run(name)
        answer = visitor.post(f"/runs/{run.id}/description", data=form | {"csrf": read_csrf_token(visitor)})
        assert answer.headers["location"] == f"/runs/{run.id}"
    page = get_html(visitor, f"/runs/{run.id}")
    assert [words in page for words in ("one\n&lt;two&gt;", "/groups/seeds%20%26%20co", ">a, c\nb</textarea>")] == [
        True
    ] * 3
    for query, count in (
        ({"group": "seeds & co"}, 2),
        ({"owner": "dana@example.org", "tag": ["a, c", "b"], "name": "1"}, 1),
        ({"label": "gpus=8"}, 0),
        ({"since": f"{now + timedelta(days=1):%Y-%m-%d}"}, 0),
        ({"since": f"{now - timedelta(days=1):%Y-%m-%d}", "owner": "", "tag": "", "label": ""}, 3),
    ):
        html = visitor.get("/runs", params=query).text
        assert html.count('class="row-link"') == count, query


@SQLITE_ONLY
def test_both_forms_of_the_run_list_keep_every_filter(visitor: httpx.Client) -> None:
    """Searching, or changing one filter, keeps the others, also those without a field of their own."""
    day = "2026-03-01"
    filters = [("name", "seed"), ("status", "running"), ("owner", "dana"), ("tag", "a"), ("tag", "b")]
    filters += [("label", "x=1"), ("label", "y=2"), ("since", day), ("until", day), ("column", "owner")]
    html = get_html(visitor, f"/runs?{urlencode(filters)}")
    for kind in ("search", "toolbar"):
        (form,) = re.findall(rf'<form class="{kind}".*?</form>', html, re.DOTALL)
        form = re.sub(r'<input type="checkbox" name="column" value="\w+" data-submit>', "", form)
        fields = re.findall(r'<input [^>]*?name="(\w+)"[^>]*? value="([^"]+)"', form)
        assert sorted((name, value[: len(day)]) for name, value in fields) == sorted(filters)


@SQLITE_ONLY
@pytest.mark.parametrize(
    "path",
    [
        "/runs/nonsense",
        "/runs/01a1fe69-180e-7447-8e00-3214daaa5f84",
        "/assets/x/secret",
    ],
)
def test_not_found_is_a_page(visitor: httpx.Client, path: str) -> None:
    """Unknown paths give an HTML page with 404; the API keeps its problem documents."""
    answer = visitor.get(path)
    assert answer.status_code == 404
    assert answer.headers["content-type"].startswith("text/html") or path.startswith("/assets")
    for path in ("/api/v1/runs", "/api/v1/nothing"):
        assert visitor.get(path).headers["content-type"] == "application/problem+json"


@SQLITE_ONLY
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/runs?label=team", "Label: write NAME=VALUE"),
        ("/runs?since=soon", "Since: "),
        ("/runs?owner=" + "x" * 257, "Owner: String should have at most 256 characters."),
        ("/runs?cursor=x", "Cursor: "),
        ("/runs?status=odd", "Status: "),
        ("/runs?order=updated&skip=-1", "Skip: "),
        ("/cases?since=0001-01-01T00:00:00%2B14:00", "Since: "),
    ],
)
def test_invalid_filter_is_named(visitor: httpx.Client, path: str, words: str) -> None:
    """An invalid filter gives 422, as in the API; the page names it and does not call the list missing."""
    answer = visitor.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (422, "text/html; charset=utf-8")
    assert words in answer.text
    assert "another project" not in answer.text


@SQLITE_ONLY
def test_unknown_address_is_a_page_for_browsers_only(visitor: httpx.Client) -> None:
    """A browser gets a page, also without a session; programs get a problem document, and known paths still answer."""
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8", "Cookie": ""}
    for path in ("/nowhere", "/run/1", "/api", "/decisions/1/veto"):
        answer = visitor.get(path, headers=browser)
        assert answer.status_code == 404
        assert "no page at this address" in answer.text
        assert "content-security-policy" in answer.headers
    problem = "application/problem+json"
    assert visitor.get("/nowhere").headers["content-type"] == problem
    assert visitor.get("/api/v1/nowhere", headers=browser).headers["content-type"] == problem
    assert visitor.post("/nowhere", headers=browser).headers["content-type"] == problem
    assert "error_code" in visitor.get("/mlflow/nowhere", headers=browser).json()
    for path in ("/docs", "/metrics", "/livez", "/openapi.json", "/login"):
        assert visitor.get(path, headers=browser).status_code == 200, path


@SQLITE_ONLY
@pytest.mark.parametrize(
    "values",
    [
        [],
        [0.5],
        [math.nan],
        [math.nan, math.inf, -math.inf],
        [1.0, math.nan, 2.0],
        [1e308, -1e308, 0.0],
        [5e-324, 0.0],
    ],
)
def test_unusual_series_keep_the_pages_working(visitor: httpx.Client, tenant: Tenant, values: list[float]) -> None:
    """No eval, one, only NaN, the largest doubles: each page answers, and values that are not finite are null."""
    run = tenant.open_run("unusual")
    for step, value in enumerate(values):
        tenant.post_observations(run, [PostedObservation("reward/gold", step, value, 0.1)])
    get_html(visitor, "/runs")
    get_html(visitor, f"/runs/{run.id}")
    evals = visitor.get(f"/runs/{run.id}/series.json").json()["series"][0]
    assert evals["values"] == [value if math.isfinite(value) else None for value in values]
    assert evals["stderrs"] == [0.1] * len(values)


@SQLITE_ONLY
def test_run_without_roles(visitor: httpx.Client, tenant: Tenant) -> None:
    """A run without watched metrics is shown with its metrics and an empty chart."""
    run = tenant.open_run(metrics={})
    tenant.post_observations(run, [PostedObservation("tokens", 3, 1e6)])
    assert "not watched" in get_html(visitor, f"/runs/{run.id}")
    assert visitor.get(f"/runs/{run.id}/series.json").json()["series"] == []


@SQLITE_ONLY
def test_long_series_is_downsampled_and_keeps_its_spike(visitor: httpx.Client, tenant: Tenant) -> None:
    """A chart gets at most MOST_POINTS points of a metric: first, last and, to the width of a line, the spike."""
    run = tenant.open_run("long")
    points = [PostedObservation("reward/proxy", step, 99.0 if step == 7777 else 1.0) for step in range(9000)]
    tenant.post_observations(run, points)
    series = visitor.get(f"/runs/{run.id}/series.json").json()["series"]
    proxy = next(item for item in series if item["role"] == "proxy")
    assert len(proxy["steps"]) <= MOST_POINTS
    assert abs(proxy["steps"][proxy["values"].index(99.0)] - 7777) < 3 * 9000 / MOST_POINTS
    assert (proxy["steps"][0], proxy["steps"][-1]) == (0, 8999)


@SQLITE_ONLY
def test_superseded_observations_are_left_out(visitor: httpx.Client, tenant: Tenant) -> None:
    """After a resume the chart shows what counts; the decision of the earlier attempt stays on the page."""
    run, _ = tenant.open_stopped_run("resumed", HACKING[:29])
    tenant.submit(run, Resumed(100))
    document = visitor.get(f"/runs/{run.id}/series.json").json()
    assert document["series"][0]["steps"][-1] == 100
    assert document["decision"] is None
    html = get_html(visitor, f"/runs/{run.id}")
    assert "attempt 2 from step 100" in html
    assert "of attempt 1" in html
    assert "The eval shows no turn." in html
