"""What the page of a run says beside its charts: what if, what was saved, how long, and whether it is silent."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime, timedelta
from html import unescape

import httpx
import pytest
from evalstop_detectors import POLICIES, advance, policy_to_document, start
from evalstop_service.decisions import stale_runs
from evalstop_service.ingest import Observations
from evalstop_service.rules.decision_lifecycle import Mode
from evalstop_service.runs.watched_metrics import WatchedMetrics
from evalstop_service.store import observations, policies, projects
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from evalstop_service.web.dashboard import metric_charts

from tests.service.project_fixture import submit_message
from tests.service.web.dashboard.recorded_runs import Tenant, confirm, open_run, recorded, report
from tests.service.web.dashboard.serving import EMBEDDED, token_of
from tests.service.web.dashboard.test_pages import seen

HACKING = recorded("np-0044")


def stop_step(database: Database, run: Run, name: str) -> int | None:
    """Where a shipped policy stops a run, by the engine itself."""
    policy = POLICIES[name]
    watched = WatchedMetrics(run, policy)
    with database.reading() as tx:
        series = observations.load_series(tx, run.id, watched.metrics)
    _, verdicts = advance(policy, start(policy), watched.observations(series))
    return next((verdict.step for verdict in verdicts if verdict.stops), None)


@EMBEDDED
def test_what_another_policy_would_have_done(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Each shipped policy is replayed on the run by the engine that judged it, and one sentence says what it does."""
    run = open_run(database, tenant, now, "ppo", mode="enforce", total_steps=600)
    decision = report(database, tenant, run.id, HACKING, now).decision
    assert decision is not None
    page = seen(visitor, f"/runs/{run.id}")
    stops = set()
    for name in POLICIES:
        assert f'<option value="{name}@1">' in page
        said = visitor.get(f"/runs/{run.id}/what-if.json", params={"policy": f"{name}@1"}).json()
        assert said["step"] == stop_step(database, run, name)
        stops.add(said["step"])
        assert said["sentence"].startswith(
            f"{name} would have {'parked' if name == 'reversible' else 'stopped'} this run"
        )
    assert len(stops) > 2
    assert said["step"] is not None
    assert f"at step {said['step']}, {abs(decision.step - said['step'])} steps " in said["sentence"]
    assert re.search(r"; the best checkpoint would be that of step \d+\.", said["sentence"])


@EMBEDDED
def test_what_another_threshold_would_have_done(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """The higher the threshold, the later the stop; a policy that is not stored so is replayed, and stays as it is."""
    run = open_run(database, tenant, now, "ppo", total_steps=600)
    report(database, tenant, run.id, HACKING, now)

    def ask(stop_at: float) -> dict[str, object]:
        params: dict[str, str | float] = {"policy": "early@1", "stop_at": stop_at}
        answer: dict[str, object] = visitor.get(f"/runs/{run.id}/what-if.json", params=params).json()
        return answer

    answers = [ask(stop_at) for stop_at in (0.5, 0.9, 0.99)]
    steps = [answer["step"] for answer in answers]
    assert steps == sorted(set(map(int, map(str, steps))))
    assert [answer["threshold"]["stop_at"] for answer in answers] == [0.5, 0.9, 0.99]  # type: ignore[index]
    assert "early, with posterior at 0.9, would have stopped" in str(answers[1]["sentence"])
    with database.reading() as tx:
        stored = policies.find_policy(tx, tenant.project.id, "early", None)
    assert stored is None or stored.document == policy_to_document(POLICIES["early"])
    assert "is from 0 to 1" in str(ask(1.7)["sentence"])
    counted = visitor.get(f"/runs/{run.id}/what-if.json", params={"policy": "paper", "stop_at": "1000"}).json()
    assert counted["step"] is None
    assert "would not have stopped this run up to step 600" in counted["sentence"]


@EMBEDDED
@pytest.mark.parametrize(
    "query", ["policy=oracle", "policy=early@9", "policy=early&stop_at=0", "policy=early&stop_at=nan"]
)
def test_what_cannot_be_tried(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime, query: str
) -> None:
    """A policy that there is not, and a threshold that no policy may have, are refused."""
    run = open_run(database, tenant, now, "ppo")
    assert visitor.get(f"/runs/{run.id}/what-if.json?{query}").status_code in (404, 422)


@EMBEDDED
def test_what_a_stop_saved_and_how_long_it_took(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Once the job is gone the chart has the steps that were not run, and a decision's lanes how long each took."""
    run = open_run(database, tenant, now, "ppo", mode=Mode.ENFORCE, total_steps=600)
    receipt = report(database, tenant, run.id, HACKING[:29], now)
    assert visitor.get(f"/runs/{run.id}/series.json").json()["planned_end"] is None
    assert receipt.decision is not None
    confirm(database, tenant, receipt.decision.id, now + timedelta(seconds=4.2))
    drawn = visitor.get(f"/runs/{run.id}/series.json").json()
    assert (drawn["last_step"], drawn["planned_end"]) == (280, 600)
    decision = seen(visitor, f"/runs/{run.id}").split('data-part="decisions"')[1].split("</article>")[0]
    assert re.findall(r'<span class="figure">(.*?)</span>', decision) == ["verdict", "stop requested", "stop confirmed"]
    assert re.findall(r'<span class="lane-length">(.*?)</span>', decision) == ["", "4.2 s", ""]
    assert "4.2 s from “verdict” to “stop confirmed”." in decision


@EMBEDDED
def test_a_stale_run_says_so_first(visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime) -> None:
    """Before its name, with how long it has been silent and what to do; a run that is well says nothing there."""
    silent = open_run(database, tenant, now - timedelta(minutes=10), "silent")
    well = open_run(database, tenant, now, "well")
    stale_runs.check_due_runs(database, now)
    page = seen(visitor, f"/runs/{silent.id}")
    assert page.index("Stale: no report for 10 min") < page.index("<h1")
    assert "the run is taken for lost after 1 h of silence" in page
    assert "Stale:" not in seen(visitor, f"/runs/{well.id}")


@EMBEDDED
def test_what_ends_a_job_says_how_it_is_taken_back(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Release and Stop now, once; and with a second person that nothing has happened yet."""
    runs = [open_run(database, tenant, now, name, mode=Mode.ENFORCE) for name in ("held", "first", "second")]
    points = [PostedObservation("reward/gold", item.step, item.gold) for item in HACKING]  # no checkpoint
    decision = submit_message(database, tenant.project.id, runs[0].id, Observations(tuple(points)), now).decision
    assert decision is not None
    form = {"reason": "seen by eye", "csrf": token_of(visitor)}

    def said(path: str) -> str:
        page = unescape(visitor.post(path, data=form, follow_redirects=True).text)
        return page.split('id="toast"')[1].split("</p>")[0].split("<p>")[1]

    assert "in its veto window" in said(f"/decisions/{decision.id}/release")
    assert "Undo the stop takes that back" in said(f"/runs/{runs[1].id}/stop")
    assert "takes that back" not in seen(visitor, "/")
    with database.transaction() as tx:
        projects.update_project(tx, replace(tenant.project, second_person=True))
    assert "nothing happens until a second person" in said(f"/runs/{runs[2].id}/stop")


@EMBEDDED
def test_every_other_metric_has_a_small_chart(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Those that the main chart leaves out, hostile names too, 24 at first; one without finite values says so."""
    run = open_run(database, tenant, now, "ppo")
    report(database, tenant, run.id, HACKING[:3], now)
    names = [f"train/<b>{number:02}" for number in range(metric_charts.A_PAGE + 2)]
    points = [PostedObservation(name, step, step * 0.5) for name in names for step in range(4)]
    points.append(PostedObservation("a/nan", 0, float("nan")))
    submit_message(database, tenant.project.id, run.id, Observations(tuple(points)), now)
    first = seen(visitor, f"/runs/{run.id}/metric-charts")
    assert (first.count("<li "), first.count("<polyline points"), first.count("No finite value")) == (24, 23, 1)
    assert "train/&lt;b&gt;00" in first
    assert "reward/gold" not in first
    assert "3 more metrics" in first
    rest = seen(visitor, f"/runs/{run.id}/metric-charts?shown=48")
    assert (rest.count("<li "), "data-more" in rest) == (27, False)
