"""Recovery: from kill -9 to the first accepted observation, and to the first correct verdict on a run gone cold."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

import httpx

from evalstop_lab.benchmarks import planted, servers
from evalstop_lab.benchmarks.dialects import MIX, value
from evalstop_lab.benchmarks.growth import Ground
from evalstop_lab.benchmarks.ingest_contenders import evalstop_run
from evalstop_lab.benchmarks.worker import JobFailed

POINTS = 10_000


def recovery(ground: Ground, rounds: int, tick: Callable[[], None]) -> dict[str, Any]:
    """Milliseconds from kill -9 on, medians of some rounds; the process is started again at once, as a supervisor does.

    A verdict is correct when it is that of a twin: a run of the same points that was followed without interruption.
    """
    where, key, environment = ground.prepared("recovery")
    port = servers.free_port()
    accepted, kept, rebuilt = [], [], []
    for number in range(rounds):
        folder = ground.folder / f"recovery-{number}"
        with servers.evalstop(folder, key, environment, port) as server, planted.api(server) as api:
            runs = [evalstop_run(True)(api) for _ in range(3)]
            for run in runs:
                for first in range(0, POINTS, 1000):
                    _posted(api, run, first, 1000)
            expected = _posted(api, runs[0], POINTS, 20)
            os.kill(server.pid, signal.SIGKILL)
            killed = time.perf_counter()
            with servers.evalstop(folder / "again", key, environment, port) as second, planted.api(second) as client:
                _correct(_posted(client, runs[0], POINTS + 20, 20), None)
                accepted.append((time.perf_counter() - killed) * 1000)
                kept.append(_timed(client, runs[1], expected))
                planted.forget_monitors(where)
                os.kill(second.pid, signal.SIGKILL)
        with servers.evalstop(folder / "forgotten", key, environment, port) as third, planted.api(third) as client:
            _posted(client, runs[0], POINTS + 40, 20)
            rebuilt.append(_timed(client, runs[2], expected))
        tick()
    return {
        "to_first_accepted_ms": statistics.median(accepted),
        "cold_verdict_ms": statistics.median(kept),
        "cold_verdict_rebuilt_ms": statistics.median(rebuilt),
    }


def _timed(api: httpx.Client, run: str, expected: dict[str, Any]) -> float:
    begun = time.perf_counter()
    _correct(_posted(api, run, POINTS, 20), expected)
    return (time.perf_counter() - begun) * 1000


def _correct(verdict: dict[str, Any], expected: dict[str, Any] | None) -> None:
    if expected is not None and verdict != expected:
        raise JobFailed(f"The verdict after a restart is {verdict}; that of the twin is {expected}.")


def _posted(api: httpx.Client, run: str, first: int, count: int) -> dict[str, Any]:
    """Post so many observations of a run that turns in its middle; gives the verdict."""
    points = [
        {"metric": metric, "step": step, "value": value(metric, min(step, abs(POINTS - step)))}
        for step in range(first, first + count)
        for metric in [MIX[step % len(MIX)]]
    ]
    answer = api.post(f"/api/v1/runs/{run}/observations", json={"observations": points})
    answer.raise_for_status()
    verdict: dict[str, Any] = answer.json()["verdict"]
    return verdict
