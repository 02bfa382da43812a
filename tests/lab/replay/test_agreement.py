"""Replaying a file gives the verdicts of the monitor, for any order of rows and any number of processes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from evalstop_detectors import POLICIES, MetricRole, Policy, SmoothedMaximum, start, step
from evalstop_lab.replay import Roles, Run, judge_runs
from evalstop_lab.worlds import World, draw_world, plan_worlds
from hypothesis import given

from tests.detectors.strategies import policies, series
from tests.lab.replay.conftest import Replay, property_settings, write_jsonl


def compute_expected_verdict(policy: Policy, world: World) -> dict[str, Any]:
    """The verdict of evalstop_detectors on the world's observations, up to the first stop.

    The policy `reversible` continues after a stop, because a parked run may return; a replay reports the first stop.
    """
    state = start(policy)
    for item in world.observations():
        state, verdict = step(policy, state, item)
        if verdict.stops:
            break
    stop_step = state.verdict.step if state.verdict.stops else None
    return {
        "run": world.name,
        "verdict": state.verdict.verdict,
        "stop_step": stop_step,
        "suspect_step": state.suspect_step,
        "reason": state.verdict.reason,
    }


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_replay_equals_the_monitor(tmp_path: Path, replay: Replay, name: str) -> None:
    """Drawn runs in a file with shuffled rows get the verdicts of the monitor at its first stop."""
    worlds = [draw_world(*recipe, length=60) for recipe in plan_worlds(30, 7)]
    rows = [row for world in worlds for row in world.rows()]
    random.Random(1).shuffle(rows)
    log = write_jsonl(tmp_path / "worlds.jsonl", rows)
    results = {item["run"]: item for item in replay(log, "--policy", name)}
    for world in worlds:
        result = results[world.name]
        assert {
            key: result[key] for key in compute_expected_verdict(POLICIES[name], world)
        } == compute_expected_verdict(POLICIES[name], world)
    assert {item["run"]: item for item in replay(log, "--policy", name, "--jobs", 2)} == results


@pytest.mark.slow
@property_settings
@given(policy=policies(), observations=series(set(MetricRole), max_size=25))
def test_judge_runs_equals_the_monitor(policy: Policy, observations: list[Any]) -> None:
    """For any policy and observations, verdict, evidence and best step are those of the monitor at its stop."""
    run = Run("a", roles=Roles(minimized=frozenset()))
    for item in observations:
        run.add(item.role, item.step, item.value, item.stderr)
    observed = run.observations()
    assert [(item.order, repr(item.value), item.stderr) for item in observed] == [
        (item.order, repr(item.value), item.stderr) for item in observations
    ]
    state = start(policy)
    for item in observed:
        state, verdict = step(policy, state, item)
        if verdict.stops:
            break
    result = judge_runs(policy, [run])[0]
    assert (result.verdict, result.reason, result.suspect_step) == (
        state.verdict.verdict,
        state.verdict.reason,
        state.suspect_step,
    )
    assert [item["value"] for item in result.detectors.values()] == [e.value for e in state.evidence if e is not None]
    stop = result.stop_step
    scores = [score for score in run.scores() if stop is None or score.step <= stop]
    best = SmoothedMaximum().choose(scores, {score.step for score in scores})
    assert result.best_step == (best.step if best else None)
    json.dumps(result.detectors, allow_nan=False)


def test_minimized_metrics_change_their_sign_except_the_kl() -> None:
    """Detectors get metrics of which higher is better; a KL is a distance and keeps its sign."""
    run = Run("a", roles=Roles(minimized=frozenset({"kl", "loss", "proxy"})))
    for role in MetricRole:
        run.add(role, 1, 2.0, 0.5)
    assert [(item.role, item.value) for item in run.observations()] == [
        ("kl", 2.0),
        ("loss", -2.0),
        ("proxy", -2.0),
        ("eval", 2.0),
        ("paired", 2.0),
    ]
