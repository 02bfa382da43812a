"""What the charts of a run's page show beside its numbers."""

from __future__ import annotations

import math
from datetime import datetime

import httpx
from evalstop_detectors import POLICIES, MetricRole, Observation, policy_from_document, replay
from evalstop_detectors.detectors.posterior import Posterior
from evalstop_service.ingest import Observations
from evalstop_service.store import tables
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.web.dashboard import analysis, evidence
from evalstop_service.web.dashboard.gao_chart import build_chart
from hypothesis import given
from hypothesis import strategies as st

from tests.service.project_fixture import submit_message
from tests.service.web.dashboard.recorded_runs import LEVEL, Tenant, open_run, recorded, report
from tests.service.web.dashboard.serving import EMBEDDED

HACKING = recorded("np-0044")


def told(evals: int, gold: float = 1.0) -> list[Observation]:
    """A recorded run as its detectors see it, with gold times `gold`."""
    return [
        observation
        for item in HACKING[:evals]
        for observation in (
            Observation(MetricRole.KL, item.step, item.kl),
            Observation(MetricRole.EVAL, item.step, gold * item.gold, abs(gold) * item.gold_stderr),
        )
    ]


def test_the_line_goes_through_the_evals() -> None:
    """It lies within its band among the evals, and its peak is near where this run turned."""
    drawn = build_chart(told(29))
    line = drawn.line
    assert line is not None
    assert line.peak is not None
    offs = []
    for pair in drawn.pairs:
        place = min(range(len(line.distances)), key=lambda i: abs(line.distances[i] - pair.distance))
        assert line.low[place] < line.eval_scores[place] < line.high[place]
        offs.append(pair.eval_score - line.eval_scores[place])
    assert abs(sum(offs) / len(offs)) < 0.05
    highest = max(drawn.pairs, key=lambda pair: pair.eval_score)
    assert abs(line.peak[0] - highest.distance) < 3 * line.peak[1] + 0.5


def test_no_line_before_there_is_enough() -> None:
    """A few evals are shown as points, with what is waited for."""
    drawn = build_chart(told(5))
    assert drawn.line is None
    assert len(drawn.pairs) == 5
    assert "5 more evals" in drawn.note


def test_a_line_that_is_not_used_says_so() -> None:
    """Where the eval moves while the KL stands still, no form is used, and the line is marked."""
    good = build_chart(told(29)).line
    assert good is not None
    assert good.trusted
    still = [
        observation
        for step in range(60)
        for observation in (
            Observation(MetricRole.KL, step, min(step, 12.0)),
            Observation(MetricRole.EVAL, step, step * 0.1 + 0.02 * (step % 3), 0.02),
        )
    ]
    drawn = build_chart(still)
    assert drawn.line is not None
    assert not drawn.line.trusted
    assert "not used" in drawn.note


@given(st.lists(st.tuples(st.sampled_from([MetricRole.KL, MetricRole.EVAL]), st.floats()), max_size=60))
def test_no_series_breaks_the_build_chart(values: list[tuple[MetricRole, float]]) -> None:
    """NaN, infinities, negative KLs, numbers at the ends of a double: what is drawn is finite, or is not drawn."""
    found = build_chart([Observation(role, step, value, 0.1) for step, (role, value) in enumerate(values)])
    assert all(math.isfinite(pair.distance) and math.isfinite(pair.eval_score) for pair in found.pairs)
    if found.line is not None:
        assert all(map(math.isfinite, (*found.line.eval_scores, *found.line.low, *found.line.high)))


def test_evidence_is_what_the_monitor_saw() -> None:
    """The last of each track is the evidence that the monitor ends with, and the stop is where its threshold is met."""
    policy = policy_from_document(LEVEL)
    seen = told(29)
    tracks = evidence.replay_evidence(policy, seen)
    ends = replay(policy, seen)
    assert [track.points[-1].value for track in tracks] == [item.value for item in ends.evidence if item is not None]
    track = tracks[0]
    assert (track.member, track.stop_at) == ("k_below_best", 5)
    assert next(point.step for point in track.points if point.value >= 5) == 280


def test_what_a_run_has_covered_is_what_its_detector_expects() -> None:
    """At each eval from the third on: the quantiles of what is still to be gained; it grows."""
    policy, seen = POLICIES["default"], told(45)
    track, *others = evidence.replay_evidence(policy, seen)
    assert not any(other.covered for other in others)
    assert [share.step for share in track.covered] == [item.step for item in HACKING[2:45]]
    for evals in (10, 29, 45):
        state = replay(policy, told(evals)).states[0]
        low, _, high = Posterior().outlook(state).to_gain
        share = track.covered[evals - 3]
        assert (share.high, share.low) == (1 / (1 + low), 1 / (1 + high))
        assert 0 < share.low <= share.middle <= share.high <= 1
    assert track.covered[7].low < 0.5 < 0.95 < track.covered[-1].low


@EMBEDDED
def test_a_healthy_run_has_covered_some_of_its_range(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Its outlook is drawn although the probability of having turned is too low to be said."""
    run = open_run(database, tenant, now, "rising", policy="default", total_steps=600)
    report(database, tenant, run.id, HACKING[:20], now)
    (track,) = visitor.get(f"/runs/{run.id}/analysis.json").json()["evidence"]["tracks"]
    assert set(track["values"]) == {0}
    assert len(track["covered"]["steps"]) == len(track["covered"]["low"]) == 18


@EMBEDDED
def test_a_run_is_analysed(visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime) -> None:
    """A run with gold and KL has both pictures; minimized gold is drawn in its own direction."""
    run = open_run(database, tenant, now, "ppo")
    report(database, tenant, run.id, HACKING[:29], now)
    found = visitor.get(f"/runs/{run.id}/analysis.json").json()
    assert found["evidence"]["note"] == analysis.REPLAYED
    assert [track["member"] for track in found["evidence"]["tracks"]] == ["k_below_best"]
    assert found["gao"]["eval_scores"] == [item.gold for item in HACKING[:29]]
    line = found["gao"]["line"]
    assert all(
        low <= score <= high for low, score, high in zip(line["low"], line["eval_scores"], line["high"], strict=True)
    )


@EMBEDDED
def test_a_run_too_long_to_be_replayed(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Its evidence is drawn as its verdicts kept it, and the answer says so."""
    run = open_run(database, tenant, now, "long")
    report(database, tenant, run.id, HACKING[:29], now)
    points = tuple(PostedObservation("policy/kl", 1000 + step, 1.0) for step in range(analysis.MOST_REPLAYED))
    submit_message(database, tenant.project.id, run.id, Observations(points), now)
    found = visitor.get(f"/runs/{run.id}/analysis.json").json()["evidence"]
    assert found["note"] == analysis.TOO_LONG
    track = found["tracks"][0]
    assert (track["steps"][:2], track["values"][:2]) == ([270, 280], [4, 5])


@EMBEDDED
def test_a_policy_of_a_later_release(visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime) -> None:
    """After a way back to this release its evidence is drawn as its verdicts kept it, and gold as ever."""
    run = open_run(database, tenant, now, "ppo")
    report(database, tenant, run.id, HACKING[:29], now)
    with database.transaction() as tx:
        later = {"name": "level", "members": [{"detector": "oracle", "params": {}}]}
        tx.execute(tables.policies.update().where(tables.policies.c.id == run.policy_id).values(document=later))
    assert visitor.get(f"/runs/{run.id}").status_code == 200
    found = visitor.get(f"/runs/{run.id}/analysis.json").json()
    assert found["evidence"]["note"] == analysis.UNREADABLE
    assert [track["member"] for track in found["evidence"]["tracks"]] == ["k_below_best"]
    assert found["gao"]["line"] is not None


@EMBEDDED
def test_a_run_without_kl_has_no_distance(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """A run without numbers, or without KL, is told as such."""
    run = open_run(database, tenant, now, "bare")
    found = visitor.get(f"/runs/{run.id}/analysis.json").json()
    assert (found["evidence"]["tracks"], found["gao"]["steps"]) == ([], [])
