"""The stage of `make bench-ingest`: databases, servers and clients of all contenders, up at the same time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psycopg
import sqlalchemy as sa

from evalstop_lab.benchmarks import servers
from evalstop_lab.benchmarks.ingest_contenders import (
    ALONE,
    COPY,
    EMBEDDED,
    EVALSTOP,
    MLFLOW,
    MLFLOW_EMBEDDED,
    OFF,
    OPTUNA,
    ROUTE,
    SLOW,
    SLOW_ALONE,
    Contender,
    Copies,
    Count,
    Posts,
    Reports,
    evalstop_run,
    in_postgres,
    in_sqlite,
    mlflow_run,
    processes,
)
from evalstop_lab.benchmarks.outside import Outside
from evalstop_lab.benchmarks.rounds import ASKING, CLIENTS, GRID, Shape
from evalstop_lab.benchmarks.servers import Server
from evalstop_lab.benchmarks.slow_disk import compiled
from evalstop_lab.benchmarks.worker import Worker, worker
from tests.fixtures.postgres_server import connected, conninfo, postgres

EXTRA_MS = 2
POSTGRES = ("shared_buffers=1GB", "max_wal_size=8GB", "checkpoint_timeout=15min", "max_connections=300")
"""What is not PostgreSQL's default, for all contenders: as one would set it for this work."""

ONE_A_COMMIT = {"EVALSTOP_COMMIT_REQUESTS": "1", "EVALSTOP_COMMIT_FLUSHERS": "16"}
"""A transaction a request, 16 at a time: with as few at a time as suffice for groups it would be held back."""
_SEVERAL = frozenset(shape for shape in GRID if shape.clients != CLIENTS[0])
_WIDEST = frozenset(shape for shape in GRID if shape.clients == CLIENTS[-1])


@dataclass
class Stage:
    """Brings up what is asked for, once; what is up ends with the `ends`."""

    ends: ExitStack
    folder: Path
    outside: Outside
    wanted: Callable[[str], bool]
    contenders: list[Contender] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def set(self) -> list[Contender]:
        """All contenders that are wanted."""
        self.generator = self._worker("evalstop_lab.benchmarks.generator")
        self.postgres = self.ends.enter_context(postgres(POSTGRES))
        self._on_postgres()
        self._on_slow_disk()
        self._on_sqlite()
        self._mlflow()
        self._optuna()
        if self.wanted(ROUTE):
            route = self.ends.enter_context(servers.bare_route(self.folder))
            self.contenders.append(Posts(ROUTE, (route,), self.generator, "evalstop", frozenset(GRID)))
        return self.contenders

    def _worker(self, module: str, *arguments: str) -> Worker:
        return self.ends.enter_context(worker([sys.executable, "-m", module, *arguments]))

    def database(self, name: str) -> str:
        """A new database on the server that all share, as a URL."""
        return created(self.postgres, name)

    def serve(self, name: str, key: str, environment: Mapping[str, str]) -> Server:
        """One more process of the service."""
        return self.ends.enter_context(servers.evalstop(self.folder / name, key, environment))

    def _on_postgres(self) -> None:
        several = [(count, sprayed) for count in (2, 4) for sprayed in (False, True)]
        names = [EVALSTOP, OFF, ALONE, COPY, *(processes(*item) for item in several)]
        if not any(map(self.wanted, names)):
            return
        url = self.database("evalstop")
        environment = {"EVALSTOP_DATABASE_URL": url}
        key = servers.prepared(environment)
        count = in_postgres(conninfo(url), "observations", "run_id")
        posts = partial(Posts, generator=self.generator, dialect="evalstop", open_run=evalstop_run(True), count=count)
        first = self.serve("first", key, environment)
        self._enter(posts(EVALSTOP, (first,), shapes=frozenset((*GRID, ASKING))))
        self._enter(posts(OFF, (first,), shapes=_SEVERAL, open_run=evalstop_run(False)))
        if self.wanted(ALONE):
            alone = self.serve("alone", key, environment | ONE_A_COMMIT)
            self._enter(posts(ALONE, (alone,), shapes=frozenset(GRID)))
        wanted = [item for item in several if self.wanted(processes(*item))]
        others = [self.serve(f"more-{n}", key, environment) for n in range(max((n for n, _ in wanted), default=1) - 1)]
        for number, sprayed in wanted:
            name = processes(number, sprayed)
            self._enter(posts(name, (first, *others[: number - 1]), shapes=_WIDEST, sprayed=sprayed))
        if self.wanted(COPY):
            copier = self._worker("evalstop_lab.benchmarks.copying", url)
            make_copied(url)
            self._enter(Copies(COPY, copier, "copied", in_postgres(conninfo(url), "copied", "run_id")))

    def _on_slow_disk(self) -> None:
        if not (self.wanted(SLOW) or self.wanted(SLOW_ALONE)):
            return
        library = compiled(self.folder / "slow-disk", EXTRA_MS)
        if library is None:
            self.notes.append("no C compiler: nothing was measured with a slower fsync")
            return
        server = self.ends.enter_context(postgres(POSTGRES, {"LD_PRELOAD": str(library)}))
        if server == self.postgres:
            self.notes.append("TEST_DATABASE_URL names the server: nothing was measured with a slower fsync")
            return
        url = created(server, "evalstop")
        environment = {"EVALSTOP_DATABASE_URL": url}
        key = servers.prepared(environment)
        count = in_postgres(conninfo(url), "observations", "run_id")
        for name, more in ((SLOW, {}), (SLOW_ALONE, ONE_A_COMMIT)):
            if self.wanted(name):
                serving = self.serve(name, key, environment | more)
                shapes = frozenset(GRID)
                self._enter(
                    Posts(name, (serving,), self.generator, "evalstop", shapes, evalstop_run(True), count=count)
                )

    def _on_sqlite(self) -> None:
        if not self.wanted(EMBEDDED):
            return
        data = self.folder / "sqlite"
        environment = {"EVALSTOP_DATA_FOLDER": str(data), "EVALSTOP_SQLITE_SYNCHRONOUS": "FULL"}
        serving = self.serve("embedded", servers.prepared(environment), environment)
        count = in_sqlite(data / "evalstop.db", "observations", "run_id")
        self._enter(
            Posts(EMBEDDED, (serving,), self.generator, "evalstop", frozenset(GRID), evalstop_run(True), count=count)
        )

    def _mlflow(self) -> None:
        if self.wanted(MLFLOW):
            url = self.database("mlflow")
            count = in_postgres(conninfo(url), "metrics", "run_uuid", str)
            self._tracking(MLFLOW, with_driver(url, "psycopg2"), count)
        if self.wanted(MLFLOW_EMBEDDED):
            path = self.folder / "mlflow.db"
            shapes = frozenset(shape for shape in GRID if shape.clients == ASKING.clients)
            self._tracking(MLFLOW_EMBEDDED, f"sqlite:///{path}", in_sqlite(path, "metrics", "run_uuid"), shapes)

    def _tracking(self, name: str, url: str, count: Count, shapes: frozenset[Shape] = frozenset(GRID)) -> None:
        server = self.ends.enter_context(servers.mlflow(self.outside.python(), self.folder / name, url))
        self._enter(Posts(name, (server,), self.generator, "mlflow", shapes, mlflow_run, count=count))

    def _optuna(self) -> None:
        if not self.wanted(OPTUNA):
            return
        url = self.database("optuna")
        script = Path(__file__).with_name("optuna_clients.py")
        command = [str(self.outside.python()), str(script), with_driver(url, "psycopg2"), str(ASKING.clients)]
        clients = self.ends.enter_context(worker(command))
        self._enter(Reports(OPTUNA, clients, in_postgres(conninfo(url), "trial_intermediate_values", "trial_id", int)))

    def _enter(self, contender: Contender) -> None:
        if self.wanted(contender.name):
            self.contenders.append(contender)


def created(server: str, name: str) -> str:
    """A new database of that name on a server, as a URL."""
    with connected(server) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    return sa.make_url(server).set(database=name).render_as_string(hide_password=False)


def with_driver(url: str, driver: str) -> str:
    """The URL as SQLAlchemy reads it, with the driver named."""
    return sa.make_url(url).set(drivername=f"postgresql+{driver}").render_as_string(hide_password=False)


def make_copied(url: str) -> None:
    """Make the table `copied`: columns, keys and partitions as those of `observations`."""
    with psycopg.connect(conninfo(url), autocommit=True) as connection:
        row = connection.execute(
            "SELECT pg_get_partkeydef(c.oid), (SELECT count(*) FROM pg_inherits WHERE inhparent = c.oid)"
            " FROM pg_class c WHERE c.oid = 'observations'::regclass"
        ).fetchone()
        assert row is not None
        key, parts = row
        connection.execute(
            "CREATE TABLE copied (LIKE observations INCLUDING ALL)" + (f" PARTITION BY {key}" if key else "")
        )
        for part in range(parts):
            connection.execute(
                f"CREATE TABLE copied_{part} PARTITION OF copied FOR VALUES WITH (MODULUS {parts}, REMAINDER {part})"
            )
