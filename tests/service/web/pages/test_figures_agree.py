"""Figures that stand on several pages are the same there, in the API and in the shell."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any

import httpx
import pytest
from evalstop_client.cli import main
from evalstop_service.cli import demo_data
from evalstop_service.decisions import commands
from evalstop_service.domain.statuses import DecisionOutcome
from evalstop_service.store import keys, projects
from evalstop_service.store.cases import Outcome
from evalstop_service.store.database import Database
from evalstop_service.store.runs import Run
from evalstop_service.web.pages.formatting import format_percent, format_step
from evalstop_service.web.pages.responses import PERIODS, find_beginning

from tests.service.case_rows import insert_cases
from tests.service.web.pages.recorded_runs import LEVEL_POLICY, Tenant, load_recorded_evals
from tests.service.web.pages.serving import SQLITE_ONLY, get_html, sign_in_by_link

RUNS = 16


@pytest.fixture
def read_api(visitor: httpx.Client, database: Database, now: datetime) -> Any:
    """Answers of the API about a project with the example runs, which the visitor has signed in to."""
    demo_data.fill(database, "demo", now, RUNS)
    with database.transaction() as tx:
        project = projects.find_project_by_name(tx, "demo")
        assert project is not None
        key, secret = keys.create_key(tx, project_id=project.id, name="dana", scopes=keys.SCOPES, now=now)
    sign_in_by_link(visitor, key)

    def read(path: str) -> Any:
        return visitor.get(f"/api/v1{path}", headers={"Authorization": f"Bearer {secret}"}).raise_for_status().json()

    return read


def find_row(html: str, name: str) -> str:
    """The text of the table row about a policy."""
    (row,) = (row for row in re.findall(r"<tr>.*?</tr>", html, re.DOTALL) if re.search(rf">{name}</(a|bdi)>", row))
    return read_text(row)


def read_text(html: str) -> str:
    """The words of a part of a page."""
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


def describe_estimate(estimate: dict[str, Any]) -> str:
    """An estimate of the API, as pages show its interval and number of cases."""
    low, high = format_percent(estimate["low"]), format_percent(estimate["high"])
    return f"{low} to {high}, {estimate['decided']}"


@pytest.mark.slow
@SQLITE_ONLY
def test_figures_agree_between_pages(visitor: httpx.Client, read_api: Any) -> None:
    """Running runs, those that may have turned, precision, recall and false stops do not depend on the page."""
    overview = get_html(visitor, "/")
    running = read_api("/runs?status=running&limit=200")["items"]
    turned = [run for run in running if run["verdict"]["verdict"] != "continue"]
    assert len(running) > len(turned) > 0
    assert f"{len(running)} running" in read_text(overview)
    assert f"{len(turned)} may have turned" in read_text(overview)
    fleet, listed = get_html(visitor, "/runs/fleet"), get_html(visitor, "/runs?status=running")
    for html in (fleet, listed):
        assert html.count('class="row-link"') == len(running)
        assert len(re.findall(r'class="badge verdict-(?:suspect|stop)"', html)) == len(turned)

    side_by_side = get_html(visitor, "/precision").split('data-part="policies"')[1]
    policies = get_html(visitor, "/policies")
    groups = read_api("/precision?group_by=policy")["groups"]
    assert len(groups) > 1
    for group in groups:
        name, version = group["policy"]["name"], group["policy"]["version"]
        figures = [group[figure] for figure in ("precision", "recall", "false_stops_per_healthy_run")]
        alone = read_text(get_html(visitor, f"/precision?policy={name}%40{version}").split('data-part="figures"')[1])
        for estimate in figures:
            assert format_percent(estimate["value"]) in find_row(side_by_side, name)
            assert describe_estimate(estimate) in find_row(side_by_side, name)
            if estimate["value"] is not None:
                assert f"{format_percent(estimate['value'])} {describe_estimate(estimate)}" in alone
        if group["false_stops_per_healthy_run"]["value"] is not None:
            assert describe_estimate(group["false_stops_per_healthy_run"]) in find_row(policies, name)
        counted = sum(sum(group["counts"][row].values()) for row in ("observed", "stopped", "prevented"))
        listed_cases = read_api(f"/cases?policy={name}&version={version}&flagged=true&limit=200")["items"]
        assert len(listed_cases) == counted, format_step(counted)


@SQLITE_ONLY
def test_all_pages_sum_the_cases_of_the_period(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Overview, precision, policies and cases show the same figures for a period; any other period is refused."""
    run = tenant.open_run("ppo")
    stopped_case = {"treatment": "stopped", "gpus": 8.0, "gpu_hours": 80.0}
    insert_cases(database, run, 2, now - timedelta(days=60), gpu_hours_saved=7.0, **stopped_case)
    insert_cases(database, run, 3, now - timedelta(days=2), gpu_hours_saved=10.0, **stopped_case)
    insert_cases(database, run, 4, now - timedelta(days=2), treatment=None, run_outcome="healthy")
    for days, stops, hours in (("", 5, "44"), ("90", 5, "44"), ("30", 3, "30")):
        overview = get_html(visitor, f"/?days={days}")
        assert f'data-hours="saved">{hours}<' in overview
        assert f'<option value="{days}" selected>{PERIODS[days]}</option>' in overview
        (cases,) = re.findall(r'by <a href="([^"]*)">\d+ stops</a> that were', overview)
        assert get_html(visitor, unescape(cases)).count('class="row-link"') == stops
        assert f'data-hours="saved">{hours}</span> GPU-hours' in get_html(visitor, f"/precision?days={days}")
        assert f'data-hours="saved">{hours}</span> h<' in get_html(visitor, f"/policies?days={days}")
    for path in ("/", "/precision", "/policies"):
        assert visitor.get(f"{path}?days=31").status_code == 422


def test_period_starts_at_a_full_hour() -> None:
    """A page rendered again within the hour has the same links."""
    assert find_beginning("7", datetime(2026, 3, 9, 12, 34, 56, tzinfo=UTC)) == datetime(2026, 3, 2, 12, tzinfo=UTC)
    assert find_beginning("", datetime(2026, 3, 9, tzinfo=UTC)) is None


HACKING = load_recorded_evals("np-0044")
WORDS = ("saved", "would_have_saved")


def read_hours(html: str) -> dict[str, list[int]]:
    """The figures of each of the two words, in the order of the page."""
    return {
        word: [round(float(text)) for text in re.findall(rf'data-hours="{word}">([\d.]+)<', html)] for word in WORDS
    }


def read_rows(html: str, *names: str) -> dict[str, dict[str, list[int]]]:
    """The figures in the table row of each of these."""
    rows = {name: row for row in re.findall(r"<tr.*?</tr>", html, re.S) for name in names if f">{name}</" in row}
    return {name: read_hours(row) for name, row in rows.items()}


def expect_hours(saved: int | None, would_have_saved: int | None) -> dict[str, list[int]]:
    return {
        word: [] if hours is None else [hours] for word, hours in zip(WORDS, (saved, would_have_saved), strict=True)
    }


def open_decided_run(tenant: Tenant, policy: str, mode: str) -> Run:
    """A run on 8 GPUs that was opened three hours ago, and whose policy called for a stop an hour later."""
    labels, opened_at = {"gpus": "8"}, tenant.now - timedelta(hours=3)
    run = tenant.open_run(policy, opened_at, policy=policy, mode=mode, labels=labels, total_steps=4 * HACKING[-1].step)
    tenant.post_evals(run, HACKING, opened_at + timedelta(hours=1))
    decision = tenant.load_decision(run)
    if mode == "enforce":
        tenant.confirm_stop(decision)
    else:
        tenant.finish_run(run)
    label = Outcome(outcome=DecisionOutcome.RIGHT, turn_step=None, note="", actor="dana", at=tenant.now)
    commands.label_decision(tenant.database, tenant.id, decision.id, label)
    return run


@pytest.mark.slow
@SQLITE_ONLY
def test_hours_saved_are_the_same_everywhere(
    visitor: httpx.Client,
    tenant: Tenant,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What an enforced policy saved, and what one in shadow would have saved, stands alike wherever it is shown."""
    tenant.add_policy(LEVEL_POLICY | {"name": "candidate"})
    enforced = open_decided_run(tenant, "level", "enforce")
    shadow = open_decided_run(tenant, "candidate", "shadow")

    def read_api(path: str) -> Any:
        answer = visitor.get(f"/api/v1{path}", headers={"Authorization": f"Bearer {tenant.secret}"})
        return answer.raise_for_status().json()

    whole = read_api("/precision")["groups"][0]["gpu_hours"]
    saved, would_have_saved = (round(whole[word]) for word in WORDS)
    assert would_have_saved == 16, "two hours on 8 GPUs"
    assert saved > 16
    assert read_hours(get_html(visitor, "/").split('data-part="saved"')[1]) == expect_hours(saved, would_have_saved)

    of_policies = {"level": expect_hours(saved, 0), "candidate": expect_hours(0, would_have_saved)}
    groups = read_api("/precision?group_by=policy")["groups"]
    by_api = {
        group["policy"]["name"]: expect_hours(*(round(group["gpu_hours"][word]) for word in WORDS)) for group in groups
    }
    assert by_api == of_policies
    assert read_rows(get_html(visitor, "/policies"), *of_policies) == of_policies
    precision = get_html(visitor, "/precision")
    assert read_rows(precision.split('data-part="policies"')[1].split("</section>")[0], *of_policies) == of_policies
    assert read_hours(precision.split('data-part="cost"')[1]) == of_policies["level"], "it opens with what is enforced"
    other = get_html(visitor, "/precision?policy=candidate%401")
    assert read_hours(other.split('data-part="cost"')[1]) == of_policies["candidate"]

    of_runs = {enforced.id: expect_hours(saved, None), shadow.id: expect_hours(None, would_have_saved)}
    for run in (enforced, shadow):
        assert read_hours(get_html(visitor, f"/runs/{run.id}")) == of_runs[run.id]
        attempt = read_api(f"/runs/{run.id}/outcomes")["case"]
        words = (attempt[f"gpu_hours_{word}"] for word in WORDS)
        assert expect_hours(*(hours and round(hours) for hours in words)) == of_runs[run.id]
    names = {"level": of_runs[enforced.id], "candidate": of_runs[shadow.id]}
    assert read_rows(get_html(visitor, "/cases"), *names) == names

    monkeypatch.setenv("EVALSTOP_URL", address)
    monkeypatch.setenv("EVALSTOP_KEY", tenant.secret)
    assert main(["precision"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[-2:] == ["gpu_hours_saved", "gpu_hours_would_have_saved"]
    shown = {row.split("@")[0]: [round(float(text)) for text in row.split()[-2:]] for row in printed[1:]}
    assert shown == {"level": [saved, 0], "candidate": [0, would_have_saved]}
