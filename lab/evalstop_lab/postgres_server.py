"""A real PostgreSQL for tests and benchmarks: `with postgres() as url: ...`, gone at the end of the block.

`TEST_DATABASE_URL` names a server to use instead; its user must be allowed to create databases.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psycopg
import sqlalchemy as sa

START_SECONDS = 60.0


class NoPostgres(Exception):
    """There is no PostgreSQL to test with: `apt-get install postgresql`, or set TEST_DATABASE_URL."""


@contextmanager
def postgres(settings: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """A running server; yields the URL of its maintenance database, for a user who may create others.

    `settings` are PostgreSQL's (`shared_buffers=1GB`); they and the environment are for a server that is started here.
    """
    given = os.environ.get("TEST_DATABASE_URL")
    if given:
        yield given
        return
    programs = _find_programs()
    folder = Path(tempfile.mkdtemp(prefix="evalstop-pg-"))
    server: subprocess.Popen[bytes] | None = None
    try:
        user = _unprivileged_user()
        if user is not None:
            os.chown(folder, pwd.getpwnam(user).pw_uid, pwd.getpwnam(user).pw_gid)
        _initialize(programs, folder, user)
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                [
                    *_as_user(user, dies_with_us=True),
                    str(programs / "postgres"),
                    *("-D", str(folder / "data"), "-k", str(folder)),
                    *("-c", "listen_addresses=", "-c", "max_connections=200", "-c", "shared_buffers=32MB"),
                    *(word for setting in settings for word in ("-c", setting)),
                ],
                env=os.environ | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
            )
        url = f"postgresql://postgres@/postgres?host={folder}"
        _wait_until_ready(url, server, folder / "log")
        yield url
    finally:
        if server is not None:
            _stop(server)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def connected(url: str) -> Iterator[psycopg.Connection]:
    """An autocommitting connection to a server, for CREATE and DROP DATABASE."""
    with psycopg.connect(conninfo(url), autocommit=True) as connection:
        yield connection


def conninfo(url: str) -> str:
    """The URL in the form that libpq reads."""
    return sa.make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def _find_programs() -> Path:
    """The folder of `initdb` and `postgres`: Debian keeps it off the PATH; the newest version wins."""
    on_path = shutil.which("initdb")
    if on_path and (Path(on_path).resolve().parent / "postgres").exists():
        return Path(on_path).resolve().parent
    installed = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda program: int(program.parts[-3]), reverse=True
    )
    if not installed:
        raise NoPostgres(NoPostgres.__doc__)
    return installed[0].parent


def _unprivileged_user() -> str | None:
    """Who runs the server when we are root, which PostgreSQL refuses; None: ourselves."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def _as_user(user: str | None, dies_with_us: bool = False) -> list[str]:
    # The kernel's parent-death signal stops the server even when the tests are killed.
    setpriv = shutil.which("setpriv")
    if setpriv:
        options = ["--pdeathsig", "QUIT"] if dies_with_us else []
        if user is not None:
            options += ["--reuid", user, "--regid", str(pwd.getpwnam(user).pw_gid), "--clear-groups"]
        return [setpriv, *options] if options else []
    return [] if user is None else ["runuser", "-u", user, "--"]


def _initialize(programs: Path, folder: Path, user: str | None) -> None:
    command = [
        *_as_user(user),
        str(programs / "initdb"),
        *("-D", str(folder / "data"), "-U", "postgres", "-A", "trust"),  # the folder lets nobody else in
        *("-E", "UTF8", "--locale=C.UTF-8", "--no-instructions"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode != 0:
        raise RuntimeError(f"initdb failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")


def _wait_until_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with connected(url):
                return
        except psycopg.OperationalError as error:
            if server.poll() is not None:
                raise RuntimeError(f"PostgreSQL ended with {server.returncode}:\n{log.read_text()}") from error
            if time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL does not answer:\n{log.read_text()}") from error
            time.sleep(0.02)


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGQUIT)  # "immediate": what would be flushed is about to be deleted
    try:
        server.wait(timeout=30)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
