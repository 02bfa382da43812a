"""Fixtures of the replay tests: the command, and a run that turns."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evalstop_lab.cli import main
from evalstop_lab.worlds.world import World
from hypothesis import HealthCheck, settings

property_settings = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture], max_examples=60
)

TURNING = (0.1, 0.4, 0.7, 0.9, 0.8, 0.6, 0.4, 0.2)
"""The eval score at steps 0, 10, ...: the peak is at step 30, and the third decline in a row at step 60."""

Replay = Callable[..., list[dict[str, Any]]]


def build_rows(run: str = "a", eval_scores: Sequence[float] = TURNING, **more: Any) -> list[dict[str, Any]]:
    """Rows of a log, with an eval every ten steps and these other fields."""
    return [{"run": run, "step": 10 * index, "eval": score} | more for index, score in enumerate(eval_scores)]


def list_rows(world: World) -> list[dict[str, Any]]:
    """A labeled run as the rows of a log."""
    columns = {"eval": world.eval_scores, "eval_stderr": world.eval_stderr, "proxy": world.proxy, "kl": world.kl}
    measured = {name: values for name, values in columns.items() if values is not None}
    return [
        {"run": world.name, "step": step}
        | {name: float(values[place]) for name, values in measured.items() if np.isfinite(values[place])}
        for place, step in enumerate(world.steps.tolist())
    ]


def write_jsonl(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    """Write a file of JSON lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Replay:
    """Run `evalstop-lab replay ... --json`, by default under the policy `paper`; returns its objects."""

    def run_replay(*arguments: object) -> list[dict[str, Any]]:
        policy = [] if "--policy" in arguments else ["--policy", "paper"]
        assert main(["replay", *map(str, arguments), *policy, "--json"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run_replay


@pytest.fixture
def failing_replay(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run `evalstop-lab replay ...`, which must fail with this exit code; returns its message."""

    def run_replay(code: int, *arguments: object) -> str:
        assert main(["replay", *map(str, arguments)]) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        return captured.err

    return run_replay
