"""`make bench-ingest`: durable observations per second and CPU time per request, alone or beside another checkout.

wrk's connections post batches of new observations, each as soon as the one before is answered. Every acknowledged
observation must be in the database afterwards. Two checkouts run at the same time and take turns under each load. Other
machines, other times: compare ratios, or count instructions.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from uuid import uuid4

import httpx
import psutil
import psycopg
from rich.console import Console
from rich.progress import track
from rich.table import Table

from evalstop_lab.arguments import positive_number
from evalstop_lab.benchmarks.processes import (
    create_key,
    libpq_url,
    parse_with_database,
    run_service,
    temporary_database,
)
from evalstop_lab.errors import LabError, UnusableArguments
from evalstop_lab.report import new_table
from evalstop_lab.service_process import Service

LONGEST_SECONDS = 600
RUNS_A_CLIENT = 2
"""Runs take turns, so that a run's next batch is not sent before its last one has been answered."""


@dataclass(frozen=True, order=True)
class Shape:
    """A load: observations per request, and clients."""

    batch: int
    clients: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.clients}"


MOST_CLIENTS = Shape(1, 64)
SHAPES = (Shape(1, 1), Shape(1, 8), MOST_CLIENTS, Shape(100, 8), Shape(100, 64))


@dataclass(frozen=True, kw_only=True)
class Load:
    """The result of a load; `observations` are those acknowledged, `refused` the requests answered by an error.

    `service_seconds`: of the service's CPU time.
    """

    observations: int
    requests: int
    refused: int
    seconds: float
    p50_ms: float
    p99_ms: float
    service_seconds: float = 0.0

    @property
    def per_second(self) -> float:
        return self.observations / self.seconds


def run_load(
    server: Service,
    runs: Sequence[str],
    shape: Shape,
    *,
    seconds: int = LONGEST_SECONDS,
    requests: int = 0,
    first_step: int = 0,
) -> Load:
    """Post to these runs in turns for so many whole seconds, or until so many requests have been answered.

    Raises LabError if connections break or nothing is accepted.
    """
    if shutil.which("wrk") is None:
        raise UnusableArguments("This benchmark needs wrk (on Debian: apt install wrk).")
    with tempfile.NamedTemporaryFile("w", suffix=".runs") as file:
        file.write("\n".join(runs) + "\n")
        file.flush()
        command = ["wrk", "-t1", f"-c{shape.clients}", f"-d{seconds}s", "--timeout", f"{LONGEST_SECONDS}s"]
        command += ["-s", str(Path(__file__).with_name("load.lua")), server.url, "--"]
        command += [file.name, server.key, str(shape.batch), str(first_step), str(requests)]
        completed = subprocess.run(command, capture_output=True, text=True)
    if completed.returncode:
        raise LabError(completed.stderr or completed.stdout)
    figures = json.loads(completed.stderr.splitlines()[-1])
    broken, accepted = figures.pop("broken"), figures["requests"] - figures["refused"]
    if broken or not accepted:
        raise LabError(f"{broken} connections broke, {figures['refused']} of {figures['requests']} were refused.")
    return Load(observations=accepted * shape.batch, **figures)


@dataclass(frozen=True)
class Contender:
    """A service whose CPU time is measured, and its database."""

    name: str
    server: Service
    url: str

    def measure(self, shape: Shape, seconds: int) -> Load:
        """Run the load on new runs; raises LabError unless the acknowledged observations are stored."""
        runs = open_runs(self.server, shape)
        before = measure_cpu_seconds(self.server.pid)
        load = run_load(self.server, runs, shape, seconds=seconds)
        spent = measure_cpu_seconds(self.server.pid) - before
        stored = count_rows(self.url, runs)
        # wrk ends without waiting for the last answers: each client may have one batch more on record.
        if not load.observations <= stored <= load.observations + shape.clients * shape.batch:
            raise LabError(f"{self.name} at {shape} acknowledged {load.observations} observations and stored {stored}.")
        return replace(load, service_seconds=spent)


def open_runs(server: Service, shape: Shape) -> list[str]:
    """Open the runs of a load under the policy `default`; returns their ids."""

    def open_run(api: httpx.Client) -> str:
        response = api.post("/runs", json={"name": str(uuid4()), "policy": "default"})
        return str(response.raise_for_status().json()["id"])

    with server.connect() as api, ThreadPoolExecutor(8) as pool:
        return list(pool.map(open_run, [api] * (RUNS_A_CLIENT * shape.clients)))


def count_rows(url: str, runs: Sequence[str]) -> int:
    """Count the observations of runs in a PostgreSQL database."""
    with psycopg.connect(libpq_url(url)) as connection:
        query = "SELECT count(*) FROM observations WHERE run_id::text = ANY(%s)"
        return int((connection.execute(query, (list(runs),)).fetchone() or [0])[0])


def measure_cpu_seconds(pid: int) -> float:
    """The CPU time of a process and its descendants."""
    process = psutil.Process(pid)
    processes = [process, *process.children(recursive=True)]
    return float(sum(sum(item.cpu_times()[:4]) for item in processes))  # [2:4] are of children that have exited


def start_contenders(ends: ExitStack, options: argparse.Namespace, folder: Path) -> list[Contender]:
    """Start this checkout's service, and that of the other one, which end with `ends`.

    The other code runs with its own environment, or without one with the packages that are installed here.
    """
    codes: dict[str, tuple[str, dict[str, str]]] = {"this checkout": (sys.executable, {})}
    if options.against is not None:
        other = options.against.resolve()
        rooms = ":".join(str(other / room) for room in ("detectors", "service", "clients", "lab"))
        own_python = other / ".venv/bin/python"
        codes["the other"] = (str(own_python) if own_python.exists() else sys.executable, {"PYTHONPATH": rooms})
    contenders = []
    for name, (python, environment) in codes.items():
        url = ends.enter_context(temporary_database(options.database_url, "ingest"))
        environment |= {"EVALSTOP_DATABASE_URL": url}
        key = create_key(environment, python)
        server = ends.enter_context(run_service(folder / name, key, environment, program=(python,)))
        contenders.append(Contender(name, server, url))
    return contenders


Cells = Mapping[tuple[Shape, str], Sequence[Load]]
"""The rounds of each contender under each load."""


def measure_in_turns(contenders: Sequence[Contender], options: argparse.Namespace) -> Cells:
    """Measure all contenders under the chosen loads, round by round; none is always first."""
    shapes = [shape for shape in SHAPES if any(fnmatchcase(str(shape), pattern) for pattern in options.loads)]
    for contender in contenders:
        contender.measure(MOST_CLIENTS, 1)  # warms up
    turns = [
        (shape, contender)
        for number in range(options.rounds)
        for place, shape in enumerate(shapes)
        for contender in contenders[:: -1 if (number + place) % 2 else 1]
    ]
    cells: dict[tuple[Shape, str], list[Load]] = {}
    for shape, contender in track(turns, "measuring", console=Console(stderr=True), transient=True):
        cells.setdefault((shape, contender.name), []).append(contender.measure(shape, options.seconds))
    return cells


def build_table(cells: Cells) -> Table:
    """A row for each contender under each load: medians over the rounds."""
    title = "observations per second, and microseconds of the service's CPU time per request; all share the cores"
    headings = ("per second", "min - max", "p50 ms", "p99 ms", "service us", "refused")
    table = new_table(title, "load", "contender", *headings, left=2)

    def take_median(rounds: Sequence[Load], figure: Callable[[Load], float]) -> float:
        return statistics.median(map(figure, rounds))

    for (shape, name), rounds in sorted(cells.items()):
        rates = [item.per_second for item in rounds]
        table.add_row(
            str(shape),
            name,
            f"{statistics.median(rates):,.0f}",
            f"{min(rates):,.0f} - {max(rates):,.0f}",
            f"{take_median(rounds, lambda item: item.p50_ms):.2f}",
            f"{take_median(rounds, lambda item: item.p99_ms):.1f}",
            f"{take_median(rounds, lambda item: 1e6 * item.service_seconds / item.requests):,.0f}",
            f"{sum(item.refused for item in rounds):,}",
        )
    return table


COUNTED_REQUESTS = 20 * MOST_CLIENTS.clients
"""The posts whose instructions are counted, after half as many that warm up."""


def count_instructions(database_url: str, folder: Path) -> float:
    """The instructions of the service's event loop for a post of one observation at 64 clients, by callgrind.

    They depend less on the machine than times do; on a busy one, where a commit holds fewer posts, they are more.
    """
    if shutil.which("valgrind") is None:
        raise UnusableArguments("--instructions needs valgrind (on Debian: apt install valgrind).")
    # Other threads would count what posts do not cause, such as the import of ruptures ten seconds after the start.
    counting = ("valgrind", "--tool=callgrind", "--instr-atstart=no", "--separate-threads=yes")
    with ExitStack() as ends:
        environment = {"EVALSTOP_DATABASE_URL": ends.enter_context(temporary_database(database_url, "instructions"))}
        key = create_key(environment)
        program = (*counting, f"--callgrind-out-file={folder}/counted", sys.executable)
        service = ends.enter_context(run_service(folder, key, environment, program=program))
        post = partial(run_load, service, open_runs(service, MOST_CLIENTS), MOST_CLIENTS)
        post(requests=COUNTED_REQUESTS // 2)
        for switch in ("on", "off"):
            subprocess.run(["callgrind_control", "-i", switch, str(service.pid)], check=True, capture_output=True)
            if switch == "on":
                load = post(requests=COUNTED_REQUESTS, first_step=COUNTED_REQUESTS)
        subprocess.run(["callgrind_control", "-d", str(service.pid)], check=True, capture_output=True)
        totals = [re.search(r"^totals: (\d+)", file.read_text(), re.M) for file in folder.glob("counted*-01")]
    return sum(int(match[1]) for match in totals if match) / load.requests


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and print its table, or the number of instructions."""
    parser = argparse.ArgumentParser(prog="make bench-ingest", description=__doc__)
    parser.add_argument("--rounds", type=positive_number, default=5, help="rounds per load (default: 5)")
    parser.add_argument("--seconds", type=positive_number, default=2, help="seconds per load and round (default: 2)")
    parser.add_argument(
        "--loads",
        nargs="+",
        default=["*"],
        metavar="PATTERN",
        help="such as '100 x 8' or '1 x *': observations per request x clients (default: all)",
    )
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout, to compare with")
    parser.add_argument("--instructions", action="store_true", help="only count the event loop's instructions per post")
    options = parse_with_database(parser, arguments)
    console = Console() if sys.stdout.isatty() else Console(width=160)
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="evalstop-bench-")))
        if options.instructions:
            count = count_instructions(options.database_url, folder)
            console.print(f"{count:,.0f} instructions per post of one observation at 64 clients")
        else:
            console.print(build_table(measure_in_turns(start_contenders(ends, options, folder), options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
