"""What charts and tables are made of: downsampling, sparklines, formats, and the evidence behind a run's chart."""

from __future__ import annotations

import math
import sys
from datetime import UTC, datetime

import httpx
from evalstop_detectors import MetricRole, Observation, policy_from_document, replay
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.domain.run import BestCheckpoint
from evalstop_service.store import tables
from evalstop_service.store.database import Database
from evalstop_service.store.decisions import DecisionChange
from evalstop_service.store.observations import PostedObservation
from evalstop_service.web.pages import charts, formatting
from evalstop_service.web.pages.run_page import analysis
from hypothesis import given
from hypothesis import strategies as st

from tests.service.web.pages.recorded_runs import LEVEL_POLICY, Tenant, load_recorded_evals
from tests.service.web.pages.serving import SQLITE_ONLY

FINITE = st.floats(-sys.float_info.max, sys.float_info.max)


@given(st.lists(st.tuples(st.integers(0, 2**53), FINITE), max_size=50), FINITE, st.integers(0, 2**53))
def test_sparkline_stays_in_its_frame(points: list[tuple[int, float]], score: float, step: int) -> None:
    """Every coordinate lies within the drawing, whatever the numbers."""
    drawing = charts.draw_sparkline(sorted(points), BestCheckpoint(step, "s3://a", score, "raw_maximum"), step)
    if not points:
        assert drawing is None
        return
    assert drawing is not None
    corners = [tuple(map(float, corner.split(","))) for corner in drawing.line.split()]
    for x, y in [*corners, drawing.last, drawing.best or (0.0, 0.0), (drawing.stop_x or 0.0, 0.0)]:
        assert 0 <= x <= charts.WIDTH
        assert 0 <= y <= charts.HEIGHT


def test_higher_scores_are_drawn_higher() -> None:
    """The y coordinate falls as the eval rises."""
    drawing = charts.draw_sparkline([(0, 1.0), (10, 2.0)], None, None)
    assert drawing is not None
    first, last = (float(corner.split(",")[1]) for corner in drawing.line.split())
    assert last < first


@given(st.floats() | st.none())
def test_every_float_is_formatted(value: float | None) -> None:
    """Any float gives a short text with a true minus sign."""
    text = formatting.format_number(value)
    assert text
    assert len(text) <= 12
    assert "-" not in text


def test_number_formats() -> None:
    """Four significant digits, whole numbers without a point, and names for NaN and the infinities."""
    assert [
        formatting.format_number(value) for value in (0.123456, 5.0, -2.5, 1234567.0, math.nan, math.inf, -math.inf)
    ] == [
        "0.1235",
        "5",
        "−2.5",
        "1.235e+06",
        "NaN",
        "∞",
        "−∞",
    ]
    assert formatting.format_step(1234567) == "1,234,567"


def test_random_draw_is_shown_in_percent() -> None:
    """Of a stop that is held out, or that the rollout stage leaves out, the page shows the draw and its limit."""
    changes = [
        DecisionChange(0, DecisionState.HELD_OUT, "evalstop", "", details, datetime(2026, 3, 1, tzinfo=UTC))
        for details in ({"held_out_share": 0.2, "drawn": 0.0734}, {"enforced_share": 0.0, "drawn": 0.5}, {})
    ]
    assert [formatting.list_change_details(change) for change in changes] == [
        {"share held out": "20.0 %", "drawn": "7.3 %"},
        {"share carried out": "0.0 %", "drawn": "50.0 %"},
        {},
    ]


HACKING = load_recorded_evals("np-0044")


def hacking_observations(evals: int, gold: float = 1.0) -> list[Observation]:
    """The first evals of a recorded run as detectors see them, with gold multiplied by `gold`."""
    return [
        observation
        for item in HACKING[:evals]
        for observation in (
            Observation(MetricRole.KL, item.step, item.kl),
            Observation(MetricRole.EVAL, item.step, gold * item.gold, abs(gold) * item.gold_stderr),
        )
    ]


def test_evidence_equals_that_of_the_monitor() -> None:
    """Each track ends with the evidence of a replay, and reaches its threshold where the replay stops."""
    policy = policy_from_document(LEVEL_POLICY)
    observed = hacking_observations(29)
    tracks = analysis.replay_evidence(policy, observed)
    verdict = replay(policy, observed)
    assert [track.values[-1] for track in tracks] == [item.value for item in verdict.evidence if item is not None]
    track = tracks[0]
    assert (track.member, track.stop_at) == ("k_decline", 4)
    assert track.call_step == track.steps[track.values.index(4)] == 270


@SQLITE_ONLY
def test_analysis_has_the_evidence_of_each_detector(visitor: httpx.Client, tenant: Tenant) -> None:
    """A run has a lane for each detector, recomputed from its observations."""
    run = tenant.open_run("ppo")
    tenant.post_evals(run, HACKING[:29])
    evidence = visitor.get(f"/runs/{run.id}/analysis.json").json()
    assert evidence["replayed"]
    assert [track["member"] for track in evidence["tracks"]] == ["k_decline"]


@SQLITE_ONLY
def test_segments_of_the_eval_are_shown(visitor: httpx.Client, tenant: Tenant) -> None:
    """A run that over-optimizes rises and ends with a fall; without evals there is none."""
    run, bare = tenant.open_run("ppo"), tenant.open_run("bare")
    tenant.post_evals(run, HACKING)
    answer = visitor.get(f"/runs/{run.id}/segments.json").json()
    assert answer["available"]
    assert [answer["items"][place]["kind"] for place in (0, -1)] == ["rise", "fall"]
    assert visitor.get(f"/runs/{bare.id}/segments.json").json()["items"] == []


@SQLITE_ONLY
def test_run_that_cannot_be_replayed_has_no_lanes(visitor: httpx.Client, database: Database, tenant: Tenant) -> None:
    """A run with too many observations is not replayed, nor one on which a detector failed: it would fail again."""
    long, failing = tenant.open_run("long"), tenant.open_run("failing")
    for run in (long, failing):
        tenant.post_evals(run, HACKING[:29])
    for first in range(1000, 1000 + analysis.MOST_REPLAYED, 5_000):
        points = tuple(PostedObservation("policy/kl", step, 1.0) for step in range(first, first + 5_000))
        tenant.post_observations(long, points)
    with database.transaction() as tx:
        tx.execute(tables.runs.update().where(tables.runs.c.id == failing.id).values(detector_failure="it failed"))
    for run in (long, failing):
        assert visitor.get(f"/runs/{run.id}/analysis.json").json() == {"replayed": False, "tracks": []}


@SQLITE_ONLY
def test_run_without_observations_has_no_lanes(visitor: httpx.Client, tenant: Tenant) -> None:
    """Without observations the analysis has no tracks."""
    run = tenant.open_run("bare")
    chart = visitor.get(f"/runs/{run.id}/analysis.json").json()
    assert chart["tracks"] == []
