"""The fleet: which runs it shows in which order, and what their strips say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from html import unescape
from typing import Any
from uuid import UUID

import httpx
from evalstop_service.decisions import commands
from evalstop_service.ingest import CheckpointSaved, EvalChanged, Observations
from evalstop_service.ingest import open_run as opening
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run, find_run
from evalstop_service.store.sparklines import Segment
from evalstop_service.web.dashboard.fleet import CELLS, FARTHEST, draw_strip
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.service.project_fixture import submit_message
from tests.service.web.api.fake_committer import build_run
from tests.service.web.dashboard.recorded_runs import Tenant, add_tenant
from tests.service.web.dashboard.serving import EMBEDDED
from tests.service.web.dashboard.test_downsampling_and_formatting import FINITE
from tests.service.web.dashboard.test_page_safety import HOSTILE

RISES = [0.01 * at + 0.002 * (at * 7 % 5) for at in range(40)]
TURNS = [*RISES[:25], *(RISES[25] - 0.012 * at + 0.002 * (at * 7 % 5) for at in range(30))]


def train(
    database: Database,
    tenant: Tenant,
    now: datetime,
    name: str,
    values: Sequence[float],
    policy: str = "default",
    **terms: Any,
) -> Run:
    """A run that is still running, with these evals and a checkpoint at the best."""
    request = opening.OpenRequest(name=name, policy=policy, total_steps=100, **terms)
    run, _ = opening.open_run(database, tenant.project.id, request, now)
    if values:
        best = max(range(len(values)), key=lambda step: abs(values[step]))
        points = tuple(PostedObservation("eval", step, value) for step, value in enumerate(values))
        submit_message(database, tenant.project.id, run.id, CheckpointSaved(best, "file:///best"), now)
        submit_message(database, tenant.project.id, run.id, Observations(points), now)
    with database.reading() as tx:
        found = find_run(tx, tenant.project.id, run.id)
    assert found is not None
    return found


def rows(visitor: httpx.Client, **query: int) -> dict[str, str]:
    """The rows of the page by the names of their runs, in order."""
    html = visitor.get("/runs/fleet", params=query).raise_for_status().text
    items = html.split('<ol class="card fleet">')[1].split("</ol>")[0].split("<li>")[1:]
    return {unescape(item.split("<bdi>")[1].split("</bdi>")[0]): item for item in items}


def test_the_most_likely_to_have_turned_comes_first(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """By the probability on record, whichever way the eval is turned, or by the verdict where nobody says it."""
    minimized = {"eval": {"role": "eval", "direction": "minimize"}}
    train(database, tenant, now, "silent", [], metrics=minimized)
    rising = train(database, tenant, now, "rising", [-value for value in RISES], metrics=minimized)
    ended = train(database, tenant, now, "ended", TURNS[:10])
    commands.finish_run(database, tenant.project.id, ended.id, "completed", now)
    train(database, add_tenant(database, now, "others"), now, "of others", RISES[:9])
    turned = train(database, tenant, now, "turned", [-value for value in TURNS], metrics=minimized)
    alarmed = train(database, tenant, now, "alarmed", TURNS, policy="paper")
    assert (alarmed.verdict.verdict, turned.verdict.verdict) == ("stop", "stop")
    shown = rows(visitor)
    assert list(shown)[:3] == ["alarmed", "turned", "rising"]
    assert set(shown) == {"alarmed", "turned", "rising", "silent"}
    assert "no probability" in shown["alarmed"]
    assert f'href="/runs/{turned.id}"' in shown["turned"]
    (chance,) = (item.value for item in turned.verdict.evidence if item.kind == "posterior")
    assert chance > 0.5
    assert f"{chance * 100:.1f} %" in shown["turned"]
    assert "level-" in shown["turned"]
    assert "no eval yet" in shown["silent"]
    last = [float(re.findall(r"the last one ([\d.]+)", shown[name])[0]) for name in ("turned", "rising")]
    assert last[0] > 4 > last[1]
    assert rising.status == "running"


@EMBEDDED
def test_as_many_strips_as_are_asked_for(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Those most likely to have turned, with a link that shows all."""
    for name, values in (("first", RISES), ("second", TURNS), ("third", RISES[:9])):
        train(database, tenant, now, name, values)
    assert list(rows(visitor, shown=1)) == ["second"]
    html = visitor.get("/runs/fleet", params={"shown": 1}).text
    (rest,) = re.findall(r'href="(/runs/fleet\?[^"]+)">Show all 3<', html)
    assert "2 more are less likely" in html
    assert set(rows(visitor, shown=3)) == {"first", "second", "third"}
    assert "Show all" not in visitor.get(rest).text


@EMBEDDED
def test_nothing_runs(visitor: httpx.Client) -> None:
    """Without a running run the page says so."""
    assert "No run is running" in visitor.get("/runs/fleet").text


@EMBEDDED
def test_hostile_names_in_the_fleet(visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime) -> None:
    """Names are text, whatever stands in them."""
    for name in HOSTILE:
        train(database, tenant, now, name, RISES[:3])
    assert set(rows(visitor)) == set(HOSTILE)
    assert "<script>alert" not in visitor.get("/runs/fleet").text


@EMBEDDED
def test_an_eval_that_changed_begins_anew(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Scores before the change are not shown, as they are not compared."""
    run = train(database, tenant, now, "graded", TURNS[:30])
    assert '"0 0 30 1"' in rows(visitor)["graded"]
    submit_message(database, tenant.project.id, run.id, EvalChanged(30, "a stricter grader", None, "trainer"), now)
    points = tuple(PostedObservation("eval", step, 0.01 * step) for step in range(30, 34))
    submit_message(database, tenant.project.id, run.id, Observations(points), now)
    assert '"0 0 4 1"' in rows(visitor)["graded"]


@EMBEDDED
def test_an_open_page_is_renewed(visitor: httpx.Client) -> None:
    """Whoever shows an older state is told at once."""
    with visitor.stream("GET", "/runs/fleet/events?seen=0") as stream:
        assert next(line for line in stream.iter_lines() if line.startswith("event:")) == "event: changed"


OF_EVAL = replace(build_run(UUID(int=1)), metrics={"eval": {"role": "eval", "direction": "maximize"}})


def test_a_run_that_rises_has_not_fallen() -> None:
    """Evals count against the best before them, not against what came later."""
    rising = [Segment(step, value, value) for step, value in enumerate(RISES)]
    assert draw_strip(OF_EVAL, rising).fallen == 0
    turned = [Segment(step, value, value) for step, value in enumerate(TURNS)]
    strip = draw_strip(OF_EVAL, turned)
    assert 0 < strip.fallen < len(TURNS) - 25


@given(st.lists(st.tuples(FINITE, FINITE), max_size=CELLS))
def test_a_strip_is_whole(values: list[tuple[float, float]]) -> None:
    """Whatever the numbers, its pieces lie beside each other in its cells, and the best is never below itself."""
    strip = draw_strip(OF_EVAL, [Segment(step, min(pair), max(pair)) for step, pair in enumerate(values)])
    assert strip.cells == len(values)
    pieces = [tuple(map(int, found)) for _, line in strip.lines for found in re.findall(r"M(\d+) \.5h(\d+)", line)]
    covered = [cell for start, length in pieces for cell in range(start, start + length)]
    assert len(covered) == len(set(covered)) == strip.fallen < max(1, strip.cells)
    assert all(0 <= cell < strip.cells for cell in covered)
    assert (strip.distance is None) == (not values)
    assert strip.distance is None or 0 <= strip.distance <= FARTHEST
