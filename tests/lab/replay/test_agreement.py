"""Replaying a file gives the verdicts of the monitor, for any order of rows and any number of processes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from evalstop_detectors import POLICIES, MetricRole, Policy, Score, Scores, choose_best, start, step
from evalstop_lab.replay.runs import Roles, Run
from evalstop_lab.worlds.world import World, draw_world, plan_worlds

from tests.lab.replay.conftest import Replay, list_rows, write_jsonl

IN_MAKE_TEST = ("default", "paper", "reversible")


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
        "best_step": choose_best_step(world, stop_step),
        "evidence": [item.value for item in state.verdict.evidence],
    }


def choose_best_step(world: World, stop_step: int | None) -> int | None:
    """The step of the best eval up to the stop."""
    scores = [
        Score(item.step, item.value, item.stderr)
        for item in world.observations()
        if item.role is MetricRole.EVAL and (stop_step is None or item.step <= stop_step)
    ]
    best = choose_best(Scores().add_scores(scores).add_checkpoints(dict.fromkeys((score.step for score in scores), "")))
    return None if best is None else best.step


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_MAKE_TEST else pytest.mark.nightly) for name in sorted(POLICIES)],
)
def test_replay_equals_the_monitor(tmp_path: Path, replay: Replay, name: str) -> None:
    """Drawn runs in a file with shuffled rows get verdict, evidence and best step of the monitor at its first stop."""
    worlds = [draw_world(*recipe, length=60) for recipe in plan_worlds(15, 7)]
    rows = [row for world in worlds for row in list_rows(world)]
    random.Random(1).shuffle(rows)
    log = write_jsonl(tmp_path / "worlds.jsonl", rows)
    results = {item["run"]: item for item in replay(log, "--policy", name)}
    for world in worlds:
        result, expected = results[world.name], compute_expected_verdict(POLICIES[name], world)
        result = result | {"evidence": [item["value"] for item in result["evidence"]]}
        assert {key: result[key] for key in expected} == expected
    assert {item["run"]: item for item in replay(log, "--policy", name, "--jobs", 2)} == results


def test_minimized_metrics_change_their_sign_except_the_kl() -> None:
    """Detectors get metrics of which higher is better; a KL is a distance and keeps its sign, as others that are no
    qualities."""
    run = Run("a", roles=Roles(minimized=frozenset({"kl", "loss", "proxy"})))
    for role in MetricRole:
        run.add(role, 1, 2.0, 0.5)
    assert [(item.role, item.value) for item in run.observations()] == [
        ("learning_rate", 2.0),
        ("entropy", 2.0),
        ("length", 2.0),
        ("truncated", 2.0),
        ("gradient_norm", 2.0),
        ("kl", 2.0),
        ("loss", -2.0),
        ("proxy", -2.0),
        ("eval", 2.0),
        ("paired", 2.0),
    ]
