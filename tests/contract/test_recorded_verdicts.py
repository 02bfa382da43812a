"""Verdicts, best checkpoints and noise of recorded runs, pinned to the last bit: a change of one number fails here.

`python -m tests.contract.test_recorded_verdicts` writes the file anew, for changes that are meant to move verdicts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from evalstop_detectors import (
    DETECTORS,
    POLICIES,
    MetricRole,
    Observation,
    Policy,
    Score,
    SmoothedMaximum,
    policy_from_document,
    start,
    step,
)
from evalstop_detectors.checkpoint import noise

DATA = Path(__file__).parent.parent / "data"
PINNED = DATA / "recorded_verdicts.json"

ALONE = sorted(DETECTORS.keys() - {"river_drift"})
"""Detectors judged by a policy of their own; river's arithmetic is not ours to pin."""


def judges() -> Iterator[tuple[str, Policy]]:
    """Every shipped policy, and every detector by itself."""
    yield from sorted(POLICIES.items())
    for name in ALONE:
        yield f"detector:{name}", policy_from_document({"name": "alone", "members": [{"detector": name}]})


def recorded() -> list[tuple[str, list[Observation]]]:
    """The recorded runs, each as its trainer would have posted it."""
    runs = []
    for line in (DATA / "rlhf_runs_public.jsonl").read_text().splitlines():
        record = json.loads(line)
        log, seen = record["log"], []
        for place, at in enumerate(log["step"]):
            seen.append(Observation(MetricRole.PROXY, at, log["proxy"][place], log["proxy_se"][place]))
            seen.append(Observation(MetricRole.KL, at, log["kl"][place]))
            seen.append(Observation(MetricRole.EVAL, at, log["gold"][place], log["gold_se"][place]))
        runs.append((str(record["run_id"]), sorted(seen, key=lambda item: item.order)))
    return runs


def verdicts(policy: Policy, observations: list[Observation]) -> dict[str, Any]:
    """What became of one run: where it was suspected and stopped, and a hash of every number on the way."""
    state, numbers = start(policy), hashlib.sha256()
    for observation in observations:
        state, verdict = step(policy, state, observation)
        for item in state.evidence:
            if item is not None:
                numbers.update(f"{item.value.hex()} {item.turn_step};".encode())
        numbers.update(f"{verdict.verdict} {verdict.step} {verdict.turn_step}\n".encode())
    stop_step = state.verdict.step if state.verdict.stops else None
    return {"suspect": state.suspect_step, "stop": stop_step, "numbers": numbers.hexdigest()[:16]}


def best_checkpoint(observations: list[Observation]) -> dict[str, Any]:
    """The checkpoint chosen at the end of one run, and a hash of the choices after every eval on the way.

    Every eval has a checkpoint at the end; on the way only every second one has.
    """
    scores = [Score(o.step, o.value, o.stderr) for o in observations if o.role is MetricRole.EVAL]
    best = SmoothedMaximum().choose(scores, {score.step for score in scores})
    assert best is not None
    assert best.smoothed is not None
    assert best.smoothed_stderr is not None
    follower, choices = SmoothedMaximum().begin(), hashlib.sha256()
    for place, score in enumerate(scores):
        if place % 2 == 0:
            follower.saved(score.step)
        follower.add(score)
        choice = follower.best()
        if choice is not None:
            choices.update(f"{choice.step} {choice.score.hex()} {choice.smoothed} {choice.smoothed_stderr};".encode())
    return {
        "step": best.step,
        "score": best.score.hex(),
        "smoothed": best.smoothed.hex(),
        "stderr": best.smoothed_stderr.hex(),
        "choices": choices.hexdigest()[:16],
    }


def noise_estimates(observations: list[Observation]) -> dict[str, str]:
    """The noise of eval and proxy at the end of one run, and a hash of the estimates after every value on the way."""
    described = {}
    for role in (MetricRole.EVAL, MetricRole.PROXY):
        state, numbers, found = noise.NoiseState(), hashlib.sha256(), noise.Noise(0.0, 1.0)
        for item in observations:
            if item.role is role:
                state = noise.advance(state, item.value, item.stderr)
                found = noise.estimate(state)
                numbers.update(f"{found.sd.hex()} {found.inflation.hex()};".encode())
        described[str(role)] = f"{found.sd.hex()} {found.inflation.hex()} {numbers.hexdigest()[:16]}"
    return described


MEASURES = {"best_checkpoint": best_checkpoint, "noise": noise_estimates}


@pytest.mark.parametrize("name", sorted(MEASURES))
def test_measured_as_recorded(name: str) -> None:
    """Each recorded run gets the best checkpoint and the noise that it got when they were recorded."""
    pinned = json.loads(PINNED.read_text())[name]
    found = {run: MEASURES[name](observations) for run, observations in recorded()}
    assert {run: found[run] for run in found if found[run] != pinned[run]} == {}
    assert found.keys() == pinned.keys()


@pytest.mark.parametrize(("name", "policy"), [pytest.param(*judge, id=judge[0]) for judge in judges()])
def test_as_recorded(name: str, policy: Policy) -> None:
    """Each recorded run gets the verdicts, steps and numbers that it got when they were recorded."""
    pinned = json.loads(PINNED.read_text())[name]
    found = {run: verdicts(policy, observations) for run, observations in recorded()}
    assert {run: found[run] for run in found if found[run] != pinned[run]} == {}
    assert found.keys() == pinned.keys()


def record() -> None:
    """Write down what becomes of every recorded run today."""
    runs = recorded()
    found = {name: {run: verdicts(policy, seen) for run, seen in runs} for name, policy in judges()}
    found |= {name: {run: measure(seen) for run, seen in runs} for name, measure in MEASURES.items()}
    lines = ",\n".join(
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(run)}: {json.dumps(what)}" for run, what in by_run.items())
        + "\n}"
        for name, by_run in found.items()
    )
    PINNED.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    record()
