"""Real processes to do harm to: replicas of the service, and a PostgreSQL that can be restarted."""

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
def serving(folder: Path, database_url: str, under: Sequence[str] = (), **environment: str) -> Iterator[Replicas]:
    """One `evalstop serve`."""
    with replicas(folder, database_url, 1, under, **environment) as one:
        yield one


@contextmanager
def replicas(
    folder: Path, database_url: str, count: int, under: Sequence[str] = (), **environment: str
) -> Iterator[Replicas]:
    """So many `evalstop serve` on one database, killed at the end of the block."""
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
    """Some servers, of which one may be away for a while."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = programs
        self._lock = threading.Lock()
        self._urls = {program: str(program.ready_server()["url"]) for program in programs}

    @property
    def url(self) -> str:
        """Of the first."""
        return self._urls[self.programs[0]]

    def any(self, chance: random.Random) -> str:
        """The address of any one, be it up or not."""
        with self._lock:
            return self._urls[chance.choice(self.programs)]

    def restart(self, program: Program) -> None:
        """kill -9, and start it again."""
        program.kill()
        url = str(program.start_server()["url"])
        with self._lock:
            self._urls[program] = url

    def end(self) -> None:
        """SIGTERM to all of them, which then end well."""
        for program in self.programs:
            program.terminate()
        for program in self.programs:
            code = program.wait(DEADLINE_SECONDS)
            assert code in (0, -signal.SIGTERM), f"a replica ended with {code}"


class Restartable:
    """A PostgreSQL of one's own."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.folder = Path(str(sa.make_url(url).query["host"]))
        self._data = self.folder / "data"
        self._started: subprocess.Popen[bytes] | None = None

    def stop(self, how: signal.Signals) -> None:
        """SIGINT ends all sessions (`fast`), SIGQUIT everything where it stands (`immediate`)."""
        pid = int((self._data / "postmaster.pid").read_text().split()[0])
        os.kill(pid, how)
        if self._started is not None:
            self._started.wait(DEADLINE_SECONDS)
            return
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)

    def start(self) -> None:
        """Start it as it was started before."""
        owner = pwd.getpwuid(self._data.stat().st_uid)
        words = ["setpriv", "--pdeathsig", "QUIT"]
        if owner.pw_uid != os.geteuid():
            words += ["--reuid", owner.pw_name, "--regid", str(owner.pw_gid), "--clear-groups"]
        words += shlex.split((self._data / "postmaster.opts").read_text())
        with (self.folder / "log").open("ab") as log:
            self._started = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder)
        wait_until(self._answers, "PostgreSQL answers again")

    def restart(self, how: signal.Signals) -> None:
        self.stop(how)
        self.start()

    def end(self) -> None:
        """Stop what was started here."""
        if self._started is not None and self._started.poll() is None:
            self.stop(signal.SIGQUIT)

    def _answers(self) -> bool:
        try:
            with open_connection(self.url):
                return True
        except psycopg.OperationalError:
            return False


@contextmanager
def restartable() -> Iterator[Restartable]:
    """A PostgreSQL of one's own, gone at the end of the block."""
    with start_postgres() as url:
        server = Restartable(url)
        try:
            yield server
        finally:
            server.end()
