"""The contenders of `make bench-ingest`: the service, the bound, replicas, and another checkout."""

from __future__ import annotations

import argparse
import io
import math
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from uuid import uuid4

import httpx
import psutil
import psycopg

from evalstop_lab.benchmarks.load import Load, run_load
from evalstop_lab.benchmarks.processes import (
    JobFailed,
    create_keys,
    libpq_url,
    measure_cpu_seconds,
    run_service,
    temporary_database,
)
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.service_process import Service, run_server

EVALSTOP, BOUND, AGAINST = "EvalStop", "bound", "the other checkout"
REPLICAS = "4 replicas, sticky"
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
REPLICA_SHAPES = (MOST_CLIENTS, Shape(100, 64))


@dataclass(frozen=True)
class Measurement:
    """One round of one contender: its load, and microseconds of CPU time per request, NaN if unknown."""

    load: Load
    server_us: float
    database_us: float


@dataclass(frozen=True)
class Contender:
    """Servers to which a load is posted, each getting its share of the clients; their CPU time is measured.

    `opener`: the server that opens the runs. `url`: their database.
    """

    name: str
    servers: tuple[Service, ...]
    opener: Service
    url: str
    database_pid: int | None = None
    shapes: tuple[Shape, ...] = SHAPES

    def measure(self, shape: Shape, seconds: int) -> Measurement:
        """Run the load on new runs; raises JobFailed unless the acknowledged observations are stored."""
        with self.opener.connect() as api, ThreadPoolExecutor(8) as pool:
            runs = list(pool.map(lambda _: open_run(api), range(RUNS_A_CLIENT * shape.clients)))
        addresses = [server.address for server in self.servers]
        before = self._read_cpu()
        try:
            load = run_load(addresses, runs, self.opener.key, clients=shape.clients, batch=shape.batch, seconds=seconds)
        except JobFailed as error:
            raise JobFailed(f"{self.name} at {shape}: {error.detail}") from error
        server, database = (after - start for after, start in zip(self._read_cpu(), before, strict=True))
        stored = count_rows(self.url, runs)
        # wrk ends without waiting for the last answers: each client may have one batch more on record.
        if not load.observations <= stored <= load.observations + shape.clients * shape.batch:
            raise JobFailed(
                f"{self.name} at {shape} acknowledged {load.observations} observations and stored {stored}."
            )
        return Measurement(load, 1e6 * server / load.requests, 1e6 * database / load.requests)

    def _read_cpu(self) -> tuple[float, float]:
        database = math.nan if self.database_pid is None else measure_cpu_seconds(self.database_pid)
        return sum(measure_cpu_seconds(server.pid) for server in self.servers), database


def open_run(api: httpx.Client) -> str:
    """Open a run under the policy `default`; returns its id."""
    response = api.post("/runs", json={"name": str(uuid4()), "policy": "default"})
    if not response.is_success:
        raise JobFailed(f"{response.request.url} answered {response.status_code}: {response.text[:300]}")
    return str(response.json()["id"])


def count_rows(url: str, runs: Sequence[str]) -> int:
    """Count the observations of runs in a PostgreSQL database."""
    with psycopg.connect(libpq_url(url)) as connection:
        query = "SELECT count(*) FROM observations WHERE run_id::text = ANY(%s)"
        return int((connection.execute(query, (list(runs),)).fetchone() or [0])[0])


def find_postgres_pid(url: str) -> int | None:
    """The process id of PostgreSQL's postmaster; None if the server runs on another machine."""
    with psycopg.connect(libpq_url(url)) as connection:
        pid = connection.info.backend_pid
        backend = psutil.Process(pid) if psutil.pid_exists(pid) else None
        return backend.ppid() if backend is not None and backend.name().startswith("postgres") else None


def start_contenders(ends: ExitStack, options: argparse.Namespace, folder: Path) -> list[Contender]:
    """Start the selected contenders, which end with `ends`."""
    wants, database_pid = partial(is_wanted, options.only), find_postgres_pid(options.database_url)
    url = ends.enter_context(temporary_database(options.database_url, "ingest"))
    environment = {"EVALSTOP_DATABASE_URL": url}
    (key,) = create_keys(environment)
    service = ends.enter_context(run_service(folder / EVALSTOP, key, environment))
    add = partial(Contender, opener=service, url=url, database_pid=database_pid)
    contenders = [add(EVALSTOP, (service,))] if wants(EVALSTOP) else []
    if wants(BOUND):
        command = [sys.executable, "-m", "evalstop_lab.benchmarks.ingest.bound", url]
        contenders.append(add(BOUND, (ends.enter_context(run_server(command, folder / "bound.log", {})),)))
    if wants(REPLICAS):
        folders = [folder / f"replica-{number}" for number in range(1, 4)]
        replicas = service, *(ends.enter_context(run_service(item, key, environment)) for item in folders)
        contenders.append(add(REPLICAS, replicas, shapes=REPLICA_SHAPES))
    if options.against is not None and wants(AGAINST):
        other_url = ends.enter_context(temporary_database(options.database_url, "against"))
        python, other = ends.enter_context(check_out(options.against))
        other |= {"EVALSTOP_DATABASE_URL": other_url}
        (other_key,) = create_keys(other, python=python)
        server = ends.enter_context(run_service(folder / AGAINST, other_key, other, program=(python,)))
        contenders.append(Contender(AGAINST, (server,), server, other_url, database_pid))
    return contenders


def is_wanted(only: Sequence[str] | None, name: str) -> bool:
    """Whether a contender matches a pattern, or all are wanted; another checkout is if this one is."""
    names = {name, name.replace(AGAINST, EVALSTOP)}
    return not only or any(fnmatchcase(item, pattern) for item in names for pattern in only)


@contextmanager
def check_out(name: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The Python and the environment that run the service of a checkout at a path, or of a revision of this repository.

    Without an environment of its own the other code runs with the packages that are installed here.
    """
    with ExitStack() as ends:
        path = Path(name)
        if not path.is_dir():
            archive = subprocess.run(["git", "archive", name], capture_output=True)
            if archive.returncode:
                reason = archive.stderr.decode().strip()
                raise UnusableArguments(f"--against {name}: it is no folder, and no revision in this one ({reason}).")
            path = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="evalstop-against-")))
            with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
                files.extractall(path, filter="data")
        python = path.resolve() / ".venv/bin/python"
        folders = (str(path.resolve() / room) for room in ("detectors", "service", "clients", "lab"))
        yield str(python) if python.exists() else sys.executable, {"PYTHONPATH": ":".join(folders)}
