"""Server processes that tests kill: replicas of the service, and a PostgreSQL that can be restarted."""

from __future__ import annotations

import os
import pwd
import random
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psycopg
import sqlalchemy as sa

from tests.acceptance.programs import Program
from tests.faults.retrying_clients import DEADLINE_SECONDS, wait_until
from tests.fixtures.postgres_server import open_connection, start_postgres


@contextmanager
def start_replica(folder: Path, database_url: str, under: Sequence[str] = (), **environment: str) -> Iterator[Replicas]:
    """Start one `evalstop serve`."""
    with start_replicas(folder, database_url, 1, under, **environment) as service:
        yield service


@contextmanager
def start_replicas(
    folder: Path, database_url: str, count: int, under: Sequence[str] = (), **environment: str
) -> Iterator[Replicas]:
    """Start `count` processes of `evalstop serve` on one database; they are killed at the end of the block."""
    environment = {"EVALSTOP_DATABASE_URL": database_url, "EVALSTOP_DATABASE_CONNECTIONS": "8", **environment}
    programs = [
        Program(folder / f"serve-{number}.log", "serve", "--json", "--port", "0", under=under, **environment)
        for number in range(count)
    ]
    with ExitStack() as stack:
        for program in programs:
            stack.callback(program.kill)
            program.launch()
        yield Replicas(programs)


class Replicas:
    """Running replicas; one of them may be down for a while."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = programs
        self._lock = threading.Lock()
        self._urls = {program: str(program.wait_until_server_ready()["url"]) for program in programs}

    @property
    def url(self) -> str:
        """The URL of the first replica; fails if that has ended by itself."""
        self.programs[0].check_running()
        return self._urls[self.programs[0]]

    def choose_url(self, rng: random.Random) -> str:
        """The URL of a random replica, up or just being restarted; fails if that has ended by itself."""
        with self._lock:
            program = rng.choice(self.programs)
            program.check_running()
            return self._urls[program]

    def restart(self, program: Program) -> None:
        """Kill a replica with SIGKILL and start it again."""
        program.kill()
        url = str(program.start_server()["url"])
        with self._lock:
            self._urls[program] = url

    def stop(self) -> None:
        """Send SIGTERM to all replicas and check their exit codes."""
        for program in self.programs:
            program.terminate()
        for program in self.programs:
            exit_code = program.wait(DEADLINE_SECONDS)
            assert exit_code in (0, -signal.SIGTERM), f"a replica exited with {exit_code}"


class RestartablePostgres:
    """A PostgreSQL server that a test may stop and start."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.folder = Path(str(sa.make_url(url).query["host"]))
        self._data = self.folder / "data"
        self._process: subprocess.Popen[bytes] | None = None

    def stop(self, stop_signal: signal.Signals) -> None:
        """Stop the server: SIGINT is a fast shutdown, SIGQUIT an immediate one."""
        pid = int((self._data / "postmaster.pid").read_text().split()[0])
        os.kill(pid, stop_signal)
        if self._process is not None:
            self._process.wait(DEADLINE_SECONDS)
            return
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)

    def start(self) -> None:
        """Start the server with the options of its last start."""
        owner = pwd.getpwuid(self._data.stat().st_uid)
        command = ["setpriv", "--pdeathsig", "QUIT"]
        if owner.pw_uid != os.geteuid():
            command += ["--reuid", owner.pw_name, "--regid", str(owner.pw_gid), "--clear-groups"]
        command += shlex.split((self._data / "postmaster.opts").read_text())
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder)
        wait_until(self._accepts_connections, "PostgreSQL accepts connections")

    def restart(self, stop_signal: signal.Signals) -> None:
        self.stop(stop_signal)
        self.start()

    def close(self) -> None:
        """Stop the server if it was restarted here."""
        if self._process is not None and self._process.poll() is None:
            self.stop(signal.SIGQUIT)

    def _accepts_connections(self) -> bool:
        try:
            with open_connection(self.url):
                return True
        except psycopg.OperationalError:
            return False


@contextmanager
def start_restartable_postgres() -> Iterator[RestartablePostgres]:
    """Start a PostgreSQL for one test; it is removed at the end of the block."""
    with start_postgres() as url:
        server = RestartablePostgres(url)
        try:
            yield server
        finally:
            server.close()
