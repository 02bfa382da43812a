"""Reading back: a series of 10^6 points at a resolution, and the list of a project's runs when there are 10^6."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import httpx

from evalstop_lab.benchmarks import planted, servers
from evalstop_lab.benchmarks.growth import Ground

TIMES = 20


def reading(ground: Ground, points: int, runs: int, tick: Callable[[], None]) -> dict[str, Any]:
    """Milliseconds of the first look and of those after it; None where the service has no such route."""
    where, key, environment = ground.prepared("reading")
    with servers.evalstop(ground.folder / "reading", key, environment) as server, planted.api(server) as api:
        run = planted.runs(where, server, 1, "long")[0]
        planted.observations(where, run, points, "loss")
        found = {
            f"series of {points:,} points in 1,000 buckets": _timed(
                api, f"/api/v1/runs/{run}/series", {"metric": "loss", "buckets": 1000}
            ),
            f"its last {points // 100:,} points in 1,000 buckets": _timed(
                api,
                f"/api/v1/runs/{run}/series",
                {"metric": "loss", "buckets": 1000, "from": points - points // 100},
            ),
        }
        tick()
        few = _timed(api, "/api/v1/runs", {"limit": 50})
        planted.runs(where, server, runs, "many")
        found |= {
            "run list, first page, 2 runs": few,
            f"run list, first page, {runs:,} runs": _timed(api, "/api/v1/runs", {"limit": 50}),
            f"run list, those running, {runs:,} runs": _timed(api, "/api/v1/runs", {"limit": 50, "status": "running"}),
            f"run list, by a name that one run has, {runs:,} runs": _timed(
                api, "/api/v1/runs", {"limit": 50, "name": f"many-{runs // 2}"}
            ),
            f"run list, none has failed, {runs:,} runs": _timed(api, "/api/v1/runs", {"limit": 50, "status": "failed"}),
        }
        tick()
    return found


def _timed(api: httpx.Client, path: str, query: dict[str, Any]) -> dict[str, float] | None:
    taken = []
    for _ in range(1 + TIMES):
        begun = time.perf_counter()
        answer = api.get(path, params=query)
        if answer.status_code == 404:
            return None
        answer.raise_for_status()
        taken.append((time.perf_counter() - begun) * 1000)
    first, *others = taken
    return {"first_ms": first, "p50_ms": statistics.median(others), "worst_ms": max(others)}
