"""The command line, as real processes: what it prints, what it ends with, and what it says when it cannot."""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from evalstop_service import cli
from evalstop_service.clock import utc_now
from evalstop_service.security.encryption import Encryption
from evalstop_service.store import endpoints, schema
from evalstop_service.store.database import Database

from tests.fixtures.forked_commands import ForkedCommand
from tests.fixtures.projects import create_project
from tests.service.commands import run_evalstop

TIMEOUT_SECONDS = 60


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment whose embedded database is the test's own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EVALSTOP_")}
    return kept | {"EVALSTOP_DATA_FOLDER": str(tmp_path / "data")}


@contextmanager
def running(environment: dict[str, str], *arguments: str) -> Iterator[ForkedCommand]:
    """A command that goes on until the block ends; it then ends well when it is asked to."""
    with TemporaryDirectory() as folder:
        errors = Path(folder, "stderr")
        command = ForkedCommand(arguments, environment, errors)
        try:
            yield command
            command.terminate()
            assert command.wait(TIMEOUT_SECONDS) in (0, -signal.SIGTERM)
            assert "Traceback" not in errors.read_text()
        finally:
            command.kill()
            command.stdout.close()


def first_line(command: ForkedCommand) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(command.stdout.readline())
    return document


def runs(url: str, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.get(f"{url}/api/v1/runs", headers=headers, trust_env=False).status_code


def test_up_shows_a_key_once(environment: dict[str, str]) -> None:
    """The first start makes a key that works and shows it; the second does not show it, and it still works."""
    with running(environment, "up", "--port", "0", "--json") as process:
        first = first_line(process)
        assert runs(first["url"], first["key"]) == 200
    with running(environment, "up", "--port", "0", "--json") as process:
        second = first_line(process)
        assert second["key"] is None
        assert second["sign_in"]
        assert runs(second["url"], first["key"]) == 200


def test_up_tells_a_person(environment: dict[str, str]) -> None:
    """Without --json it says where it is and shows the key, in words, and nothing before that."""
    command = [sys.executable, "-m", "evalstop_service.cli", "up", "--port", "0"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        said = "".join(iter(process.stdout.readline, "\n"))  # the empty line that it begins with
        for _ in range(4):
            said += process.stdout.readline()
        logged, _, _ = select.select([process.stderr], [], [], 0)
        process.terminate()
    assert not logged
    assert "EvalStop is up at http://127.0.0.1:" in said
    assert "esk_" in said
    assert "/login?token=" in said


def test_prepares_by_hand(environment: dict[str, str]) -> None:
    """Migrate, make a project, make keys: each says what it did, for machines too."""
    assert json.loads(run_evalstop(environment, "migrate", "--json").stdout) == {
        "before": None,
        "after": schema.head_revision(),
    }
    words = ("alignment", "--mode", "enforce", "--veto-window-seconds", "5", "--json")
    project = run_evalstop(environment, "admin", "project", "create", *words)
    assert json.loads(project.stdout)["name"] == "alignment"
    key_words = ("--project", "alignment", "--name", "k", "--scopes", "read", "--json")
    made = run_evalstop(environment, "admin", "key", "create", *key_words)
    key = json.loads(made.stdout)
    assert (key["scopes"], key["key"][:4]) == (["read"], "esk_")
    plain = run_evalstop(
        environment, "admin", "key", "create", "--installation", "--name", "landlord", "--scopes", "admin"
    )
    assert plain.stdout.startswith("esk_")
    with running(environment, "serve", "--port", "0", "--json") as process:
        assert runs(first_line(process)["url"], key["key"]) == 200
    paused = run_evalstop(environment, "pause", "alignment", "--actor", "dana", "--reason", "broken evals", "--json")
    assert json.loads(paused.stdout) == {"project": "alignment", "paused": True}
    assert "resumed" in run_evalstop(environment, "resume", "alignment").stdout
    lost = run_evalstop(environment, "pause", "nosuch")
    assert (lost.returncode, "nosuch" in lost.stderr) == (1, True)
    again = run_evalstop(environment, "admin", "project", "create", "alignment")
    assert (again.returncode, "alignment" in again.stderr) == (1, True)
    nosuch = run_evalstop(environment, "admin", "key", "create", "--project", "nosuch", "--name", "k")
    assert (nosuch.returncode, "project create" in nosuch.stderr) == (1, True)
    for name in ("a\nb", " ", "\udcff"):
        assert (
            run_evalstop(environment, "admin", "key", "create", "--project", "alignment", "--name", name).returncode
            == 1
        )


def test_a_wrong_folder_is_not_filled(environment: dict[str, str]) -> None:
    """A command that needs an installation says where it looked for one, and makes none."""
    done = run_evalstop(environment, "admin", "key", "create", "--name", "k")
    assert done.returncode == 1
    assert f"there is no installation in {environment['EVALSTOP_DATA_FOLDER']}" in done.stderr
    assert not Path(environment["EVALSTOP_DATA_FOLDER"]).exists()


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["deliver"], ["admin", "project", "create", "p"]])
def test_needs_a_schema(environment: dict[str, str], command: list[str]) -> None:
    """On a database that was not migrated a command ends with 1 and says what to run."""
    folder = Path(environment["EVALSTOP_DATA_FOLDER"])
    folder.mkdir()
    (folder / "evalstop.db").touch()
    done = run_evalstop(environment, *command)
    assert done.returncode == 1
    assert "evalstop migrate" in done.stderr
    assert "Traceback" not in done.stderr


def test_port_in_use(environment: dict[str, str]) -> None:
    """A port that another holds is named, and the end is 1."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        done = run_evalstop(environment, "up", "--port", port)
    assert done.returncode == 1
    assert port in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({"EVALSTOP_DATABASE_URL": "mysql://x"}, 2, "EVALSTOP_DATABASE_URL"),
        ({"EVALSTOP_DATABASE_URL": "postgresql://u@127.0.0.1:1/none"}, 1, "database does not answer"),
        ({"EVALSTOP_DATABASE_URL": "postgresql://u@127.0.0.1:port/none"}, 2, "EVALSTOP_DATABASE_URL"),
        ({"EVALSTOP_DATABASE_URL": "sqlite:////nosuch/folder/x.db"}, 1, "database does not answer"),
        ({"EVALSTOP_DATABASE_URL": "sqlite:////dev/null/x.db"}, 1, "database does not answer"),
        ({"EVALSTOP_DATA_FOLDER": "/dev/null/x"}, 1, "/dev/null"),
        ({"EVALSTOP_PORT": "99999"}, 2, "EVALSTOP_PORT"),
        ({"EVALSTOP_SQLITE_SYNCHRONOUS": "OFF"}, 2, "EVALSTOP_SQLITE_SYNCHRONOUS"),
    ],
)
def test_says_what_is_wrong(environment: dict[str, str], settings: dict[str, str], code: int, words: str) -> None:
    """A setting that cannot be used, or a database that is not there: one line that names it, no traceback."""
    done = run_evalstop(environment | settings, "migrate")
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert "Value error" not in done.stderr


def test_no_database_at_all(environment: dict[str, str], tmp_path: Path) -> None:
    """A file that is no database is left alone."""
    file = tmp_path / "notes.txt"
    file.write_text("not a database, but long enough to be looked at as one " * 100)
    done = run_evalstop(environment | {"EVALSTOP_DATABASE_URL": f"sqlite:///{file}"}, "migrate")
    assert done.returncode == 1
    assert "not a database" in done.stderr
    assert "Traceback" not in done.stderr
    assert file.read_text().startswith("not a database")


def test_a_newer_schema(environment: dict[str, str], tmp_path: Path) -> None:
    """A schema that a newer version made is not touched."""
    url = f"sqlite:///{tmp_path / 'newer.db'}"
    database = Database(url)
    schema.upgrade_schema(database)
    with database.transaction() as tx:
        tx.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    database.close()
    done = run_evalstop(environment | {"EVALSTOP_DATABASE_URL": url}, "up", "--port", "0")
    assert done.returncode == 1
    assert "newer" in done.stderr
    assert "Traceback" not in done.stderr


def test_usage(environment: dict[str, str]) -> None:
    """Asked wrongly it ends with 2 and says how to ask; asked for help it gives examples."""
    for arguments in (
        [],
        ["nosuch"],
        ["admin", "key"],
        ["admin", "key", "create", "--name", "k", "--scopes", "nosuch"],
    ):
        done = run_evalstop(environment, *arguments)
        assert done.returncode == 2
        assert "usage: evalstop" in done.stderr
    helped = run_evalstop(environment, "--help")
    assert helped.returncode == 0
    assert "examples:" in helped.stdout


def test_openapi(environment: dict[str, str]) -> None:
    """The API's document is printed without a database, and none is made for it."""
    done = run_evalstop(environment, "openapi")
    assert done.returncode == 0
    assert "/api/v1/runs" in json.loads(done.stdout)["paths"]
    assert not Path(environment["EVALSTOP_DATA_FOLDER"]).exists()


def test_secrets_are_sealed_by_command(environment: dict[str, str]) -> None:
    """`secrets rotate` seals what stood in plain text, says how much, and refuses without a key."""
    run_evalstop(environment, "migrate")
    refused = run_evalstop(environment, "secrets", "rotate")
    assert refused.returncode == cli.FAILED
    assert "EVALSTOP_SECRET_KEYS" in refused.stderr
    database = Database(f"sqlite:///{environment['EVALSTOP_DATA_FOLDER']}/evalstop.db")
    project = create_project(database, "sealed", "shadow", 0.0, utc_now(), "paper")
    with database.transaction() as tx:
        plain = endpoints.add_endpoint(tx, project.id, url="http://x.example", event_types=["*"], now=utc_now())
    key = base64.b64encode(bytes(range(32))).decode()
    done = run_evalstop(environment | {"EVALSTOP_SECRET_KEYS": key}, "secrets", "rotate", "--json")
    assert json.loads(done.stdout) == {"secrets": 2, "were_plain": 2}
    with database.reading() as tx:
        (sealed,) = endpoints.list_endpoints(tx, project.id)
    assert Encryption([bytes(range(32))]).decrypt(sealed.secret, sealed.id) == plain.secret != sealed.secret
    database.close()


def test_a_broken_key_is_refused(environment: dict[str, str]) -> None:
    """What is no key is refused at the start of any command, without being shown."""
    done = run_evalstop(environment | {"EVALSTOP_SECRET_KEYS": "tellnobody"}, "migrate")
    assert done.returncode == cli.USAGE
    assert "EVALSTOP_SECRET_KEYS: key 1" in done.stderr
    assert "tellnobody" not in done.stderr
