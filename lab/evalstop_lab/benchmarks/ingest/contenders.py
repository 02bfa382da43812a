"""The contenders of `make bench-ingest`: the service, the bound, replicas behind nginx, another checkout, MLflow."""

from __future__ import annotations

import math
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import psutil
import psycopg
import sqlalchemy as sa

from evalstop_lab.benchmarks.databases import libpq_url, temporary_database
from evalstop_lab.benchmarks.ingest.load_generator import Job
from evalstop_lab.benchmarks.ingest.load_process import LoadGenerator, start_load_generator
from evalstop_lab.benchmarks.ingest.results import (
    AGAINST,
    BOUND,
    DIRECT,
    EVALSTOP,
    HASHED,
    MLFLOW,
    ON_SQLITE,
    REPLICA_SHAPES,
    ROUND_ROBIN,
    SHAPES,
    Measurement,
    Shape,
)
from evalstop_lab.benchmarks.processes import (
    JobFailed,
    Server,
    find_free_port,
    measure_cpu_seconds,
    prepare_service,
    run_server,
    run_service,
    wait_until_answers,
)
from evalstop_lab.service_process import run_logged

FEWEST_RUNS = 8
"""The minimum number of runs to which clients post in turns."""

REPLICAS = 4

CountRows = Callable[[Sequence[str]], int]
"""Counts the stored observations of these runs."""


@dataclass(frozen=True)
class Contender:
    """Servers to which a load is posted.

    `servers`: client i posts to server i modulo their number; their CPU time is measured.
    `opener`: the server that opens runs.
    `proxy`: the address to post to instead of the servers' addresses.
    """

    name: str
    generator: LoadGenerator
    servers: tuple[Server, ...]
    opener: Server
    count_rows: CountRows
    database_pid: int | None = None
    shapes: tuple[Shape, ...] = SHAPES
    proxy: tuple[str, int] | None = None
    format: str = "evalstop"

    def measure(self, shape: Shape, seconds: float) -> Measurement:
        """Run the load on new runs; raises JobFailed if the acknowledged observations are not those stored."""
        opens = OPENERS[self.format]
        with self.opener.connect() as api, ThreadPoolExecutor(8) as pool:
            runs = tuple(pool.map(lambda _: opens(api), range(max(shape.clients, FEWEST_RUNS))))
        job = Job(
            addresses=(self.proxy,) if self.proxy else tuple(server.address for server in self.servers),
            format=self.format,
            runs=runs,
            clients=shape.clients,
            batch=shape.batch,
            seconds=seconds,
            key=self.opener.key,
        )
        before = self._read_cpu()
        try:
            load = self.generator.generate(job)
        except JobFailed as error:
            raise JobFailed(f"{self.name} at {shape}: {error.detail}") from error
        server, database = (after - start for after, start in zip(self._read_cpu(), before, strict=True))
        stored = self.count_rows(runs)
        if stored != load.observations:
            raise JobFailed(
                f"{self.name} at {shape} acknowledged {load.observations} observations and stored {stored}."
            )
        return Measurement(load, 1e6 * server / load.requests, 1e6 * database / load.requests)

    def _read_cpu(self) -> tuple[float, float]:
        database = math.nan if self.database_pid is None else measure_cpu_seconds(self.database_pid)
        return sum(measure_cpu_seconds(server.pid) for server in self.servers), database


def open_run(api: httpx.Client) -> str:
    """Open a run under the policy `default`; returns its id."""
    return str(_decode_response(api.post("/api/v1/runs", json={"name": str(uuid4()), "policy": "default"}))["id"])


def _open_mlflow_run(api: httpx.Client) -> str:
    created = _decode_response(api.post("/api/2.0/mlflow/runs/create", json={"experiment_id": "0"}))
    return str(created["run"]["info"]["run_id"])


OPENERS: dict[str, Callable[[httpx.Client], str]] = {"evalstop": open_run, "mlflow": _open_mlflow_run}


def _decode_response(response: httpx.Response) -> Any:
    if not response.is_success:
        raise JobFailed(f"{response.request.url} answered {response.status_code}: {response.text[:300]}")
    return response.json()


def count_in_postgres(url: str, table: str = "observations", column: str = "run_id") -> CountRows:
    """Return a function that counts the rows of runs in a PostgreSQL database."""

    def count_rows(runs: Sequence[str]) -> int:
        with psycopg.connect(libpq_url(url)) as connection:
            query = f"SELECT count(*) FROM {table} WHERE {column}::text = ANY(%s)"  # noqa: S608 - of constants alone
            row = connection.execute(query, (list(runs),)).fetchone()
            assert row is not None
            return int(row[0])

    return count_rows


def count_in_sqlite(path: Path) -> CountRows:
    """Return a function that counts the observations of runs in an SQLite database."""

    def count_rows(runs: Sequence[str]) -> int:
        with sqlite3.connect(path) as connection:
            places = ",".join("?" * len(runs))
            query = f"SELECT count(*) FROM observations WHERE run_id IN ({places})"  # noqa: S608 - of placeholders
            return int(connection.execute(query, [UUID(run).hex for run in runs]).fetchone()[0])

    return count_rows


def find_postgres_pid(url: str) -> int | None:
    """The process id of PostgreSQL's postmaster; None if the server runs on another machine."""
    with psycopg.connect(libpq_url(url)) as connection:
        row = connection.execute("SELECT pg_backend_pid()").fetchone()
        assert row is not None
        backend = psutil.Process(row[0]) if psutil.pid_exists(row[0]) else None
        return backend.ppid() if backend is not None and backend.name().startswith("postgres") else None


@dataclass
class Lineup:
    """Starts the selected contenders; they end with `ends`."""

    ends: ExitStack
    server_url: str
    folder: Path
    wants: Callable[[str], bool]
    against: str | None = None
    mlflow: str | None = None
    contenders: list[Contender] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def start(self) -> list[Contender]:
        self.generator = self.ends.enter_context(start_load_generator())
        self.database_pid = find_postgres_pid(self.server_url)
        if self.database_pid is None:
            self.notes.append("PostgreSQL runs on another machine: its CPU time is not measured")
        self._start_on_postgres(EVALSTOP, sys.executable)
        self._start_on_sqlite(EVALSTOP, sys.executable)
        if self.against is not None:
            self._start_on_postgres(AGAINST, self.against)
            self._start_on_sqlite(AGAINST, self.against)
        if self.mlflow is not None and self.wants(MLFLOW):
            self._start_mlflow(self.mlflow)
        return self.contenders

    def _start_on_postgres(self, name: str, python: str) -> None:
        is_evalstop = name == EVALSTOP
        wants_replicas = is_evalstop and any(map(self.wants, (DIRECT, HASHED, ROUND_ROBIN)))
        wants_bound = is_evalstop and self.wants(BOUND)
        if not (self.wants(name) or wants_bound or wants_replicas):
            return
        url = self.ends.enter_context(temporary_database(self.server_url, "ingest"))
        environment = {"EVALSTOP_DATABASE_URL": url}
        key = prepare_service(environment, python)
        service = self.ends.enter_context(run_service(self.folder / name, key, environment, python=python))
        add = partial(self._add, opener=service, count_rows=count_in_postgres(url), database_pid=self.database_pid)
        if self.wants(name):
            add(name, (service,))
        if wants_bound:
            add(BOUND, (self._start_bound(url),))
        if wants_replicas:
            other_servers = [
                self.ends.enter_context(run_service(self.folder / f"replica-{number}", key, environment))
                for number in range(1, REPLICAS)
            ]
            self._add_replicas((service, *other_servers), partial(add, shapes=REPLICA_SHAPES))

    def _start_on_sqlite(self, name: str, python: str) -> None:
        wants_bound = name == EVALSTOP and self.wants(BOUND + ON_SQLITE)
        if not (self.wants(name + ON_SQLITE) or wants_bound):
            return
        folder = self.folder / f"{name} SQLite"
        environment = {"EVALSTOP_DATA_FOLDER": str(folder), "EVALSTOP_SQLITE_SYNCHRONOUS": "FULL"}
        key = prepare_service(environment, python)
        service = self.ends.enter_context(run_service(folder, key, environment, python=python))
        path = folder / "evalstop.db"
        add = partial(self._add, opener=service, count_rows=count_in_sqlite(path))
        if self.wants(name + ON_SQLITE):
            add(name + ON_SQLITE, (service,))
        if wants_bound:
            add(BOUND + ON_SQLITE, (self._start_bound(f"sqlite:///{path}"),))

    def _start_bound(self, url: str) -> Server:
        command = [sys.executable, "-m", "evalstop_lab.benchmarks.ingest.bound", url]
        return self.ends.enter_context(run_server(command, self.folder / "bound.log", {}))

    def _add_replicas(self, replicas: tuple[Server, ...], add: Callable[..., None]) -> None:
        if self.wants(DIRECT):
            add(DIRECT, replicas)
        for name, hashed in ((HASHED, True), (ROUND_ROBIN, False)):
            if self.wants(name) and shutil.which("nginx") is None:
                self.notes.append(f"nginx is not installed: {name} is not measured")
            elif self.wants(name):
                add(name, replicas, proxy=self.ends.enter_context(run_nginx(self.folder / name, replicas, hashed)))

    def _start_mlflow(self, python: str) -> None:
        url = self.ends.enter_context(temporary_database(self.server_url, "mlflow"))
        store = sa.make_url(url).set(drivername="postgresql+psycopg2").render_as_string(hide_password=False)
        port, log = find_free_port(), self.folder / "mlflow.log"
        command = [python, "-m", "mlflow", "server", "--backend-store-uri", store, "--host", "127.0.0.1"]
        command += ["--port", str(port), "--workers", "1", "--uvicorn-opts", "--log-level warning"]
        # With its default pool of 5 connections, 64 clients run into timeouts.
        environment = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SQLALCHEMYSTORE_POOL_SIZE": "40"}
        process = self.ends.enter_context(run_logged(command, log, environment))
        wait_until_answers(f"http://127.0.0.1:{port}/health", process, log)
        server = Server(("127.0.0.1", port), process.pid)
        count_rows = count_in_postgres(url, "metrics", "run_uuid")
        self._add(
            MLFLOW, (server,), opener=server, count_rows=count_rows, database_pid=self.database_pid, format="mlflow"
        )

    def _add(self, name: str, servers: tuple[Server, ...], **options: Any) -> None:
        self.contenders.append(Contender(name, self.generator, servers, **options))


NGINX = """
daemon off; worker_processes 1; pid nginx.pid; error_log error.log warn;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_buffer_size 1m; client_max_body_size 16m;
    map $uri $run_key {{ ~^/api/v1/runs/(?<id>[0-9a-f-]+) $id; default $remote_addr; }}
    upstream evalstop {{
        {balance}
        {servers}
        keepalive 128; keepalive_timeout 4s;
    }}
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://evalstop; proxy_http_version 1.1; proxy_set_header Connection ""; }}
    }}
}}
"""


@contextmanager
def run_nginx(folder: Path, replicas: Sequence[Server], hashed: bool) -> Iterator[tuple[str, int]]:
    """Run nginx in front of the replicas, by hash of the run's id or round robin; yields its address."""
    folder.mkdir(parents=True)
    port = find_free_port()
    servers = " ".join("server {}:{};".format(*item.address) for item in replicas)
    balance = "hash $run_key consistent;" if hashed else ""
    (folder / "nginx.conf").write_text(NGINX.format(balance=balance, servers=servers, port=port))
    command = ["nginx", "-p", str(folder), "-c", "nginx.conf", "-e", str(folder / "error.log")]
    with run_logged(command, folder / "nginx.log") as process:
        wait_until_answers(f"http://127.0.0.1:{port}/livez", process, folder / "nginx.log")
        yield "127.0.0.1", port
