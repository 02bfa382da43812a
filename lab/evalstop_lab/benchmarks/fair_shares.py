"""`make bench-fair-shares`: what a key notices of another one that floods the service.

One key posts observations, vetoes stops and loads a page, each in turn: quiet, while another key (and clients without
one) flood the service, and while they flood a second service, which shares nothing but the machine and the database
server. What the second flood costs, no limit of the first service can prevent. The flood is a process of its own with
lower priority.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from rich.console import Console

from evalstop_lab.arguments import positive_number
from evalstop_lab.benchmarks.flood import LATE_STEPS, Flood, Flooded
from evalstop_lab.benchmarks.processes import (
    Server,
    add_database_option,
    describe_machine,
    format_machine,
    parse_with_database,
    prepare_service,
    run_service,
    temporary_database,
)
from evalstop_lab.report import new_table
from evalstop_lab.service_process import end_process

TARGET = 2.0
VERSIONS = ("evalstop-service", "uvicorn", "sqlalchemy", "asyncpg")
FALLING = (0.5, 0.9, 0.8, 0.7, 0.6)
WARM_UP_SECONDS = 2.0
ROUNDS = 3


@dataclass(frozen=True)
class Ratio:
    """The 99th percentiles of one kind of request in milliseconds: quiet, while this service is flooded, and while
    another one on the same machine is; and how many were timed under each flood."""

    kind: str
    quiet_ms: float
    flooded_ms: float
    neighbor_ms: float
    times: int

    @property
    def ratio(self) -> float:
        """What a flood of the service costs."""
        return self.flooded_ms / self.quiet_ms

    @property
    def neighbor_ratio(self) -> float:
        """What a flood of another service costs."""
        return self.neighbor_ms / self.quiet_ms


def main() -> int:
    """Run the benchmark and print its table; 1 when a ratio is above the target."""
    parser = argparse.ArgumentParser(prog="make bench-fair-shares", description=__doc__)
    add_database_option(parser)
    parser.add_argument("--times", type=positive_number, default=300, help="each request is timed so often")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parse_with_database(parser)
    with _start_service(options.database_url) as service, _start_service(options.database_url) as neighbor:
        ratios, flooded = measure_floods(service, neighbor, options.times)
    machine = describe_machine(*VERSIONS)
    if options.json:
        rows = [vars(row) | {"ratio": row.ratio, "neighbor_ratio": row.neighbor_ratio} for row in ratios]
        sys.stdout.write(json.dumps({"ratios": rows, "flood": flooded.statuses, "machine": machine}) + "\n")
    else:
        _print_table(ratios, flooded, format_machine(machine))
    return 0 if all(row.ratio <= TARGET for row in ratios) else 1


@contextmanager
def _start_service(database_url: str) -> Iterator[Server]:
    """A service on a database of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="evalstop-bench-") as folder,
        temporary_database(database_url, "shares") as url,
    ):
        environment = {"EVALSTOP_DATABASE_URL": url, "EVALSTOP_WEBHOOK_NETWORKS": "127.0.0.0/8"}
        key = prepare_service(environment)
        with run_service(Path(folder), key, environment) as service:
            yield service


def measure_floods(service: Server, neighbor: Server, times: int) -> tuple[list[Ratio], Flooded]:
    """Time each kind of request on `service` in `ROUNDS` rounds: quiet, under its flood, under the neighbor's."""
    quiet, flooded, beside = (dict[str, list[float]]() for _ in range(3))
    answers: list[Flooded] = []
    times_per_round = math.ceil(times / ROUNDS)
    with service.connect() as admin, neighbor.connect() as other:
        victim = Victim(admin, 3 * ROUNDS * times_per_round + 10)
        victim.measure(10)
        own_flood, other_flood = prepare_flood(admin, service.url), prepare_flood(other, neighbor.url)
        for _ in range(ROUNDS):
            _extend_times(quiet, victim.measure(times_per_round))
            for flood, times_ms in ((own_flood, flooded), (other_flood, beside)):
                with flooding(flood) as answered:
                    time.sleep(WARM_UP_SECONDS)
                    _extend_times(times_ms, victim.measure(times_per_round))
                answers += answered if flood is own_flood else []
                time.sleep(WARM_UP_SECONDS)
    rows = [
        Ratio(kind, _p99(quiet[kind]), _p99(flooded[kind]), _p99(beside[kind]), ROUNDS * times_per_round)
        for kind in quiet
    ]
    return rows, _add_up(answers)


def _extend_times(times_ms: dict[str, list[float]], added: Mapping[str, list[float]]) -> None:
    for kind, milliseconds in added.items():
        times_ms.setdefault(kind, []).extend(milliseconds)


def _add_up(answers: Sequence[Flooded]) -> Flooded:
    statuses: dict[str, Counter[str]] = {}
    for flooded in answers:
        for kind, counts in flooded.statuses.items():
            statuses.setdefault(kind, Counter()).update(counts)
    return Flooded({kind: dict(counts) for kind, counts in statuses.items()})


def prepare_flood(admin: httpx.Client, url: str) -> Flood:
    """A key that may flood, with what it floods: runs, one of them long, and endpoints."""
    created = _post(admin, "/keys", {"name": "flood", "scopes": ["ingest", "read", "operate"]})
    runs = [_post(admin, "/runs", {"name": f"flood-{index}"})["id"] for index in range(8)]
    late = _post(admin, "/runs", {"name": "late", "policy": "default"})["id"]
    points = [{"metric": "eval", "step": 2 * step, "value": step / LATE_STEPS} for step in range(LATE_STEPS)]
    _post(admin, f"/runs/{late}/observations", {"observations": points})
    pulled = _post(admin, "/pull/endpoints", {"name": "flood", "event_types": ["run.stop_failed"]})
    endpoint = _post(admin, "/endpoints", {"url": "http://127.0.0.1:9/", "event_types": ["run.stop_failed"]})
    return Flood(f"{url}/api/v1", created["key"], runs, late, pulled["id"], endpoint["id"])


@contextmanager
def flooding(flood: Flood) -> Iterator[list[Flooded]]:
    """A flood for the length of the block; what it was answered stands in the list afterwards."""
    answered: list[Flooded] = []
    command = [sys.executable, "-m", "evalstop_lab.benchmarks.flood"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(flood).decode() + "\n")
        process.stdin.flush()
        process.stdout.readline()
        yield answered
        process.stdin.close()
        answered.append(msgspec.json.decode(process.stdout.readline(), type=Flooded))
    finally:
        end_process(process)


class Victim:
    """A key that posts, vetoes and looks, one request after the other."""

    def __init__(self, admin: httpx.Client, vetoes: int) -> None:
        bounds = {"stops_per_hour": None, "stops_share": None, "veto_window_seconds": 86_400.0, "max_mode": "enforce"}
        admin.patch("/api/v1/project", json=bounds).raise_for_status()
        self._admin, self._step = admin, 0
        self._run = _post(admin, "/runs", {"name": "victim"})["id"]
        token = admin.get("/login").text.split('name="csrf" value="')[1].split('"')[0]
        key = admin.headers["Authorization"].removeprefix("Bearer ")
        admin.post("/login", data={"key": key, "csrf": token})
        self._decisions = [self._decide(index) for index in range(vetoes)]

    def measure(self, times: int) -> dict[str, list[float]]:
        """So many requests of each kind in turns, in milliseconds."""
        kinds: dict[str, Callable[[], httpx.Response]] = {"post": self._post, "veto": self._veto, "page": self._look}
        times_ms: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(times):
            for kind, send in kinds.items():
                started = time.perf_counter()
                send().raise_for_status()
                times_ms[kind].append((time.perf_counter() - started) * 1000)
        return times_ms

    def _decide(self, index: int) -> str:
        """The id of a stop that can be vetoed."""
        terms = {"name": f"stop-{index}", "policy": "paper", "mode": "enforce"}
        run = _post(self._admin, "/runs", terms)["id"]
        points = [{"metric": "eval", "step": step, "value": value} for step, value in enumerate(FALLING)]
        decision: str = _post(self._admin, f"/runs/{run}/observations", {"observations": points})["decision"]["id"]
        return decision

    def _post(self) -> httpx.Response:
        self._step += 1
        points = [{"metric": "eval", "step": self._step, "value": 0.5}]
        return self._admin.post(f"/api/v1/runs/{self._run}/observations", json={"observations": points})

    def _veto(self) -> httpx.Response:
        body = {"actor": "dana", "reason": "a known dip"}
        return self._admin.post(f"/api/v1/decisions/{self._decisions.pop()}/veto", json=body)

    def _look(self) -> httpx.Response:
        return self._admin.get(f"/runs/{self._run}")


def _post(client: httpx.Client, path: str, body: Mapping[str, object]) -> dict[str, Any]:
    response = client.post(f"/api/v1{path}", json=body).raise_for_status()
    document: dict[str, Any] = response.json()
    return document


def _p99(times_ms: list[float]) -> float:
    return float(np.percentile(times_ms, 99))


def _print_table(ratios: list[Ratio], flooded: Flooded, machine: str) -> None:
    console = Console()
    table = new_table(
        "99th percentile, milliseconds",
        "request",
        "quiet",
        "flooded",
        "ratio",
        f"wanted <= {TARGET:g}",
        "another service flooded",
        "ratio",
    )
    for row in ratios:
        met = "met" if row.ratio <= TARGET else "missed"
        own_figures = (f"{row.quiet_ms:.1f}", f"{row.flooded_ms:.1f}", f"{row.ratio:.1f}")
        table.add_row(row.kind, *own_figures, met, f"{row.neighbor_ms:.1f}", f"{row.neighbor_ratio:.1f}")
    console.print(table)
    flood = new_table("what the flood was answered", "requests", "by status")
    for kind, counts in flooded.statuses.items():
        flood.add_row(kind, ", ".join(f"{status}: {count}" for status, count in sorted(counts.items())))
    console.print(flood)
    console.print(machine, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
