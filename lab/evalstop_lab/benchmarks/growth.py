"""Growth: what an observation costs with ever more live runs and ever more points in a run, and what a run holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from evalstop_lab.benchmarks import planted, servers
from evalstop_lab.benchmarks.dialects import MIX
from evalstop_lab.benchmarks.generator import Job, Load
from evalstop_lab.benchmarks.ingest_stage import created
from evalstop_lab.benchmarks.rounds import rotated
from evalstop_lab.benchmarks.servers import Server
from evalstop_lab.benchmarks.worker import Worker
from tests.fixtures.postgres_server import conninfo

CLIENTS = 64
WARM_UP = 200
COLD_SECONDS = 120.0
MOST_IN_A_ROUND = 10_000_000


@dataclass(frozen=True)
class Ground:
    """Where these measurements stand: a PostgreSQL to make databases on, a folder, the load generator."""

    postgres: str
    folder: Path
    generator: Worker

    def prepared(self, name: str) -> tuple[str, str, dict[str, str]]:
        """A new database: how to connect to it, a key, and the environment of a service on it."""
        url = created(self.postgres, name)
        environment = {"EVALSTOP_DATABASE_URL": url}
        return conninfo(url), servers.prepared(environment), environment


def live_runs(ground: Ground, sizes: Sequence[int], seconds: float, tick: Callable[[], None]) -> list[dict[str, Any]]:
    """By number of live runs: microseconds an observation when each is new to the process and when it is not; memory.

    Each process is fresh and may remember all of them; a last one, of the most runs, remembers as many as is its
    default. Every run is posted to once, as far as the time goes, 20 observations with one eval, then all again.
    """
    where, key, environment = ground.prepared("live-runs")
    found = []
    for size, remembers in [*((size, max(sizes)) for size in sizes), (max(sizes), None)]:
        memory = {"EVALSTOP_LIVE_RUNS": str(remembers + WARM_UP)} if remembers else {}
        with servers.evalstop(ground.folder / f"live-{size}", key, environment | memory) as server:
            _post(ground, server, planted.runs(where, server, WARM_UP, f"warm-{size}-{remembers}"), 20, requests=1)
            runs = planted.runs(where, server, size, f"live-{size}-{remembers}")
            before = servers.resident_bytes(server.pid)
            cold = _post(ground, server, runs, 20, requests=-(-size // CLIENTS), seconds=COLD_SECONDS)
            held = servers.resident_bytes(server.pid) - before
            known = min(size, cold.requests)
            warm = _post(ground, server, runs[:known], 20, seconds=seconds, first=40)
        found.append(
            {
                "live_runs": known,
                "remembers_all": remembers is not None,
                "microseconds_first": 1e6 / cold.per_second,
                "microseconds": 1e6 / warm.per_second,
                "bytes_a_run": held / known,
                "p99_ms": warm.p99_ms,
            }
        )
        tick()
    return found


def points_in_a_run(
    ground: Ground, sizes: Sequence[int], seconds: float, rounds: int, tick: Callable[[], None]
) -> list[dict[str, Any]]:
    """By points that a run has: seconds to the first verdict of a process that does not know it; microseconds after.

    One client posts 100 observations a request. The processes are up side by side and take turns; the median counts.
    """
    where, key, environment = ground.prepared("points")
    with ExitStack() as ends:
        grown = []
        for size in sizes:
            folder = ground.folder / f"points-{size}"
            with servers.evalstop(folder, key, environment) as server:
                run = planted.runs(where, server, 1, f"points-{size}")[0]
                _post(ground, server, planted.runs(where, server, WARM_UP, f"warm-{size}"), 20, requests=1)
            planted.observations(where, run, size)
            server = ends.enter_context(servers.evalstop(folder, key, environment))
            _post(ground, server, planted.runs(where, server, WARM_UP, f"again-{size}"), 20, requests=1)
            begun = time.perf_counter()
            _post(ground, server, [run], 100, clients=1, requests=1, first=size)
            grown.append(_Grown(server, run, size, time.perf_counter() - begun))
            tick()
        for number in range(rounds):
            for one in rotated(grown, number):
                first = one.points + 100 + number * MOST_IN_A_ROUND
                load = _post(ground, one.server, [one.run], 100, clients=1, seconds=seconds, first=first)
                one.microseconds.append(1e6 / load.per_second)
    return [
        {"points": one.points, "first_ms": one.first_seconds * 1000, "microseconds": median(one.microseconds)}
        for one in grown
    ]


@dataclass
class _Grown:
    """A process that is posted to, of one run with so many points."""

    server: Server
    run: str
    points: int
    first_seconds: float
    microseconds: list[float] = field(default_factory=list)


def _post(
    ground: Ground,
    server: Server,
    runs: Sequence[str],
    batch: int,
    *,
    clients: int = CLIENTS,
    requests: int | None = None,
    seconds: float = 600.0,
    first: int = 0,
) -> Load:
    job = Job(
        addresses=(server.address,),
        dialect="evalstop",
        runs=tuple(runs),
        clients=clients,
        batch=batch,
        seconds=seconds,
        key=server.key,
        metrics=MIX,
        first=first,
        requests=requests,
    )
    return ground.generator.ask(job, Load)
