"""`make bench-veto BENCH=floods`: what a veto and a pause wait while another project floods a route of the service.

For every route of the API, of MLflow and of the pages: one key, or two keys of one project, send the costliest request
that its limits allow over 24 connections, without a pause. Meanwhile another project's key pauses and vetoes, at the
same server and, as the control, while the flood goes to another server on the same machine: what that costs, no limit
can prevent. Wanted: the 99th percentile at the flooded server is at most twice that of the control.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from rich.console import Console

from evalstop_lab.arguments import positive_number
from evalstop_lab.benchmarks.processes import describe_machine, format_machine
from evalstop_lab.benchmarks.veto.costliest import REASONS, Route, list_routes, write_request
from evalstop_lab.benchmarks.veto.flood import Flood
from evalstop_lab.report import new_table
from evalstop_lab.service_process import SETTINGS, Service, end_process, run_announced

TARGET = 2.0
FALLING = (0.5, 0.9, 0.8, 0.7, 0.6)
LONG_RUN_EVALS = 8_000
WARM_UP_SECONDS = 1.0
PAUSE_SECONDS = 0.05
NOWHERE = "01900000-0000-7000-8000-000000000000"

PREPARE = """
from evalstop_service.cli import main

commands = (
    "migrate",
    "admin project create default --held-out-share 0",
    "admin key create --name victim --scopes admin",
    "admin project create beta --held-out-share 0",
    "admin key create --project beta --name one --scopes admin",
    "admin key create --project beta --name two --scopes admin",
)
raise SystemExit(next(filter(None, (main([*command.split(), "--json"]) for command in commands)), 0))
"""


@dataclass(frozen=True)
class Place:
    """A service with a project that vetoes, and another one whose two keys flood.

    `senders`: the headers of the flooding keys; `visitors`: of their sessions. `ids`: resources of their project.
    """

    service: Service
    senders: list[dict[str, str]]
    visitors: list[dict[str, str]]
    form_tokens: list[str]
    ids: Mapping[str, str]


@dataclass
class Row:
    """What a flood of a route by so many keys cost, in milliseconds, and how the flood was answered."""

    route: Route
    keys: int
    flooded: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)

    @property
    def ratio(self) -> float:
        """The 99th percentile at the flooded server, by that of the control."""
        return _p99(self.flooded) / _p99(self.beside)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and print its table; 1 when a ratio is above the target."""
    parser = argparse.ArgumentParser(prog="make bench-veto BENCH=floods", description=__doc__)
    parser.add_argument("--times", type=positive_number, default=20, help="vetoes and pauses under each flood")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of a route above the target")
    parser.add_argument("--only", default="", help="routes whose method and path match this expression")
    parser.add_argument("--json", action="store_true", help="print one JSON object a route")
    options = parser.parse_args(arguments)
    routes = [route for route in list_routes() if route not in REASONS and re.search(options.only, " ".join(route))]
    rows = []
    with start_place() as flooded, start_place() as other, flooded.service.connect() as admin:
        victim = Victim(admin)
        for route in routes:
            for keys in (1, 2):
                rows.append(row := measure(victim, flooded, other, route, keys, options.times))
                for _ in range(options.rounds):  # the machine may have been busy
                    if row.ratio > TARGET:
                        again = measure(victim, flooded, other, route, keys, options.times)
                        row.flooded += again.flooded
                        row.beside += again.beside
                        row.statuses += again.statuses
                if options.json:
                    _print_json(row)
    if not options.json:
        _print_table(rows)
    return 0 if all(row.ratio <= TARGET for row in rows) else 1


def measure(victim: Victim, flooded: Place, other: Place, route: Route, keys: int, times: int) -> Row:
    """Flood a route of one server, then of the other, and measure at the first."""
    row = Row(route, keys)
    victim.prepare(2 * times)
    for place, durations in ((other, row.beside), (flooded, row.flooded)):
        with flooding(place, route, keys) as statuses:
            time.sleep(WARM_UP_SECONDS)
            durations += victim.measure(times)
        if place is flooded:
            row.statuses += statuses
    return row


@contextmanager
def start_place() -> Iterator[Place]:
    """A service on an embedded database of its own, with two projects."""
    with tempfile.TemporaryDirectory(prefix="evalstop-bench-") as name:
        folder = Path(name)
        environment = {**SETTINGS, "EVALSTOP_DATA_FOLDER": name}
        prepared = subprocess.run(
            [sys.executable, "-c", PREPARE], env=os.environ | environment, capture_output=True, text=True
        )
        documents = [json.loads(line) for line in prepared.stdout.splitlines() if line.startswith("{")]
        keys = [document["key"] for document in documents if "key" in document]
        command = [sys.executable, "-m", "evalstop_service.cli", "up", "--json", "--port", "0"]
        with run_announced(command, folder / "up.log", environment) as (_, ready):
            yield _prepare_place(Service(ready["url"], keys[0], ""), keys[1:])


@contextmanager
def flooding(place: Place, route: Route, keys: int) -> Iterator[Counter[str]]:
    """Flood a route within the block; the counter has the statuses of the answers afterwards."""
    counts = Counter[str]()
    is_page = not route[1].startswith(("/api/", "/mlflow/"))
    senders = (place.visitors if is_page else place.senders)[:keys]
    path, media_type, body = write_request(route, place.ids, place.form_tokens[0])
    url = httpx.URL(place.service.url)
    assert url.port is not None
    first = 10_000 + int(time.monotonic() * 100) % 10_000_000
    flood = Flood(url.host, url.port, route[0], path, media_type, body, senders, first=first)
    command = [sys.executable, "-m", "evalstop_lab.benchmarks.veto.flood"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(flood).decode() + "\n")
        process.stdin.flush()
        process.stdout.readline()
        yield counts
        process.stdin.close()
        counts.update(json.loads(process.stdout.readline()))
    finally:
        end_process(process)


class Victim:
    """A key that pauses and vetoes, one request after the other."""

    def __init__(self, admin: httpx.Client) -> None:
        bounds = {"stops_per_hour": None, "stops_share": None, "veto_window_seconds": 86_400.0, "max_mode": "enforce"}
        admin.patch("/project", json=bounds).raise_for_status()
        self._admin, self._count = admin, 0
        self._decisions: list[str] = []

    def prepare(self, vetoes: int) -> None:
        """Let so many stops wait for a veto."""
        self._admin.post("/project/resume", json={}).raise_for_status()
        while len(self._decisions) < vetoes:
            self._count += 1
            terms = {"name": f"stop-{self._count}", "policy": "paper", "mode": "enforce"}
            run = _post(self._admin, "/runs", terms)["id"]
            points = [{"metric": "eval", "step": step, "value": value} for step, value in enumerate(FALLING)]
            receipt = _post(self._admin, f"/runs/{run}/observations", {"observations": points})
            self._decisions.append(receipt["decision"]["id"])

    def measure(self, times: int) -> list[float]:
        """So many pauses and vetoes, in milliseconds."""
        durations = []
        who = {"actor": "dana", "reason": "a known dip"}
        for _ in range(times):
            for path in ("/project/pause", f"/decisions/{self._decisions.pop()}/veto"):
                started = time.perf_counter()
                self._admin.post(path, json=who).raise_for_status()
                durations.append((time.perf_counter() - started) * 1000)
                time.sleep(PAUSE_SECONDS)
        return durations


def _prepare_place(service: Service, keys: list[str]) -> Place:
    """Fill the flooding project, and sign its keys in."""
    with Service(service.url, keys[0], "").connect() as admin:
        admin.patch("/project", json={"veto_window_seconds": 86_400.0, "max_mode": "enforce"}).raise_for_status()
        ids = {
            "name": "paper",
            "run_id": _post(admin, "/runs", {"name": "long"})["id"],
            "other_run_id": _post(admin, "/runs", {"name": "paper", "policy": "default"})["id"],
            "endpoint_id": _post(admin, "/pull/endpoints", {"name": "p", "event_types": ["run.lost"]})["id"],
            "key_id": _post(admin, "/keys", {"name": "spare", "scopes": ["read"]})["id"],
            "backtest_id": _post(admin, "/policies/backtests", {"policy": "paper", "runs": 10})["id"],
        }
        for run in (ids["run_id"], ids["other_run_id"]):
            for first in range(0, LONG_RUN_EVALS, 2_000):
                points = [{"metric": "eval", "step": first + index, "value": first + index} for index in range(2_000)]
                _post(admin, f"/runs/{run}/observations", {"observations": points})
        stop = _post(admin, "/runs", {"name": "stop", "policy": "paper", "mode": "enforce"})["id"]
        points = [{"metric": "eval", "step": step, "value": value} for step, value in enumerate(FALLING)]
        ids["decision_id"] = _post(admin, f"/runs/{stop}/observations", {"observations": points})["decision"]["id"]
        deliveries = admin.get("/deliveries").raise_for_status().json()["items"]
        ids["delivery_id"] = deliveries[0]["id"] if deliveries else NOWHERE
        missing = ("token", "request_id", "proposal_id", "session_id", "project_id", "model_id", "digest", "tag_key")
        ids |= dict.fromkeys(missing, NOWHERE)
        ids["run_hex"] = ids["run_id"].replace("-", "")
    visitors, form_tokens = [], []
    for key in keys:
        with httpx.Client(base_url=service.url, trust_env=False, timeout=60) as browser:
            token = browser.get("/login").text.split('name="csrf" value="')[1].split('"')[0]
            browser.post("/login", data={"key": key, "csrf": token})
            form_tokens.append(browser.get("/settings").text.split('name="csrf" value="')[1].split('"')[0])
            visitors.append({"Cookie": "; ".join(f"{name}={value}" for name, value in browser.cookies.items())})
    senders = [{"Authorization": f"Bearer {key}"} for key in keys]
    return Place(service, senders, visitors, form_tokens, ids)


def _post(client: httpx.Client, path: str, body: Mapping[str, object]) -> dict[str, Any]:
    while True:
        response = client.post(path, json=body)
        if response.status_code != 429:
            document: dict[str, Any] = response.raise_for_status().json()
            return document
        time.sleep(float(response.headers["Retry-After"]))


def _p99(durations: list[float]) -> float:
    return float(np.percentile(durations, 99))


def _print_json(row: Row) -> None:
    figures = {"flooded_ms": _p99(row.flooded), "beside_ms": _p99(row.beside), "ratio": row.ratio}
    medians = {"flooded_p50": float(np.median(row.flooded)), "beside_p50": float(np.median(row.beside))}
    document = {"route": " ".join(row.route), "keys": row.keys, **figures, **medians, "statuses": row.statuses}
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def _print_table(rows: list[Row]) -> None:
    console = Console(width=160)
    columns = ("route", "keys", "p99 flooded", "p99 control", "ratio", f"wanted <= {TARGET:g}", "answers")
    table = new_table("pauses and vetoes beside a flood, milliseconds", *columns)
    for row in sorted(rows, key=lambda row: row.ratio, reverse=True):
        figures = (f"{_p99(row.flooded):.0f}", f"{_p99(row.beside):.0f}", f"{row.ratio:.1f}")
        answers = ", ".join(f"{status}: {count}" for status, count in sorted(row.statuses.items()))
        met = "met" if row.ratio <= TARGET else "missed"
        table.add_row(" ".join(row.route), str(row.keys), *figures, met, answers)
    console.print(table)
    for route, reason in REASONS.items():
        console.print(f"not flooded: {' '.join(route)}: {reason}", highlight=False)
    console.print(format_machine(describe_machine("evalstop-service", "uvicorn", "sqlalchemy")), highlight=False)


if __name__ == "__main__":
    sys.exit(main())
