"""The analysis behind a run's chart: the evidence of its detectors."""

from __future__ import annotations

import httpx
from evalstop_detectors import MetricRole, Observation, policy_from_document, replay
from evalstop_service.store import tables
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.web.pages.run_page import analysis

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
