"""Replay of a file comes to the verdicts of the monitor itself, whatever the order of its rows and the processes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from evalstop_detectors import POLICIES, MetricRole, Policy, SmoothedMaximum, start, step
from evalstop_lab.replay import Roles, Run, judge_runs
from evalstop_lab.worlds import World, draw_worlds
from hypothesis import given

from tests.detectors.strategies import policies, series
from tests.lab.replay.conftest import Replay, patiently, write_jsonl


def expected(policy: Policy, world: World) -> dict[str, Any]:
    """The verdict of evalstop_detectors over the world's own observations, up to the first stop.

    `reversible` judges on after a stop, as a parked run may return; a replay tells of the first one.
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
def test_replay_is_the_monitor(tmp_path: Path, replay: Replay, name: str) -> None:
    """Drawn runs, written to a file in any order, get the verdicts of stepping to the first stop."""
    worlds = draw_worlds(30, 7, length=60)
    rows = [row for world in worlds for row in world.rows()]
    random.Random(1).shuffle(rows)
    log = write_jsonl(tmp_path / "worlds.jsonl", rows)
    results = {item["run"]: item for item in replay(log, "--policy", name)}
    for world in worlds:
        result = results[world.name]
        assert {key: result[key] for key in expected(POLICIES[name], world)} == expected(POLICIES[name], world)
    assert {item["run"]: item for item in replay(log, "--policy", name, "--jobs", 2)} == results


@patiently
@given(policy=policies(), observations=series(set(MetricRole), max_size=25))
def test_a_run_is_judged_as_the_monitor_judges(policy: Policy, observations: list[Any]) -> None:
    """Any policy on any observations: verdict, evidence and best step are those of the monitor at its stop."""
    run = Run("a", roles=Roles(minimized=frozenset()))
    for item in observations:
        run.add(item.role, item.step, item.value, item.stderr)
    shown = run.observations()
    assert [(item.order, repr(item.value), item.stderr) for item in shown] == [
        (item.order, repr(item.value), item.stderr) for item in observations
    ]
    state = start(policy)
    for item in shown:
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


def test_a_loss_is_turned_and_a_kl_is_not() -> None:
    """Detectors see that higher is better, but a distance stays a distance, even where it is to be minimized."""
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
