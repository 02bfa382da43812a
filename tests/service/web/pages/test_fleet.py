"""The fleet page: the order of the running runs, and their strips."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from html import unescape
from typing import Any
from uuid import UUID

import httpx
from evalstop_service.ingest import CheckpointSaved, EvalChanged
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from evalstop_service.store.series import Segment
from evalstop_service.web.pages.fleet import CELLS, FARTHEST, draw_strip
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.service.web.api.fake_committer import build_run
from tests.service.web.pages.recorded_runs import Tenant, add_tenant
from tests.service.web.pages.serving import SQLITE_ONLY
from tests.service.web.pages.test_downsampling_and_formatting import FINITE
from tests.service.web.pages.test_page_safety import HOSTILE_NAMES

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
    assert "level-" in rows["turned"]
    assert "no eval yet" in rows["without-evals"]
    distances = [float(re.findall(r"the last one ([\d.]+)", rows[name])[0]) for name in ("turned", "rising")]
    assert distances[0] > 4 > distances[1]
    assert rising.status == "running"


@SQLITE_ONLY
def test_fleet_is_limited_with_a_link_to_all(visitor: httpx.Client, tenant: Tenant) -> None:
    """Only the runs most likely to have turned are shown, with a link that shows all."""
    for name, values in (("first", RISING_VALUES), ("second", TURNING_VALUES), ("third", RISING_VALUES[:9])):
        add_running_run(tenant, name, values)
    assert list(read_rows(visitor, shown=1)) == ["second"]
    html = visitor.get("/runs/fleet", params={"shown": 1}).text
    (show_all,) = re.findall(r'href="(/runs/fleet\?[^"]+)">Show all 3<', html)
    assert "2 more are less likely" in html
    assert set(read_rows(visitor, shown=3)) == {"first", "second", "third"}
    assert not re.search(r">Show all \d+<", visitor.get(show_all).text)


@SQLITE_ONLY
def test_empty_fleet_is_announced(visitor: httpx.Client) -> None:
    """Without a running run the page says so."""
    assert "No run is running" in visitor.get("/runs/fleet").text


@SQLITE_ONLY
def test_fleet_escapes_run_names(visitor: httpx.Client, tenant: Tenant) -> None:
    """Run names are shown as text, whatever they contain."""
    for name in HOSTILE_NAMES:
        add_running_run(tenant, name, RISING_VALUES[:3])
    assert set(read_rows(visitor)) == set(HOSTILE_NAMES)
    assert "<script>alert" not in visitor.get("/runs/fleet").text


@SQLITE_ONLY
def test_strip_starts_after_an_eval_change(visitor: httpx.Client, tenant: Tenant) -> None:
    """Scores from before a changed eval are not shown, because they cannot be compared."""
    run = add_running_run(tenant, "graded", TURNING_VALUES[:30])
    assert '"0 0 30 1"' in read_rows(visitor)["graded"]
    tenant.submit(run, EvalChanged(30, "a stricter grader", None, "trainer"))
    points = tuple(PostedObservation("eval", step, 0.01 * step) for step in range(30, 34))
    tenant.post_observations(run, points)
    assert '"0 0 4 1"' in read_rows(visitor)["graded"]


RUN_WITH_EVAL = replace(build_run(UUID(int=1)), metrics={"eval": {"role": "eval", "direction": "maximize"}})


def test_fallen_cells_count_from_the_best_so_far() -> None:
    """A cell counts as fallen against the best before it, not against a later one."""
    rising = [Segment(step, value, value) for step, value in enumerate(RISING_VALUES)]
    assert draw_strip(RUN_WITH_EVAL, rising).fallen == 0
    turned = [Segment(step, value, value) for step, value in enumerate(TURNING_VALUES)]
    strip = draw_strip(RUN_WITH_EVAL, turned)
    assert 0 < strip.fallen < len(TURNING_VALUES) - 25


@given(st.lists(st.tuples(FINITE, FINITE), max_size=CELLS))
def test_strip_pieces_do_not_overlap(values: list[tuple[float, float]]) -> None:
    """Whatever the numbers, the pieces lie in distinct cells, and the distance from the best is in range."""
    strip = draw_strip(RUN_WITH_EVAL, [Segment(step, min(pair), max(pair)) for step, pair in enumerate(values)])
    assert strip.cells == len(values)
    pieces = [tuple(map(int, match)) for _, line in strip.lines for match in re.findall(r"M(\d+) \.5h(\d+)", line)]
    covered = [cell for start, length in pieces for cell in range(start, start + length)]
    assert len(covered) == len(set(covered)) == strip.fallen < max(1, strip.cells)
    assert all(0 <= cell < strip.cells for cell in covered)
    assert (strip.distance is None) == (not values)
    assert strip.distance is None or 0 <= strip.distance <= FARTHEST
