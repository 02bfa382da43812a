"""The analysis behind a run's charts: detector evidence, and the curve of eval over KL."""

from __future__ import annotations

import math

import httpx
from evalstop_detectors import POLICIES, MetricRole, Observation, policy_from_document, replay
from evalstop_detectors.detectors.posterior import Posterior
from evalstop_service.store import tables
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.web.pages.run_page import analysis
from evalstop_service.web.pages.run_page.analysis import build_chart
from hypothesis import given
from hypothesis import strategies as st

from tests.service.web.pages.recorded_runs import LEVEL_POLICY, Tenant, load_recorded_evals
from tests.service.web.pages.serving import SQLITE_ONLY

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


def test_fitted_curve_lies_near_the_evals() -> None:
    """The evals lie around the curve within its band, and its peak is near where the run turned."""
    chart = build_chart(hacking_observations(29))
    line = chart.line
    assert line is not None
    assert line.peak is not None
    residuals = []
    for pair in chart.pairs:
        place = min(range(len(line.distances)), key=lambda i: abs(line.distances[i] - pair.distance))
        assert line.low[place] < line.eval_scores[place] < line.high[place]
        residuals.append(pair.eval_score - line.eval_scores[place])
    assert abs(sum(residuals) / len(residuals)) < 0.05
    highest = max(chart.pairs, key=lambda pair: pair.eval_score)
    assert abs(line.peak[0] - highest.distance) < 3 * line.peak[1] + 0.5


def test_too_few_evals_give_no_curve() -> None:
    """With few evals the chart shows points, no curve, and how many more evals are needed."""
    chart = build_chart(hacking_observations(5))
    assert chart.line is None
    assert len(chart.pairs) == 5
    assert "5 more evals" in chart.note


def test_untrusted_curve_is_marked() -> None:
    """When the eval rises while the KL stands still, the fit is not trusted, and the note says so."""
    trusted_line = build_chart(hacking_observations(29)).line
    assert trusted_line is not None
    assert trusted_line.trusted
    constant_kl = [
        observation
        for step in range(60)
        for observation in (
            Observation(MetricRole.KL, step, min(step, 12.0)),
            Observation(MetricRole.EVAL, step, step * 0.1 + 0.02 * (step % 3), 0.02),
        )
    ]
    chart = build_chart(constant_kl)
    assert chart.line is not None
    assert not chart.line.trusted
    assert "not used" in chart.note


def test_kl_stands_still_is_said_only_when_it_does() -> None:
    """Of a KL that stopped the note says that it stands still, not of one that rises as ever in a long run."""
    notes = []
    for stops_at in (380, 400):
        observed = [
            observation
            for step in range(400)
            for distance in (min(step, stops_at) ** 0.5,)
            for observation in (
                Observation(MetricRole.KL, step, distance**2),
                Observation(MetricRole.EVAL, step, distance + 0.2 * max(step - 380, 0) + 0.02 * (step % 3), 0.02),
            )
        ]
        notes.append(build_chart(observed).note)
    assert ["stands still" in note for note in notes] == [True, False], notes


@given(st.lists(st.tuples(st.sampled_from([MetricRole.KL, MetricRole.EVAL]), st.floats()), max_size=60))
def test_chart_contains_only_finite_numbers(values: list[tuple[MetricRole, float]]) -> None:
    """NaN, infinities, negative KL and the largest doubles: whatever is drawn is finite."""
    chart = build_chart([Observation(role, step, value, 0.1) for step, (role, value) in enumerate(values)])
    assert all(math.isfinite(pair.distance) and math.isfinite(pair.eval_score) for pair in chart.pairs)
    if chart.line is not None:
        assert all(map(math.isfinite, (*chart.line.eval_scores, *chart.line.low, *chart.line.high)))


def test_evidence_equals_that_of_the_monitor() -> None:
    """Each track ends with the evidence of a replay, and reaches its threshold where the replay stops."""
    policy = policy_from_document(LEVEL_POLICY)
    observed = hacking_observations(29)
    tracks = analysis.replay_evidence(policy, observed)
    verdict = replay(policy, observed)
    assert [track.values[-1] for track in tracks] == [item.value for item in verdict.evidence if item is not None]
    track = tracks[0]
    assert (track.member, track.stop_at) == ("k_below_best", 5)
    assert track.call_step == track.steps[track.values.index(5)] == 280


def test_share_covered_equals_the_detectors_outlook() -> None:
    """From the third eval on, the share of its final gain that a run has covered follows from the posterior's
    outlook, and grows."""
    policy, observed = POLICIES["default"], hacking_observations(45)
    detector = policy.members[0].detector
    assert isinstance(detector, Posterior)
    track, *others = analysis.replay_evidence(policy, observed)
    assert not any(other.covered.steps for other in others)
    assert track.covered.steps == [item.step for item in HACKING[2:45]]
    for evals in (10, 29, 45):
        state = replay(policy, hacking_observations(evals)).states[0]
        low, _, high = detector.outlook(state).to_gain
        covered = [quantile[evals - 3] for quantile in (track.covered.low, track.covered.values, track.covered.high)]
        assert (covered[2], covered[0]) == (1 / (1 + low), 1 / (1 + high))
        assert 0 < covered[0] <= covered[1] <= covered[2] <= 1
    assert track.covered.low[7] < 0.5 < 0.95 < track.covered.low[-1]


@SQLITE_ONLY
def test_share_covered_is_drawn_for_a_healthy_run(visitor: httpx.Client, tenant: Tenant) -> None:
    """The share covered is drawn although the probability of a turn stays below a half."""
    run = tenant.open_run("rising", policy="default", total_steps=600)
    tenant.post_evals(run, HACKING[:20])
    track = visitor.get(f"/runs/{run.id}/analysis.json").json()["evidence"]["tracks"][0]
    assert max(track["values"]) < 0.5
    assert len(track["covered"]["steps"]) == len(track["covered"]["low"]) == 18


@SQLITE_ONLY
def test_analysis_has_evidence_and_curve(visitor: httpx.Client, tenant: Tenant) -> None:
    """A run with gold and KL gets both charts, with the eval scores as they were posted."""
    run = tenant.open_run("ppo")
    tenant.post_evals(run, HACKING[:29])
    chart = visitor.get(f"/runs/{run.id}/analysis.json").json()
    assert chart["evidence"]["note"] == analysis.REPLAYED
    assert [track["member"] for track in chart["evidence"]["tracks"]] == ["k_below_best"]
    assert [pair["eval_score"] for pair in chart["gao"]["pairs"]] == [item.gold for item in HACKING[:29]]
    line = chart["gao"]["line"]
    assert all(
        low <= score <= high for low, score, high in zip(line["low"], line["eval_scores"], line["high"], strict=True)
    )


@SQLITE_ONLY
def test_segments_are_those_of_the_api(visitor: httpx.Client, tenant: Tenant) -> None:
    """A run that over-optimizes rises and ends with a fall, in the API as on the page; without evals there is none."""
    run, bare = tenant.open_run("ppo"), tenant.open_run("bare")
    tenant.post_evals(run, HACKING)
    answer = visitor.get(f"/runs/{run.id}/segments.json").json()
    assert answer["available"]
    assert [answer["items"][place]["kind"] for place in (0, -1)] == ["rise", "fall"]
    headers = {"Authorization": f"Bearer {tenant.secret}"}
    assert visitor.get(f"/api/v1/runs/{run.id}/segments", headers=headers).json() == answer
    assert visitor.get(f"/runs/{bare.id}/segments.json").json()["items"] == []


@SQLITE_ONLY
def test_long_run_shows_stored_evidence(visitor: httpx.Client, tenant: Tenant) -> None:
    """A run too long to replay shows the evidence stored with its verdicts, and the answer says so."""
    run = tenant.open_run("long")
    tenant.post_evals(run, HACKING[:29])
    points = tuple(PostedObservation("policy/kl", 1000 + step, 1.0) for step in range(analysis.MOST_REPLAYED))
    tenant.post_observations(run, points)
    chart = visitor.get(f"/runs/{run.id}/analysis.json").json()["evidence"]
    assert chart["note"] == analysis.TOO_LONG
    track = chart["tracks"][0]
    assert (track["steps"][:2], track["values"][:2]) == ([270, 280], [4, 5])


@SQLITE_ONLY
def test_unknown_detector_shows_stored_evidence(visitor: httpx.Client, database: Database, tenant: Tenant) -> None:
    """A policy of a later release cannot be replayed: evidence comes from the stored verdicts, the curve as usual."""
    run = tenant.open_run("ppo")
    tenant.post_evals(run, HACKING[:29])
    with database.transaction() as tx:
        later = {"name": "level", "members": [{"detector": "oracle", "params": {}}]}
        tx.execute(tables.policies.update().where(tables.policies.c.id == run.policy_id).values(document=later))
    assert visitor.get(f"/runs/{run.id}").status_code == 200
    chart = visitor.get(f"/runs/{run.id}/analysis.json").json()
    assert chart["evidence"]["note"] == analysis.UNREADABLE
    assert [track["member"] for track in chart["evidence"]["tracks"]] == ["k_below_best"]
    assert chart["gao"]["line"] is not None


@SQLITE_ONLY
def test_run_that_is_not_judged_shows_stored_evidence(
    visitor: httpx.Client, database: Database, tenant: Tenant
) -> None:
    """A run on which a detector failed is not replayed, since it would fail again."""
    run = tenant.open_run("failing")
    tenant.post_evals(run, HACKING[:29])
    with database.transaction() as tx:
        tx.execute(tables.runs.update().where(tables.runs.c.id == run.id).values(detector_failure="it failed"))
    chart = visitor.get(f"/runs/{run.id}/analysis.json").json()["evidence"]
    assert chart["note"] == analysis.FAILED
    assert chart["tracks"][0]["values"][:2] == [4, 5]


@SQLITE_ONLY
def test_run_without_observations_has_no_charts(visitor: httpx.Client, tenant: Tenant) -> None:
    """Without observations the analysis has neither tracks nor points."""
    run = tenant.open_run("bare")
    chart = visitor.get(f"/runs/{run.id}/analysis.json").json()
    assert (chart["evidence"]["tracks"], chart["gao"]["pairs"]) == ([], [])
