"""Who takes part in `make bench-ingest`: each is handed a load and says what came of it, rows counted."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID, uuid4

import httpx
import msgspec
import psycopg

from evalstop_lab.benchmarks.copying import CopyJob
from evalstop_lab.benchmarks.dialects import EVALS, MIX
from evalstop_lab.benchmarks.generator import Job, Load
from evalstop_lab.benchmarks.rounds import ASKING, LARGEST_COPY, Shape
from evalstop_lab.benchmarks.servers import Server
from evalstop_lab.benchmarks.worker import JobFailed, Worker

EVALSTOP = "EvalStop"
OFF = "EvalStop, detectors off"
ALONE = "EvalStop, a transaction a request"
SLOW = "EvalStop, fsync 2 ms slower"
SLOW_ALONE = "EvalStop, a transaction a request, fsync 2 ms slower"
EMBEDDED = "EvalStop on SQLite"
MLFLOW = "MLflow"
MLFLOW_EMBEDDED = "MLflow on SQLite"
OPTUNA = "Optuna"
COPY = "bare COPY"
ROUTE = "bare ASGI route"

FEWEST_RUNS = 8  # even a lone client reports several runs

Count = Callable[[Sequence[str]], int]
"""How many observations of these runs are stored."""


def processes(count: int, sprayed: bool) -> str:
    """The name of several `serve` processes on one database."""
    return f"EvalStop, {count} processes{', runs sprayed' if sprayed else ''}"


class Contender(Protocol):
    """Someone who takes a load."""

    @property
    def name(self) -> str: ...

    def takes(self, shape: Shape) -> bool:
        """Whether this load is one for it."""

    def measure(self, shape: Shape, seconds: float) -> Load:
        """Take it for so long; raises JobFailed when what was acknowledged is not what is stored."""


@dataclass(frozen=True)
class Posts:
    """A server that is posted to. `open_run` gives the id of a new run; a bare server has none and stores nothing."""

    name: str
    servers: tuple[Server, ...]
    generator: Worker
    dialect: str
    shapes: frozenset[Shape]
    open_run: Callable[[httpx.Client], str] = field(default=lambda _: str(uuid4()))
    count: Count | None = None
    sprayed: bool = False

    def takes(self, shape: Shape) -> bool:
        return shape in self.shapes

    def measure(self, shape: Shape, seconds: float) -> Load:
        runs = self._open(max(shape.clients, FEWEST_RUNS))
        job = Job(
            addresses=tuple(server.address for server in self.servers),
            dialect=self.dialect,
            runs=tuple(runs),
            clients=shape.clients,
            batch=shape.batch,
            seconds=seconds,
            key=self.servers[0].key,
            metrics=EVALS if shape.asking else MIX,
            sprayed=self.sprayed,
            expects='"should_stop":' if shape.asking else "",
        )
        try:
            load = self.generator.ask(job, Load)
        except JobFailed as error:
            raise JobFailed(f"{self.name} at {shape}: {error.detail}") from error
        if self.count is not None:
            _agree(self.name, load, self.count(runs))
        return load

    def _open(self, count: int) -> list[str]:
        server = self.servers[0]
        headers = {"Authorization": f"Bearer {server.key}"} if server.key else {}
        with (
            httpx.Client(base_url=server.url, headers=headers, timeout=60) as api,
            ThreadPoolExecutor(8) as clients,
        ):
            return list(clients.map(lambda _: self.open_run(api), range(count)))


@dataclass(frozen=True)
class Copies:
    """Bare COPY into a table that is keyed and partitioned as the service's."""

    name: str
    copier: Worker
    table: str
    count: Count

    def takes(self, shape: Shape) -> bool:
        return shape.clients == LARGEST_COPY.clients and not shape.asking

    def measure(self, shape: Shape, seconds: float) -> Load:
        runs = tuple(uuid4() for _ in range(64))
        job = CopyJob(table=self.table, runs=runs, clients=shape.clients, batch=shape.batch, seconds=seconds)
        load = self.copier.ask(job, Load)
        _agree(self.name, load, self.count([str(run) for run in runs]))
        return load


class _Reported(Load, frozen=True, kw_only=True):
    trials: tuple[int, ...]


@dataclass(frozen=True)
class Reports:
    """Optuna: each client reports a value of its trial and asks whether to prune it."""

    name: str
    clients: Worker
    count: Count

    def takes(self, shape: Shape) -> bool:
        return shape == ASKING

    def measure(self, shape: Shape, seconds: float) -> Load:
        load = self.clients.ask({"seconds": seconds}, _Reported)
        _agree(self.name, load, self.count([str(trial) for trial in load.trials]))
        return load


def _agree(name: str, load: Load, stored: int) -> None:
    if stored != load.observations:
        raise JobFailed(f"{name} acknowledged {load.observations} observations and stores {stored}.")


def evalstop_run(watched: bool) -> Callable[[httpx.Client], str]:
    """Opens a run under `default`; unwatched, the metrics that are posted have no part in its verdict."""
    metrics: dict[str, Any] = {}
    if not watched:
        metrics = {"metrics": {"never-posted": {"role": "eval", "direction": "maximize"}}}

    def opened(api: httpx.Client) -> str:
        return str(_answer(api.post("/api/v1/runs", json={"name": str(uuid4()), "policy": "default"} | metrics))["id"])

    return opened


def mlflow_run(api: httpx.Client) -> str:
    """Opens a run of MLflow's default experiment."""
    answer = _answer(api.post("/api/2.0/mlflow/runs/create", json={"experiment_id": "0"}))
    return str(answer["run"]["info"]["run_id"])


def _answer(response: httpx.Response) -> Any:
    if not response.is_success:
        raise JobFailed(f"{response.request.url} answered {response.status_code}: {response.text[:300]}")
    return msgspec.json.decode(response.content)


def in_postgres(conninfo: str, table: str, column: str, kind: type[Any] = UUID) -> Count:
    """Counts rows of a table of PostgreSQL by the id of their run."""

    def count(runs: Sequence[str]) -> int:
        with psycopg.connect(conninfo) as connection:
            query = f"SELECT count(*) FROM {table} WHERE {column} = ANY(%s)"  # noqa: S608
            row = connection.execute(query, ([kind(run) for run in runs],)).fetchone()
            assert row is not None
            return int(row[0])

    return count


def in_sqlite(path: Path, table: str, column: str) -> Count:
    """Counts rows of a table of SQLite by the id of their run, with or without its dashes."""

    def count(runs: Sequence[str]) -> int:
        connection = sqlite3.connect(path)
        try:
            places = ",".join("?" * len(runs))
            query = f"SELECT count(*) FROM {table} WHERE {column} IN ({places})"  # noqa: S608
            return int(connection.execute(query, [run.replace("-", "") for run in runs]).fetchone()[0])
        finally:
            connection.close()

    return count
