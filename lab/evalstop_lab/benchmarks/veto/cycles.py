"""`make bench-veto BENCH=cycles`: whether a veto that was refused or delayed by a fault is heard when it is repeated.

Each cycle opens runs whose stops are pending, causes a fault before the windows end, and sends a veto that the fault
refuses. It is repeated some seconds after the fault is over, and must be heard before any stop is handed over.
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psycopg
from rich.console import Console

from evalstop_lab.arguments import positive_number
from evalstop_lab.benchmarks.processes import create_keys
from evalstop_lab.errors import LabError
from evalstop_lab.report import new_table
from evalstop_lab.service_process import SETTINGS, Service, run_server

SERVICE = [sys.executable, "-m", "evalstop_service.cli"]
LATE_CLOCK = """
import sys
from datetime import UTC, datetime, timedelta
from evalstop_service import clock
off = timedelta(minutes=float(sys.argv.pop(1)))
clock.utc_now = lambda: datetime.now(UTC) + off
from evalstop_service.cli import main
raise SystemExit(main())
"""
"""Runs a command of the service with a clock that is wrong by so many minutes."""

DECLINE = [0.5, 0.9, 0.8, 0.7, 0.6]
RECONNECT_SECONDS = 2.0
"""How long `serve` stays stopped after an outage, so that the worker is back before it."""

FAULTS = {
    "PostgreSQL": ("outage", "late clock", "early clock", "serve stopped", "deliver stopped"),
    "SQLite": ("full disk", "up stopped"),
}


COLUMNS = ("cycles", "refused", "heard", "handed over", "error", "still vetoed", "arrived")


@contextmanager
def receive_stops(stopped: set[str]) -> Iterator[str]:
    """A receiver on this machine, at the URL, that accepts everything: adds the runs whose stops arrive."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            event = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            stopped.add(event["data"]["run"]["id"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - its name there
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()


class Postgres:
    """A server of its own, which the faults stop at once and start again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
        if not programs:
            raise LabError("this benchmark starts PostgreSQL servers: apt-get install postgresql")
        self._programs, self._as_user = programs[-1], []
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            owner = pwd.getpwnam("postgres")
            os.chown(folder, owner.pw_uid, owner.pw_gid)
            self._as_user = ["runuser", "-u", "postgres", "--"]
        self.url = f"postgresql://postgres@/postgres?host={folder}"
        self._run("initdb", "-U", "postgres", "-A", "trust", "--locale=C.UTF-8", "-E", "UTF8")

    def start(self) -> None:
        """Start the server and wait until it answers."""
        options = f"-k {self._folder} -c listen_addresses= -c shared_buffers=16MB"
        self._run("pg_ctl", "-w", "-l", str(self._folder / "log"), "-o", options, "start")
        while True:
            with suppress(psycopg.OperationalError), psycopg.connect(self.url):
                return

    def stop(self) -> None:
        """Stop the server at once, as a crash does."""
        self._run("pg_ctl", "-m", "immediate", "stop")

    def _run(self, program: str, *options: str) -> None:
        command = [*self._as_user, str(self._programs / program), "-D", str(self._folder / "data"), *options]
        subprocess.run(command, check=True, capture_output=True, cwd=self._folder)


@dataclass(frozen=True)
class Installation:
    """One installation with one project; `stopped`: the runs that its receiver was to stop.

    `deliver`: the process that sends them. `postgres`: its server, `filler`: a file on its small disk, if it has one.
    """

    service: Service
    deliver: int
    postgres: Postgres | None = None
    filler: Path | None = None
    stopped: set[str] = field(default_factory=set)

    def set_up(self, receiver: str, window_seconds: float) -> None:
        """Allow stops after windows of this length, and send them to the receiver."""
        settings = {"max_mode": "enforce", "veto_window_seconds": window_seconds}
        limits = {"stops_per_hour": None, "stops_share": None, "held_out_share": 0}
        with self.service.connect() as api:
            api.patch("/project", json=settings | limits).raise_for_status()
            endpoint = {"url": receiver, "event_types": ["run.stop_requested"]}
            api.post("/endpoints", json=endpoint).raise_for_status()

    def open_pending(self, name: str) -> tuple[str, str]:
        """A run whose stop is pending, and the decision."""
        with self.service.connect() as api:
            opened = api.post("/runs", json={"name": name, "mode": "enforce", "policy": "paper"}).raise_for_status()
            run_id = opened.json()["id"]
            points = [{"metric": "eval", "step": step, "value": value} for step, value in enumerate(DECLINE)]
            api.post(f"/runs/{run_id}/checkpoints", json={"step": 1, "uri": "file:///1"}).raise_for_status()
            answer = api.post(f"/runs/{run_id}/observations", json={"observations": points}).raise_for_status()
        decision = answer.json()["decision"]
        if decision is None or decision["state"] != "pending":
            raise LabError(f"the stop is not pending: {answer.text}")
        return run_id, decision["id"]

    def veto(self, decision_id: str, seconds: float) -> int | None:
        """The status of the answer to a veto; None: no answer within so many seconds."""
        with suppress(httpx.TransportError), self.service.connect(seconds) as api:
            return api.post(f"/decisions/{decision_id}/veto", json={"reason": "it only dips"}).status_code
        return None


@contextmanager
def running_installation(database: str, fault: str, window_seconds: float) -> Iterator[Installation]:
    """An installation of its own for one kind of fault."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="evalstop-veto-")))
        start = _start_postgres if database == "PostgreSQL" else _start_sqlite
        installation = start(stack, folder, fault)
        installation.set_up(stack.enter_context(receive_stops(installation.stopped)), window_seconds)
        yield installation


def _start_postgres(stack: ExitStack, folder: Path, fault: str) -> Installation:
    data = folder / "postgres"
    data.mkdir()
    folder.chmod(0o755)  # PostgreSQL has another owner
    postgres = Postgres(data)
    postgres.start()
    stack.callback(postgres.stop)
    environment = {**SETTINGS, "EVALSTOP_DATABASE_URL": postgres.url, "EVALSTOP_DATABASE_CONNECTIONS": "4"}
    minutes = {"late clock": "-15", "early clock": "15"}.get(fault)
    program = SERVICE if minutes is None else [sys.executable, "-c", LATE_CLOCK, minutes]
    (key,) = create_keys(environment)
    serve = run_server([*SERVICE, "serve", "--json", "--port", "0"], folder / "serve.log", environment, key)
    deliver = run_server([*program, "deliver", "--json"], folder / "deliver.log", environment)
    return Installation(stack.enter_context(serve), stack.enter_context(deliver).pid, postgres)


def _start_sqlite(stack: ExitStack, folder: Path, fault: str) -> Installation:
    data = folder / "data"
    data.mkdir()
    command = [*SERVICE, "up", "--json", "--port", "0", "--data-folder", str(data)]
    if fault == "full disk":
        script = 'mount -t tmpfs -o size=8m tmpfs "$0" && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", script, str(data), *command]
    up = stack.enter_context(run_server(command, folder / "up.log", SETTINGS))
    return Installation(up, up.pid, filler=Path(f"/proc/{up.pid}/root{data}/filler"))


@contextmanager
def _fault(installation: Installation, fault: str) -> Iterator[None]:
    """Cause a fault within the block."""
    match fault:
        case "outage" | "late clock" | "early clock":
            assert installation.postgres is not None
            installation.postgres.stop()
            yield
            # The worker comes back first: `serve` may write its extension only after it.
            with _stopped(installation.service.pid):
                installation.postgres.start()
                time.sleep(RECONNECT_SECONDS)
        case "full disk":
            assert installation.filler is not None
            _fill_disk(installation.filler)
            yield
            installation.filler.unlink()
        case _:
            with _stopped(installation.deliver if fault == "deliver stopped" else installation.service.pid):
                yield


@contextmanager
def _stopped(process: int) -> Iterator[None]:
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def _fill_disk(file: Path) -> None:
    with file.open("wb", buffering=0) as filler:
        for size in (65536, 4096, 1):
            with suppress(OSError):
                while True:
                    filler.write(b"x" * size)


def run_cycle(
    installation: Installation, fault: str, number: int, runs: int, window: float, chance: random.Random
) -> Counter[str]:
    """One fault around windows of so many seconds; returns what became of the vetoes: see `COLUMNS`."""
    pending = [installation.open_pending(f"cycle-{number}-{index}") for index in range(runs)]
    opened_at = time.monotonic()
    time.sleep(0.3 * window)
    refused = 0
    with _fault(installation, fault):
        time.sleep(0.02 * window)
        if fault != "deliver stopped":
            for _, decision_id in pending[:2]:
                status = installation.veto(decision_id, 0.2 * window)
                refused += status is None or status >= 500
        # The fault ends at some time around the end of the windows.
        ends_after = window * chance.uniform(0.8, 1.5)
        time.sleep(max(0.0, opened_at + ends_after - time.monotonic()))
        if fault == "deliver stopped":  # the windows have ended, and nobody was handed the stops
            return _repeat(installation, pending) + Counter(refused=refused)
    time.sleep(0.5 * window)
    return _repeat(installation, pending) + Counter(refused=refused)


def _repeat(installation: Installation, pending: Sequence[tuple[str, str]]) -> Counter[str]:
    """Send the vetoes again; a stop that arrived before is one that was handed over too early."""
    results: Counter[str] = Counter()
    for run_id, decision_id in pending:
        arrived = run_id in installation.stopped
        deadline = time.monotonic() + 30
        while (status := installation.veto(decision_id, 10.0)) is None or status == 503:
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        results["handed over" if arrived or status == 409 else "heard" if status == 200 else "error"] += 1
    return results


def run_kind(database: str, fault: str, cycles: int, runs: int, window_seconds: float, seed: int) -> Counter[str]:
    """Some cycles in one installation, one after the other."""
    results: Counter[str] = Counter()
    with running_installation(database, fault, window_seconds) as installation:
        for number in range(cycles):
            results += run_cycle(installation, fault, number, runs, window_seconds, random.Random(seed + number))
            results["cycles"] += 1
        heard = {f"cycle-{number}-{index}" for number in range(cycles) for index in range(runs)}
        time.sleep(2.0)
        with installation.service.connect() as api:
            listed = api.get("/decisions", params={"limit": 200, "state": "vetoed"}).raise_for_status().json()["items"]
        results["still vetoed"] = len({item["run_name"] for item in listed} & heard)
        results["arrived"] = len(installation.stopped)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cycles and print what became of the vetoes; returns 1 if a stop was handed over before one."""
    parser = argparse.ArgumentParser(prog="make bench-veto BENCH='cycles ...'", description=__doc__)
    parser.add_argument("--cycles", type=positive_number, default=10, help="cycles of each kind (default 10)")
    parser.add_argument("--runs", type=positive_number, default=4, help="pending stops in a cycle (default 4)")
    parser.add_argument("--window", type=float, default=10.0, help="length of the veto windows in seconds (default 10)")
    parser.add_argument("--side-by-side", type=positive_number, default=4, help="installations at a time (default 4)")
    parser.add_argument("--database", choices=FAULTS, action="append", help="only this one")
    parser.add_argument("--fault", action="append", help="only this one")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    kinds = [
        (database, fault)
        for database in options.database or FAULTS
        for fault in FAULTS[database]
        if not options.fault or fault in options.fault
    ]
    if not shutil.which("unshare"):
        kinds = [kind for kind in kinds if kind[1] != "full disk"]

    def run(kind: tuple[str, str]) -> Counter[str]:
        return run_kind(*kind, options.cycles, options.runs, options.window, options.seed)

    with ThreadPoolExecutor(options.side_by_side) as threads:
        results: Mapping[tuple[str, str], Counter[str]] = dict(zip(kinds, threads.map(run, kinds), strict=True))
    table = new_table("vetoes repeated after a fault", "database", "fault", *COLUMNS)
    for (database, fault), counts in results.items():
        table.add_row(database, fault, *(str(counts[column]) for column in COLUMNS))
    Console().print(table)
    failed = any(counts["handed over"] or counts["error"] or counts["arrived"] for counts in results.values())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
