"""`make bench-veto BENCH=floods`: what a veto and a pause wait while another project floods a route of the service.

For every route of the API, of MLflow and of the pages: one key, then two keys of one project send the costliest request
that its limits allow over 24 connections, without a pause (by wrk). Meanwhile one other project vetoes its stops and
another one is paused and resumed, at the same server and, as the control, while the flood goes to another server on the
same machine: what that costs, no limit can prevent. Wanted: the 99th percentile at the flooded server is at most twice
that of the control.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console

from evalstop_lab.arguments import positive_number
from evalstop_lab.benchmarks.load import find_wrk
from evalstop_lab.benchmarks.processes import create_keys, describe_machine, format_machine
from evalstop_lab.benchmarks.veto.routes import Flood, list_floods
from evalstop_lab.report import new_table
from evalstop_lab.service_process import SETTINGS, Service, end_process, run_server

TARGET = 2.0
FALLING = (0.5, 0.9, 0.8, 0.7, 0.6)
LONG_RUN_EVALS, EVALS_A_POST = 8_000, 2_000
CONNECTIONS, LONGEST_SECONDS = 24, 600
NOWHERE = "01900000-0000-7000-8000-000000000000"
WARM_UP_SECONDS, WARM_UP_TIMES, PAUSE_SECONDS = 1.0, 5, 0.05
PROJECTS = (
    *("migrate", "admin key create --name vetoing --scopes admin"),
    "admin key create --project gamma --name pausing --scopes admin",
    *(f"admin key create --project beta --name {name} --scopes admin" for name in ("one", "two")),
)


@dataclass(frozen=True)
class Place:
    """A service with a project that vetoes, one that is paused, and one whose two keys flood.

    `pausing_key`: of the second. `senders`: the header of each flooding key, and an empty token; `visitors`: that of
    its session, and the token of its forms. `ids`: what stands for `{run_id}` and the like.
    """

    service: Service
    pausing_key: str
    senders: list[tuple[str, str, str]]
    visitors: list[tuple[str, str, str]]
    ids: Mapping[str, str]


@dataclass(frozen=True)
class Row:
    """The response times during a flood by this many keys, in milliseconds, and the number of answers by status."""

    route: str
    keys: int
    flooded_p50: float
    flooded_p99: float
    control_p50: float
    control_p99: float
    statuses: Mapping[str, int]

    @property
    def ratio(self) -> float:
        """The 99th percentile at the flooded server, by that of the control."""
        return self.flooded_p99 / self.control_p99


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and print its table; 1 when a ratio is above the target."""
    parser = argparse.ArgumentParser(prog="make bench-veto BENCH=floods", description=__doc__)
    parser.add_argument("--times", type=positive_number, default=20, help="vetoes and pauses under each flood")
    parser.add_argument("--only", default="", help="routes whose method and path match this expression")
    parser.add_argument("--json", action="store_true", help="print one JSON object a route")
    options = parser.parse_args(arguments)
    rows = []
    with (
        start_place() as flooded,
        start_place() as other,
        flooded.service.connect() as admin,
        Service(flooded.service.url, flooded.pausing_key).connect() as pausing,
    ):
        operators = Operators(admin, pausing)
        for flood in list_floods():
            for keys in (1, 2) if re.search(options.only, f"{flood.method} {flood.path}") else ():
                rows.append(row := measure_flood(operators, flooded, other, flood, keys, options.times))
                if options.json:
                    print(json.dumps(asdict(row) | {"ratio": row.ratio}), flush=True)
    if not options.json:
        _print_table(rows)
    return 0 if all(row.ratio <= TARGET for row in rows) else 1


def measure_flood(operators: Operators, flooded: Place, other: Place, flood: Flood, keys: int, times: int) -> Row:
    """Flood one server, then the other, and measure at the first."""
    operators.prepare(2 * times)
    durations: list[list[float]] = []
    statuses: Counter[str] = Counter()
    for place in (flooded, other):
        with flooding(place, flood, keys) as counts:
            time.sleep(WARM_UP_SECONDS)
            durations.append(operators.measure(times))
        statuses.update(counts if place is flooded else {})
    flooded_p50, flooded_p99, control_p50, control_p99 = (
        float(np.percentile(of_place, share)) for of_place in durations for share in (50, 99)
    )
    return Row(f"{flood.method} {flood.path}", keys, flooded_p50, flooded_p99, control_p50, control_p99, dict(statuses))


@contextmanager
def start_place() -> Iterator[Place]:
    """A service on an embedded database of its own, with two projects."""
    with tempfile.TemporaryDirectory(prefix="evalstop-bench-") as name:
        environment = {**SETTINGS, "EVALSTOP_DATA_FOLDER": name}
        vetoing, pausing, *flooding_keys = create_keys(environment, PROJECTS)
        command = [sys.executable, "-m", "evalstop_service.cli", "up", "--json", "--port", "0"]
        with run_server(command, Path(name) / "up.log", environment) as service:
            yield _prepare_place(Service(service.url, vetoing), pausing, flooding_keys)


@contextmanager
def flooding(place: Place, flood: Flood, keys: int) -> Iterator[Counter[str]]:
    """Flood within the block; the counter has the statuses of the answers afterwards."""
    counts = Counter[str]()
    path, body = flood.path, flood.body
    for name, value in place.ids.items():
        path, body = (text.replace(f"{{{name}}}", value) for text in (path, body))
    path = re.sub(r"{.*?}", NOWHERE, path)
    senders = (place.senders if path.startswith(("/api/", "/mlflow/")) else place.visitors)[:keys]
    with tempfile.NamedTemporaryFile("w", suffix=".flood") as file:
        kind = "application/json" if path.startswith(("/api/", "/mlflow/")) else "application/x-www-form-urlencoded"
        lines = (
            flood.method,
            path,
            kind,
            str(len(senders)),
            *(f"{name}: {value}\t{token}" for name, value, token in senders),
        )
        file.write("\n".join((*lines, body)))
        file.flush()
        command = ["nice", find_wrk(), "-t1", f"-c{CONNECTIONS}", f"-d{LONGEST_SECONDS}s"]
        command += ["-s", str(Path(__file__).with_suffix(".lua")), place.service.url, "--", file.name]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            yield counts
            process.send_signal(signal.SIGINT)
            _, report = process.communicate(timeout=LONGEST_SECONDS)
            counts.update(json.loads(report.splitlines()[-1]))
        finally:
            end_process(process)


class Operators:
    """A key that vetoes the stops of its project, and one that pauses and resumes another, one request at a time.

    No stop waits in the project that is paused: what a pause costs does not depend on how many vetoes follow.
    """

    def __init__(self, vetoing: httpx.Client, pausing: httpx.Client) -> None:
        bounds = {"stops_per_hour": None, "stops_share": None, "veto_window_seconds": 86_400.0, "max_mode": "enforce"}
        vetoing.patch("/project", json=bounds).raise_for_status()
        self._vetoing, self._pausing, self._count = vetoing, pausing, 0
        self._decisions: list[str] = []
        self.prepare(WARM_UP_TIMES)
        self.measure(WARM_UP_TIMES)

    def prepare(self, vetoes: int) -> None:
        """Let so many stops wait for a veto."""
        while len(self._decisions) < vetoes:
            self._count += 1
            terms = {"name": f"stop-{self._count}", "policy": "paper", "mode": "enforce"}
            run = _post(self._vetoing, "/runs", terms)["id"]
            points = [{"metric": "eval", "step": step, "value": value} for step, value in enumerate(FALLING)]
            receipt = _post(self._vetoing, f"/runs/{run}/observations", {"observations": points})
            self._decisions.append(receipt["decision"]["id"])

    def measure(self, times: int) -> list[float]:
        """So many vetoes, pauses and resumes, in milliseconds."""
        durations = []
        who = {"actor": "dana", "reason": "a known dip"}
        for _ in range(times):
            veto = (self._vetoing, f"/decisions/{self._decisions.pop()}/veto", who)
            for client, path, body in (
                veto,
                (self._pausing, "/project/pause", who),
                (self._pausing, "/project/resume", {}),
            ):
                started = time.perf_counter()
                client.post(path, json=body).raise_for_status()
                durations.append((time.perf_counter() - started) * 1000)
                time.sleep(PAUSE_SECONDS)
        return durations


def _prepare_place(service: Service, pausing_key: str, keys: list[str]) -> Place:
    """Give the flooding project a long run and one of the policy `default`, and sign its keys in."""
    with Service(service.url, keys[0]).connect() as admin:
        run = _post(admin, "/runs", {"name": "long"})["id"]
        _post(admin, "/runs", {"name": "paper", "policy": "default"})
        for first in range(0, LONG_RUN_EVALS, EVALS_A_POST):
            points = [{"metric": "eval", "step": step, "value": step} for step in range(first, first + EVALS_A_POST)]
            _post(admin, f"/runs/{run}/observations", {"observations": points})
    visitors = []
    for key in keys:
        with httpx.Client(base_url=service.url, trust_env=False, timeout=60) as browser:
            browser.post("/login", data={"key": key, "csrf": _read_form_token(browser, "/login")})
            cookies = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
            visitors.append(("Cookie", cookies, _read_form_token(browser, "/settings")))
    senders = [("Authorization", f"Bearer {key}", "") for key in keys]
    ids = {"run_id": run, "run_hex": run.replace("-", ""), "name": "paper", "metric": "eval"}
    return Place(service, pausing_key, senders, visitors, ids)


def _read_form_token(browser: httpx.Client, page: str) -> str:
    return browser.get(page).raise_for_status().text.split('name="csrf" value="')[1].split('"')[0]


def _post(client: httpx.Client, path: str, body: Mapping[str, object]) -> dict[str, Any]:
    while True:
        response = client.post(path, json=body)
        if response.status_code != 429:
            document: dict[str, Any] = response.raise_for_status().json()
            return document
        time.sleep(float(response.headers["Retry-After"]))


def _print_table(rows: list[Row]) -> None:
    console = Console(width=160)
    columns = ("route", "keys", "p50", "p99", "control p50", "p99", "ratio of p99", f"wanted <= {TARGET:g}", "answers")
    table = new_table("pauses and vetoes beside a flood, milliseconds", *columns)
    for row in sorted(rows, key=lambda row: row.ratio, reverse=True):
        figures = (row.flooded_p50, row.flooded_p99, row.control_p50, row.control_p99)
        answers = ", ".join(f"{status}: {count}" for status, count in sorted(row.statuses.items()))
        cells = (*(f"{figure:.0f}" for figure in figures), f"{row.ratio:.1f}")
        table.add_row(row.route, str(row.keys), *cells, "met" if row.ratio <= TARGET else "missed", answers)
    console.print(table)
    console.print(format_machine(describe_machine("evalstop-service", "uvicorn", "sqlalchemy")), highlight=False)


if __name__ == "__main__":
    sys.exit(main())
