"""Verdicts, best checkpoints and noise of recorded runs, compared bit by bit with stored results.

`python -m tests.contract.test_recorded_verdicts` rewrites the stored results after an intended change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cache
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
    Scores,
    choose_best,
    policy_from_document,
    start,
    step,
)
from evalstop_detectors.checkpoint import noise

from tests.fixtures.recorded_runs import build_observations, load_run_records

pytestmark = pytest.mark.slow

RESULTS_FILE = Path(__file__).parent.parent / "data" / "recorded_verdicts.json"

SINGLE_DETECTORS = sorted(DETECTORS.keys() - {"river_drift"})
"""Detectors tested in a policy of their own; river_drift is left out, because its arithmetic is River's."""


def list_policies() -> Iterator[tuple[str, Policy]]:
    """Every shipped policy, and a policy for every single detector."""
    yield from sorted(POLICIES.items())
    for name in SINGLE_DETECTORS:
        yield f"detector:{name}", policy_from_document({"name": "single", "members": [{"detector": name}]})


@cache
def load_recorded_runs() -> list[tuple[str, list[Observation]]]:
    """The recorded runs as (id, observations in step order)."""
    return [(str(record["run_id"]), build_observations(record["log"])) for record in load_run_records()]


def compute_verdicts(policy: Policy, observations: list[Observation]) -> dict[str, Any]:
    """The suspect and stop steps of a run, and a hash of all evidence and verdicts up to then."""
    state, numbers = start(policy), hashlib.sha256()
    for observation in observations:
        state, verdict = step(policy, state, observation)
        for item in state.evidence[: len(policy.members)]:
            if item is not None:
                numbers.update(f"{item.value.hex()} {item.turn_step};".encode())
        numbers.update(f"{verdict.verdict} {verdict.step} {verdict.turn_step}\n".encode())
    stop_step = state.verdict.step if state.verdict.stops else None
    return {"suspect": state.suspect_step, "stop": stop_step, "numbers": numbers.hexdigest()[:16]}


def compute_best_checkpoint(observations: list[Observation]) -> dict[str, Any]:
    """The best checkpoint at the end of a run, and a hash of the choices after each eval.

    At the end every eval has a checkpoint; before, only every second one has.
    """
    scores = [Score(o.step, o.value, o.stderr) for o in observations if o.role is MetricRole.EVAL]
    best = choose_best(Scores().add_scores(scores).add_checkpoints(dict.fromkeys((score.step for score in scores), "")))
    assert best is not None
    assert best.smoothed is not None
    assert best.smoothed_stderr is not None
    seen, choices = Scores(), hashlib.sha256()
    for index, score in enumerate(scores):
        if index % 2 == 0:
            seen = seen.add_checkpoints({score.step: ""})
        seen = seen.add_scores([score])
        choice = choose_best(seen)
        if choice is not None:
            choices.update(f"{choice.step} {choice.score.hex()} {choice.smoothed} {choice.smoothed_stderr};".encode())
    return {
        "step": best.step,
        "score": best.score.hex(),
        "smoothed": best.smoothed.hex(),
        "stderr": best.smoothed_stderr.hex(),
        "choices": choices.hexdigest()[:16],
    }


def compute_noise(observations: list[Observation]) -> dict[str, str]:
    """The noise of eval and proxy at the end of a run, and a hash of the estimates after each value."""
    results = {}
    for role in (MetricRole.EVAL, MetricRole.PROXY):
        state, numbers, estimate = noise.NoiseState(), hashlib.sha256(), noise.Noise(0.0, 1.0)
        for item in observations:
            if item.role is role:
                state = noise.advance(state, item.value, item.stderr)
                estimate = noise.estimate(state)
                numbers.update(f"{estimate.sd.hex()} {estimate.inflation.hex()};".encode())
        results[str(role)] = f"{estimate.sd.hex()} {estimate.inflation.hex()} {numbers.hexdigest()[:16]}"
    return results


COMPUTATIONS = {"best_checkpoint": compute_best_checkpoint, "noise": compute_noise}


RUNS = pytest.mark.parametrize("runs", ["six", pytest.param("all", marks=pytest.mark.nightly)])


def select_runs(runs: str) -> list[tuple[str, list[Observation]]]:
    """All recorded runs, or six of them, evenly spaced."""
    recorded = load_recorded_runs()
    return recorded if runs == "all" else recorded[:: len(recorded) // 6][:6]


@RUNS
@pytest.mark.parametrize("name", sorted(COMPUTATIONS))
def test_checkpoint_and_noise_equal_the_stored_results(name: str, runs: str) -> None:
    """Each recorded run gets the stored best checkpoint and noise."""
    expected = json.loads(RESULTS_FILE.read_text())[name]
    results = {run: COMPUTATIONS[name](observations) for run, observations in select_runs(runs)}
    assert {run: results[run] for run in results if results[run] != expected[run]} == {}
    assert runs == "six" or results.keys() == expected.keys()


@RUNS
@pytest.mark.parametrize(("name", "policy"), [pytest.param(name, policy, id=name) for name, policy in list_policies()])
def test_verdicts_equal_the_stored_results(name: str, policy: Policy, runs: str) -> None:
    """Each recorded run gets the stored verdicts, steps and evidence."""
    expected = json.loads(RESULTS_FILE.read_text())[name]
    results = {run: compute_verdicts(policy, observations) for run, observations in select_runs(runs)}
    assert {run: results[run] for run in results if results[run] != expected[run]} == {}
    assert runs == "six" or results.keys() == expected.keys()


def write_results() -> None:
    """Compute and store the results of all recorded runs."""
    runs = load_recorded_runs()
    results = {
        name: {run: compute_verdicts(policy, observations) for run, observations in runs}
        for name, policy in list_policies()
    }
    results |= {
        name: {run: compute(observations) for run, observations in runs} for name, compute in COMPUTATIONS.items()
    }
    lines = ",\n".join(
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(run)}: {json.dumps(result)}" for run, result in by_run.items())
        + "\n}"
        for name, by_run in results.items()
    )
    RESULTS_FILE.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    write_results()
