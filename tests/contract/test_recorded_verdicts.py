"""Verdicts on recorded runs, pinned to the last bit: a change of one number anywhere fails here.

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
    policy_from_document,
    start,
    step,
)

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
    lines = ",\n".join(
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(run)}: {json.dumps(what)}" for run, what in by_run.items())
        + "\n}"
        for name, by_run in found.items()
    )
    PINNED.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    record()
