"""The page of a group: its rule in words, lineages, schedule, stops and empty states; its chart in a browser."""

from __future__ import annotations

import html
import json
import re
from datetime import datetime

import httpx
import pytest
from evalstop_service.clock import utc_now
from evalstop_service.ingest import Exploited
from evalstop_service.store.database import Database
from playwright.sync_api import expect

from tests.service.decisions import grouped_runs
from tests.service.project_fixture import ProjectFixture
from tests.service.web.pages.conftest import Window
from tests.service.web.pages.recorded_groups import (
    HALVING,
    PBT,
    call_copy,
    open_member,
    populate_groups,
    post_rise,
    set_rule,
)
from tests.service.web.pages.recorded_runs import Tenant, add_tenant
from tests.service.web.pages.serving import (
    SQLITE_ONLY,
    find_accessibility_faults,
    get_html,
    read_csrf_token,
    wait_for_value,
)


def read_words(page: str) -> str:
    """The text of a page, in one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).replace(" ,", ",").split())


@SQLITE_ONLY
def test_population_shows_what_each_run_descends_from(visitor: httpx.Client, tenant: Tenant) -> None:
    """Copies, lineages and the schedule of the best run, as JSON to copy; the lineages' lines follow the copies."""
    populate_groups(tenant)
    page = get_html(visitor, "/groups/population")
    words = read_words(page)
    assert "Every 200 steps, a run among the worst 25 % copies a checkpoint of one among the best 25 %" in words
    assert "Its decisions are carried out on runs in enforce mode" in words
    assert "pop-3 at step 400 began as pop-2, 2 copies" in words
    copied = re.findall(r'data-copy="([^"]*)"[^>]*the schedule', page)
    schedule = json.loads(html.unescape(copied[0]))
    assert [(stage["run"], stage["from_step"], stage["to_step"], stage["hyperparameters"]) for stage in schedule] == [
        ("pop-2", 0, 200, {"lr": 1e-4, "kl.coef": 0.1}),
        ("pop-3", 200, 400, {"lr": 1.25e-4, "kl.coef": 0.2}),
        ("pop-1", 400, 600, {"lr": 1e-4, "kl.coef": 0.4}),
    ]
    assert len(re.findall('class="replaced"', page)) == 3
    best_path = re.findall(r'class="of-best" d="([^"]*)"', page)
    assert best_path == ["M0.0 60V60H333.3", "M333.3 60V84H666.7", "M666.7 84V36H1000.0"]
    assert page.count("<polyline") == 4 + 3, "a line for each run, cut where it copied another"
    assert f"/runs/compare?run={schedule[0]['run_id']}" in page


def test_page_follows_a_copy_by_the_rule(visitor: httpx.Client, tenant: Tenant, database: Database) -> None:
    """A copy that the rule calls for waits among its decisions; confirmed, the run descends from its source, as the API
    says too."""
    project = ProjectFixture(database, tenant.id, now=utc_now())
    grouped_runs.set_rule(project, grouped_runs.PBT)
    worst = grouped_runs.open_group(project)["worst"]
    grouped_runs.compare(project)
    assert "worst at step 4: to copy best at step 4 copy requested" in read_words(get_html(visitor, "/groups/sweep"))
    exploit = grouped_runs.offer(project, worst)
    assert exploit is not None
    project.submit(worst, Exploited(exploit.decision_id, "key t"))
    grouped_runs.extend_run(project, worst, range(5, 9), 0.2)
    page = get_html(visitor, "/groups/sweep")
    assert "best at step 4" in read_words(page)
    assert len(re.findall('class="of-best"', page)) == 2
    copied = re.findall(r'data-copy="([^"]*)"[^>]*the schedule', page)
    schedule = json.loads(html.unescape(copied[0]))
    assert [(stage["run"], stage["from_step"], stage["to_step"]) for stage in schedule] == [
        ("best", 0, 4),
        ("worst", 4, 8),
    ]
    answer = httpx.get(
        f"{visitor.base_url}/api/v1/groups/sweep", headers={"Authorization": f"Bearer {tenant.secret}"}, timeout=30
    )
    member = next(item for item in answer.raise_for_status().json()["members"] if item["name"] == "worst")
    assert (member["initial"], member["hyperparameters"]) == ({"lr": 4e-6}, schedule[1]["hyperparameters"])


@SQLITE_ONLY
def test_copy_that_is_not_made_ends_nothing(visitor: httpx.Client, tenant: Tenant) -> None:
    """A copy that waits is a decision of the rule beside the run's own: no stop on the run's page; it can be vetoed."""
    set_rule(tenant, "pair", PBT)
    first, second = (open_member(tenant, "pair", name, {"lr": "1e-5"}) for name in ("first", "second"))
    for run in (first, second):
        post_rise(tenant, run, range(0, 101, 20), 0.5)
    call_copy(tenant, "pair", first, second, 80, {"lr": 2e-5}, "pending")
    assert "first at step 80: to copy second at step 80 copy pending" in read_words(get_html(visitor, "/groups/pair"))
    (veto,) = re.findall(r'action="(/decisions/[^"]+/veto)"', get_html(visitor, "/groups/pair"))
    words = read_words(get_html(visitor, f"/runs/{first.id}"))
    assert "The eval shows no turn." in words
    assert "copy pending at step 80 To go on from second at step 80, by the rule of the group pair ." in words
    form = {"csrf": read_csrf_token(visitor), "reason": "let it be", "next": "/groups/pair"}
    assert visitor.post(veto, data=form).headers["location"] == "/groups/pair"
    page = get_html(visitor, "/groups/pair")
    assert ("vetoed" in read_words(page), veto in page) == (True, False)


@SQLITE_ONLY
def test_stop_says_what_would_have_proved_it_wrong(visitor: httpx.Client, tenant: Tenant) -> None:
    """A stop of the rule has its reason, and the pace that the run would have needed beside the one that it had."""
    populate_groups(tenant)
    words = read_words(get_html(visitor, "/groups/halving"))
    assert (
        "At the steps 100, 300, 900 and so on, the best of every 3 runs go on; each of the others is stopped" in words
    )
    assert "seed-0 at step 100 recorded only" in words
    assert "is not among the best 1 of 3, which have 0.27 or more" in words
    needed = re.search(
        r"it had to improve by ([\d.]+), beyond the best of the others \(([\d.]+) now\), in the 900 steps left: "
        r"([\d.]+) per 100 steps\. Over the second half of its evals it made ([\d.]+) per 100",
        words,
    )
    assert needed is not None
    missing, lead, pace_needed, pace = map(float, needed.groups())
    assert missing == pytest.approx(lead - 0.1368, abs=1e-3)
    assert pace_needed == pytest.approx(missing / 9, abs=1e-3)
    assert pace == pytest.approx(100 * (0.1368 - 0.0695) / 60, abs=0.03)


@SQLITE_ONLY
def test_group_without_rule_runs_or_evals(visitor: httpx.Client, tenant: Tenant, database: Database) -> None:
    """Each empty state says what to do; an unknown name, or that of another project's group, is not found."""
    populate_groups(tenant)
    words = read_words(get_html(visitor, "/groups/no rule"))
    assert "No rule compares these runs" in words
    assert 'group="no rule", population={"kind": "median"}' in words
    assert "Waiting for the first eval" in words
    assert "No run of this group yet" in read_words(get_html(visitor, "/groups/empty"))
    set_rule(tenant, "young", {"kind": "pbt", "ready_steps": 50})
    run = open_member(tenant, "young", "first")
    post_rise(tenant, run, range(0, 40, 20), 0.5)
    assert "No run has copied another yet" in read_words(get_html(visitor, "/groups/young"))
    set_rule(add_tenant(database, tenant.now, "elsewhere"), "theirs", HALVING)
    for path in ("/groups/nothing", "/groups/theirs", "/group/series.json?group=theirs"):
        assert visitor.get(path).status_code == 404, path


@SQLITE_ONLY
def test_lists_and_runs_link_to_their_group(visitor: httpx.Client, tenant: Tenant) -> None:
    """The page of a run and the list of a group link to the group's page, whatever its name."""
    name = "a/b & <c>?"
    runs = [open_member(tenant, name, f"run-{place}") for place in range(2)]
    link = "/groups/a/b%20%26%20%3Cc%3E%3F"
    for path in (f"/runs/{runs[0].id}", f"/runs?{httpx.QueryParams({'group': name})}"):
        assert f'href="{link}"' in get_html(visitor, path)
    page = get_html(visitor, link)
    assert "<h1" in page
    assert "a/b &amp; &lt;c&gt;?" in page
    assert "<c>" not in page


@pytest.mark.nightly
@pytest.mark.real
def test_chart_draws_runs_or_lineages(window: Window, embedded_database: Database, now: datetime) -> None:
    """The chart has a line for each run, or each lineage from its first run on, a panel for each hyperparameter, and
    follows new evals; the page has no fault of accessibility."""
    tenant = add_tenant(embedded_database, now)
    populate_groups(tenant)
    page = window.page
    window.sign_in(tenant)
    page.goto(f"{window.address}/groups/population")
    traces = "(document.getElementById('chart').data ?? [])"
    wait_for_value(page, f"{traces}.length", 12)
    best = f"{traces}.find((trace) => trace.name === '2')"
    assert page.evaluate(f"{best}.x.indexOf(null)") == 21, "a gap at the copy of step 400"
    kl = f"{traces}.filter((trace) => trace.name === '2' && trace.yaxis === 'y3')[0]"
    assert page.evaluate(f"{kl}.x") == [0, 200, 200, 400, 400, 600]
    assert page.evaluate(f"{kl}.y") == [0.1, 0.1, 0.2, 0.2, 0.4, 0.4]
    page.select_option("[name=lines]", "lineage")
    third_hue = "getComputedStyle(document.documentElement).getPropertyValue('--hue-3').trim()"
    wait_for_value(page, f"{best}.line.color === {third_hue}", True)  # that of the first run, pop-2
    assert page.evaluate(f"{best}.y[10]") == pytest.approx(0.9 * (1 - 2.718281828 ** (-200 / 300)) - 0.0087, abs=1e-3)
    assert find_accessibility_faults(page) == []
    page.get_by_label("Copy the schedule as JSON").wait_for()
    run = open_member(tenant, "population", "newcomer", {"lr": "1e-5"})
    post_rise(tenant, run, range(0, 100, 20), 2.0)
    wait_for_value(page, f"{traces}.length", 15)
    expect(page.locator("[data-part=runs] tbody tr")).to_have_count(5)
    window.assert_no_errors()
