"""Runs laid over one another: what the page says without a browser, and what its charts do in one."""

from __future__ import annotations

import math
import time
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import UUID, uuid4

import httpx
import pytest
from evalstop_service.ingest import Observations
from evalstop_service.rules.run_descriptions import DescriptionIn
from evalstop_service.runs.descriptions import describe_run
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from evalstop_service.web.dashboard.compare import MOST_POINTS
from playwright.sync_api import expect

from tests.service.project_fixture import submit_message
from tests.service.web.dashboard.conftest import Window
from tests.service.web.dashboard.recorded_runs import Tenant, add_tenant, open_run, recorded, report
from tests.service.web.dashboard.serving import EMBEDDED

TURNS, CLIMBS = recorded("np-0044")[:29], recorded("np-0082")[:20]

DEADLINE_SECONDS = 30.0


def link(*runs: UUID, **chosen: str) -> str:
    query = httpx.QueryParams([*(("run", str(run_id)) for run_id in runs), *chosen.items()])
    return f"/runs/compare?{query}"


def open_two(database: Database, tenant: Tenant, now: datetime) -> tuple[Run, Run]:
    """A run whose eval turns, and one whose eval climbs."""
    turns = open_run(database, tenant, now, "<i>turns", labels={"lr": "1e-5", "host": "a"})
    climbs = open_run(database, tenant, now, "climbs", labels={"lr": "3e-5", "host": "a", "<b>": "x" * 500})
    report(database, tenant, turns.id, TURNS, now)
    report(database, tenant, climbs.id, CLIMBS, now)
    return turns, climbs


@EMBEDDED
def test_the_table_shows_what_differs(visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime) -> None:
    """Best and last eval of each run, the labels that differ and no others, and names as text."""
    turns, climbs = open_two(database, tenant, now)
    html = visitor.get(link(turns.id, climbs.id)).raise_for_status().text
    table = html[html.index("<table") :]
    best = max(CLIMBS, key=lambda item: item.gold)
    for words in (
        "1e-5",
        "3e-5",
        "not set",
        "&lt;i&gt;turns",
        "&lt;b&gt;",
        f"{best.gold:.4g}",
        f"{CLIMBS[-1].gold:.4g}",
    ):
        assert words in table
    assert [words in html for words in ("<i>turns", "x" * 201, "host")] == [False] * 3
    listed = visitor.get("/runs").text
    for run in (turns, climbs):
        assert f'name="run" value="{run.id}" form="compare"' in listed


def test_each_value_has_its_step_its_time_and_its_kl(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """The seconds count from the run's first observation; the KL is the last one up to the step."""
    runs = [open_run(database, tenant, now, name) for name in ("timed", "untimed")]
    for run, timed in zip(runs, (True, False), strict=True):
        points = [PostedObservation("policy/kl", step, kl) for step, kl in ((1, 0.5), (3, 2.0), (4, math.nan))]
        points += [PostedObservation("reward/gold", step, 0.1 * step) for step in range(5)]
        if timed:
            points = [
                PostedObservation(one.metric, one.step, one.value, None, now + timedelta(minutes=one.step))
                for one in points
            ]
        submit_message(database, tenant.project.id, run.id, Observations(tuple(points)), now)
    timed, untimed = visitor.get(link(*[run.id for run in runs]).replace("?", "/series.json?")).json()["runs"]
    evals = next(line for line in timed["lines"] if line["role"] == "eval")
    assert evals["steps"] == [0, 1, 2, 3, 4]
    assert evals["seconds"] == [0, 60, 120, 180, 240]
    assert evals["kl"] == [None, 0.5, 0.5, 2.0, None]
    assert next(line for line in untimed["lines"] if line["role"] == "eval")["seconds"] == [0] * 5


@EMBEDDED
def test_long_series_are_compared_at_the_resolution_of_a_chart(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Of a KL of more than 10 000 observations a few hundred are drawn, and each eval has one of about its step."""
    runs = [open_run(database, tenant, now, name) for name in ("one", "two")]
    points = [PostedObservation("policy/kl", step, float(step)) for step in range(10_100)]
    evals = [PostedObservation("reward/gold", step, 0.5) for step in range(1000, 10_000, 1000)]
    submit_message(database, tenant.project.id, runs[0].id, Observations((*points, *evals)), now)
    answer = visitor.get(link(*[run.id for run in runs]).replace("?", "/series.json?")).json()
    lines = {line["role"]: line for line in answer["runs"][0]["lines"]}
    steps = lines["kl"]["steps"]
    assert (100 < len(steps) <= MOST_POINTS, steps[0], steps[-1]) == (True, 0, 10_099)
    assert all(0 <= step - kl < 200 for step, kl in zip(lines["eval"]["steps"], lines["eval"]["kl"], strict=True))
    assert not any(line["steps"] for line in answer["runs"][1]["lines"])


@EMBEDDED
def test_what_cannot_be_compared_is_said(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Too few or too many runs: 422 and what to do. A run of nobody or of another project, or a wrong word: 404."""
    runs = [open_run(database, tenant, now, f"run-{index}") for index in range(11)]
    ids = [run.id for run in runs]
    elsewhere = open_run(database, add_tenant(database, now, "elsewhere"), now, "theirs")
    describe_run(database, Author(tenant.project.id, "dana", now), ids[0], DescriptionIn(group="lonely"))
    for path, words in (
        (link(), "Choose 2 to 10 runs to compare, not 0."),
        (link(ids[0], ids[0]), "Choose 2 to 10 runs to compare, not 1."),
        (link(*ids), "Choose 2 to 10 runs to compare, not 11."),
        (link(group="lonely"), "This group has fewer than two runs: there is nothing to compare."),
    ):
        for asked in (path, path.replace("compare", "compare/series.json")):
            answer = visitor.get(asked)
            assert (answer.status_code, words in answer.text) == (422, True), asked
            assert ("Choose runs</a>" in answer.text, "Sign out" in answer.text) == (asked is path,) * 2
    for path in (
        link(ids[0], uuid4()),
        link(ids[0], elsewhere.id),
        link(*ids[:2], x="weight"),
        link(*ids[:2], to="nan"),
    ):
        assert visitor.get(path).status_code == 404, path
    assert visitor.get(link(*ids[:10])).status_code == 200


@EMBEDDED
def test_a_group_is_compared_by_its_name(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """The list of a group leads to the comparison of its newest ten runs."""
    for index in range(12):
        run = open_run(database, tenant, now, f"seed-{index}")
        describe_run(database, Author(tenant.project.id, "dana", now), run.id, DescriptionIn(group="seeds & co"))
    listed = visitor.get("/runs", params={"group": "seeds & co"}).text
    path = "/runs/compare?group=seeds+%26+co"
    assert f'href="{path}"' in listed
    html = visitor.get(path).text
    assert ["Compare 10 runs" in html, "seed-11" in html, "seed-1<" in html] == [True, True, False]


# --- In a browser. ---


@pytest.mark.real
def test_too_few_ticked_runs_stay_in_the_list(window: Window, embedded_database: Database, now: datetime) -> None:
    """With one run ticked, Compare selected says how many to choose, and the list stays with its tick."""
    tenant = add_tenant(embedded_database, now)
    turns, climbs = open_two(embedded_database, tenant, now)
    page = window.page
    window.sign_in(tenant)
    page.check(f"#pick-{turns.id}")
    page.get_by_role("button", name="Compare selected").click()
    expect(page.locator("#compare [role=status]")).to_have_text("Choose 2 to 10 runs in the list, not 1.")
    expect(page.locator(f"#pick-{turns.id}")).to_be_checked()
    page.check(f"#pick-{climbs.id}")
    page.get_by_role("button", name="Compare selected").click()
    expect(page.locator("h1")).to_have_text("Compare 2 runs")
    assert window.is_clean()


@pytest.mark.real
def test_runs_are_chosen_laid_over_one_another_and_shared(
    window: Window, embedded_database: Database, now: datetime
) -> None:
    """Boxes in the list lead to the charts; axis, alignment, smoothing, zoom and hidden runs stand in the address."""
    tenant = add_tenant(embedded_database, now)
    turns, climbs = open_two(embedded_database, tenant, now)
    page = window.page
    window.sign_in(tenant)
    expect(page.locator(".live")).to_have_attribute("data-live", "on")
    page.check(f"#pick-{turns.id}")
    open_run(embedded_database, tenant, now, "news")
    expect(page.locator(".row-link")).to_have_count(3)
    expect(page.locator(f"#pick-{turns.id}")).to_be_checked()
    expect(page.locator(f"#pick-{turns.id}")).to_be_focused()
    page.check(f"#pick-{climbs.id}")
    page.get_by_role("button", name="Compare selected").click()
    wait_until(window, f"{TRACES}.length", 8)
    assert read(window, f"{TRACES}[0].x") == [item.step for item in CLIMBS]  # the newest run is listed first

    page.select_option("[name=x]", "sqrt_kl")
    wait_until(window, f"{TRACES}.length", 6)  # KL over KL says nothing
    drawn = read(window, f"{TRACES}[0].x")
    assert drawn == pytest.approx([math.sqrt(item.kl) for item in CLIMBS])
    page.select_option("[name=align]", "best")
    wait_until(window, f"{TRACES}.filter((trace) => trace.name === 'best').map((trace) => trace.x[0])", [0, 0])
    assert min(read(window, f"{TRACES}[0].x")) < 0
    page.select_option("[name=x]", "step")
    page.locator("[name=smoothing]").fill("0.5")
    wait_until(window, f"{TRACES}.length", 14)  # what was measured, and it smoothed

    proxy_line = "document.querySelector('#chart .subplot.xy2 .scatterlayer .js-line').getAttribute('d')"
    before, highest_kl = read(window, proxy_line), read(window, KL_TOP)
    drag_over_the_evals(window)
    wait_until(window, f"{proxy_line} === {before!r}", False)
    wait_until(window, f"{KL_TOP} < {highest_kl}", True)  # each panel is as high as what is seen in it
    page.locator("#chart .nsewdrag").first.dblclick()
    wait_until(window, f"{KL_TOP} === {highest_kl}", True)
    drag_over_the_evals(window)
    wait_until(window, f"{KL_TOP} < {highest_kl}", True)
    page.locator(f"[data-toggle='{turns.id}']").click()
    wait_until(window, f"{TRACES}.length", 7)
    query = parse_qs(urlsplit(page.url).query)
    assert (query["align"], query["smoothing"], query["hidden"]) == (["best"], ["0.5"], [str(turns.id)])

    shown = read(window, "document.getElementById('chart').layout.xaxis.range")
    page.goto(page.url)
    wait_until(window, f"{TRACES}.length", 7)
    assert read(window, "document.getElementById('chart').layout.xaxis.range") == pytest.approx(shown, rel=1e-6)
    expect(page.locator("[name=align]")).to_have_value("best")
    expect(page.locator(f"[data-toggle='{turns.id}']")).to_have_attribute("aria-pressed", "false")
    assert window.is_clean()


TRACES = "document.getElementById('chart').data"
KL_TOP = "document.getElementById('chart').layout.yaxis3.range[1]"


def read(window: Window, expression: str) -> Any:
    return window.page.evaluate(expression)


def wait_until(window: Window, expression: str, value: object) -> None:
    # Not wait_for_function: it evaluates a string in the page, which the content security policy refuses.
    window.page.wait_for_selector("#chart .scatterlayer", state="attached")
    deadline = time.monotonic() + DEADLINE_SECONDS
    while (found := read(window, expression)) != value:
        assert time.monotonic() < deadline, f"{expression} is {found!r}, not {value!r}"
        window.page.wait_for_timeout(20)


def drag_over_the_evals(window: Window) -> None:
    box = window.page.locator("#chart .subplot.xy .gridlayer, #chart .nsewdrag").first.bounding_box()
    assert box is not None
    mouse = window.page.mouse
    mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 40)
    mouse.down()
    mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 42, steps=4)
    mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 42)
    mouse.up()
