"""The comparison of runs: its table and series over HTTP, its charts in a browser."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import UUID, uuid4

import httpx
import pytest
from evalstop_service.domain.run import DescriptionIn
from evalstop_service.runs.descriptions import describe_run
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from evalstop_service.web.pages.compare import MOST_POINTS
from playwright.sync_api import expect

from tests.service.web.pages.conftest import Window
from tests.service.web.pages.recorded_runs import Tenant, add_tenant, load_recorded_evals
from tests.service.web.pages.serving import SQLITE_ONLY, wait_for_value

TURNING_EVALS, CLIMBING_EVALS = load_recorded_evals("np-0044")[:29], load_recorded_evals("np-0082")[:20]


def compare_path(*runs: UUID, **options: str) -> str:
    """The path of the comparison of these runs."""
    query = httpx.QueryParams([*(("run", str(run_id)) for run_id in runs), *options.items()])
    return f"/runs/compare?{query}"


def open_two_runs(tenant: Tenant) -> tuple[Run, Run]:
    """Open a run whose eval turns, and one whose eval climbs."""
    turns = tenant.open_run("<i>turns", labels={"lr": "1e-5", "host": "a"})
    climbs = tenant.open_run("climbs", labels={"lr": "3e-5", "host": "a", "<b>": "x" * 500})
    tenant.post_evals(turns, TURNING_EVALS)
    tenant.post_evals(climbs, CLIMBING_EVALS)
    return turns, climbs


@SQLITE_ONLY
def test_table_shows_evals_and_differing_labels(visitor: httpx.Client, tenant: Tenant) -> None:
    """The table has best and last eval of each run and the labels that differ; names are escaped."""
    turns, climbs = open_two_runs(tenant)
    html = visitor.get(compare_path(turns.id, climbs.id)).raise_for_status().text
    table = html[html.index("<table") :]
    best = max(CLIMBING_EVALS, key=lambda item: item.gold)
    for words in (
        "1e-5",
        "3e-5",
        "not set",
        "&lt;i&gt;turns",
        "&lt;b&gt;",
        f"{best.gold:.4g}",
        f"{CLIMBING_EVALS[-1].gold:.4g}",
    ):
        assert words in table
    assert [words in html for words in ("<i>turns", "x" * 201, "host")] == [False] * 3
    run_list = visitor.get("/runs").text
    for run, evals in ((turns, TURNING_EVALS), (climbs, CLIMBING_EVALS)):
        assert f'name="run" value="{run.id}" form="compare"' in run_list
        assert f'class="c-last right">{evals[-1].gold:.4g}<' in run_list.replace("\N{MINUS SIGN}", "-")
    assert html.count("<polyline") == 2, "the server draws both evals"
    assert visitor.get(compare_path(turns.id, climbs.id, x="kl")).text.count("<polyline") == 0


def test_series_have_steps_and_kl(visitor: httpx.Client, tenant: Tenant) -> None:
    """The KL of an eval is the last one up to its step."""
    runs = [tenant.open_run(name) for name in ("one", "two")]
    points = [PostedObservation("policy/kl", step, kl) for step, kl in ((1, 0.5), (3, 2.0), (4, math.nan))]
    points += [PostedObservation("reward/gold", step, 0.1 * step) for step in range(5)]
    tenant.post_observations(runs[0], points)
    answer = visitor.get(compare_path(*[run.id for run in runs]).replace("?", "/series.json?")).json()["runs"][0]
    evals = next(line for line in answer["lines"] if line["role"] == "eval")
    assert evals["steps"] == [0, 1, 2, 3, 4]
    assert evals["kl"] == [None, 0.5, 0.5, 2.0, None]


@SQLITE_ONLY
def test_long_series_are_downsampled(visitor: httpx.Client, tenant: Tenant) -> None:
    """Of 10 100 KL values a few hundred are sent, and each eval has the KL of about its step."""
    runs = [tenant.open_run(name) for name in ("one", "two")]
    points = [PostedObservation("policy/kl", step, float(step)) for step in range(10_100)]
    evals = [PostedObservation("reward/gold", step, 0.5) for step in range(1000, 10_000, 1000)]
    tenant.post_observations(runs[0], (*points, *evals))
    answer = visitor.get(compare_path(*[run.id for run in runs]).replace("?", "/series.json?")).json()
    lines = {line["role"]: line for line in answer["runs"][0]["lines"]}
    steps = lines["kl"]["steps"]
    assert (100 < len(steps) <= MOST_POINTS, steps[0], steps[-1]) == (True, 0, 10_099)
    assert all(0 <= step - kl < 200 for step, kl in zip(lines["eval"]["steps"], lines["eval"]["kl"], strict=True))
    assert not any(line["steps"] for line in answer["runs"][1]["lines"])


@SQLITE_ONLY
def test_invalid_comparison_is_refused(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Too few or too many runs: 422 and what to do. An unknown run or option: 404."""
    runs = [tenant.open_run(f"run-{index}") for index in range(11)]
    ids = [run.id for run in runs]
    elsewhere = add_tenant(database, now, "elsewhere").open_run("theirs")
    describe_run(database, Author(tenant.id, "dana", now), ids[0], DescriptionIn(group="lonely").change)
    for path, words in (
        (compare_path(), "Choose 2 to 10 runs to compare, not 0."),
        (compare_path(ids[0], ids[0]), "Choose 2 to 10 runs to compare, not 1."),
        (compare_path(*ids), "Choose 2 to 10 runs to compare, not 11."),
        (compare_path(group="lonely"), "This group has fewer than two runs: there is nothing to compare."),
    ):
        for page_or_series in (path, path.replace("compare", "compare/series.json")):
            answer = visitor.get(page_or_series)
            assert (answer.status_code, words in answer.text) == (422, True), page_or_series
    for path, status in (
        (compare_path(ids[0], uuid4()), 404),
        (compare_path(ids[0], elsewhere.id), 404),
        (compare_path(*ids[:2], x="weight"), 422),
    ):
        assert visitor.get(path).status_code == status, path
    assert visitor.get(compare_path(*ids[:10])).status_code == 200


@SQLITE_ONLY
def test_group_link_compares_its_newest_runs(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """The list of a group links to the comparison of its newest ten runs."""
    for index in range(12):
        run = tenant.open_run(f"seed-{index}")
        describe_run(database, Author(tenant.id, "dana", now), run.id, DescriptionIn(group="seeds & co").change)
    run_list = visitor.get("/runs", params={"group": "seeds & co"}).text
    path = "/runs/compare?group=seeds+%26+co"
    assert f'href="{path}"' in run_list
    html = visitor.get(path).text
    assert ["Compare 10 runs" in html, "seed-11" in html, "seed-1<" in html] == [True, True, False]


@pytest.mark.nightly
@pytest.mark.real
def test_chart_options_are_kept_in_the_address(window: Window, embedded_database: Database, now: datetime) -> None:
    """Selected runs lead to the charts; axis, smoothing, zoom and hidden runs are in the address."""
    tenant = add_tenant(embedded_database, now)
    turns, climbs = open_two_runs(tenant)
    page = window.page
    window.sign_in(tenant)
    expect(page.locator(".live")).to_have_attribute("data-live", "on")
    page.check(f"#pick-{turns.id}")
    tenant.open_run("newer")
    expect(page.locator(".row-link")).to_have_count(3)
    expect(page.locator(f"#pick-{turns.id}")).to_be_checked()
    expect(page.locator(f"#pick-{turns.id}")).to_be_focused()
    page.check(f"#pick-{climbs.id}")
    page.get_by_role("button", name="Compare selected").click()
    wait_for_chart_value(window, f"{TRACES}.length", 8)
    assert evaluate(window, f"{TRACES}[0].x") == [item.step for item in CLIMBING_EVALS]  # the newest run comes first
    page.select_option("[name=by]", "label:lr")
    wait_for_chart_value(window, f"{TRACES}.length", 12)  # the mean and the band of two groups in three panels
    expect(page.locator("[data-groups] li")).to_have_text(
        ["3e-5: mean and range of 1 run", "1e-5: mean and range of 1 run"]
    )
    page.select_option("[name=by]", "")
    wait_for_chart_value(window, f"{TRACES}.length", 8)

    page.select_option("[name=x]", "sqrt_kl")
    wait_for_chart_value(window, f"{TRACES}.length", 6)  # KL is not drawn over KL
    distances = evaluate(window, f"{TRACES}[0].x")
    assert distances == pytest.approx([math.sqrt(item.kl) for item in CLIMBING_EVALS])
    page.select_option("[name=x]", "step")
    page.locator("[name=smoothing]").fill("0.5")
    wait_for_chart_value(window, f"{TRACES}.length", 14)  # each series measured and smoothed

    proxy_line = "document.querySelector('#chart .subplot.xy2 .scatterlayer .js-line').getAttribute('d')"
    before, highest_kl = evaluate(window, proxy_line), evaluate(window, KL_TOP)
    drag_over_the_evals(window)
    wait_for_chart_value(window, f"{proxy_line} === {before!r}", False)
    wait_for_chart_value(window, f"{KL_TOP} < {highest_kl}", True)  # each panel scales to its visible points
    page.locator("#chart .nsewdrag").first.dblclick()
    wait_for_chart_value(window, f"{KL_TOP} === {highest_kl}", True)
    drag_over_the_evals(window)
    wait_for_chart_value(window, f"{KL_TOP} < {highest_kl}", True)
    page.locator(f"[data-toggle='{turns.id}']").click()
    wait_for_chart_value(window, f"{TRACES}.length", 7)
    query = parse_qs(urlsplit(page.url).query)
    assert (query["smoothing"], query["hidden"]) == (["0.5"], [str(turns.id)])

    zoomed_range = evaluate(window, "document.getElementById('chart').layout.xaxis.range")
    page.goto(page.url)
    wait_for_chart_value(window, f"{TRACES}.length", 7)
    assert evaluate(window, "document.getElementById('chart').layout.xaxis.range") == pytest.approx(
        zoomed_range, rel=1e-6
    )
    expect(page.locator(f"[data-toggle='{turns.id}']")).to_have_attribute("aria-pressed", "false")
    window.assert_no_errors()


TRACES = "document.getElementById('chart').data"
KL_TOP = "document.getElementById('chart').layout.yaxis3.range[1]"


def evaluate(window: Window, expression: str) -> Any:
    return window.page.evaluate(expression)


def wait_for_chart_value(window: Window, expression: str, value: object) -> None:
    window.page.wait_for_selector("#chart .scatterlayer", state="attached")
    wait_for_value(window.page, expression, value)


def drag_over_the_evals(window: Window) -> None:
    box = window.page.locator("#chart .subplot.xy .gridlayer, #chart .nsewdrag").first.bounding_box()
    assert box is not None
    mouse = window.page.mouse
    mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 40)
    mouse.down()
    mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 42, steps=4)
    mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 42)
    mouse.up()
