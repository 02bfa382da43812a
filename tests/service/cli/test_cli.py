"""The command line as real processes: output, exit codes and error messages."""

from __future__ import annotations

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
from evalstop_service.store import schema

from tests.fixtures.forked_commands import FORKSERVER, ForkedCommand
from tests.service.commands import run_evalstop, send_switch_interval

TIMEOUT_SECONDS = 60


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment variables of an installation in a folder of its own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("EVALSTOP_")}
    return inherited | {"EVALSTOP_DATA_FOLDER": str(tmp_path / "data")}


@contextmanager
def run_in_background(environment: dict[str, str], *arguments: str) -> Iterator[ForkedCommand]:
    """Run a command until the block ends; on SIGTERM it must exit cleanly."""
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


def read_first_line(command: ForkedCommand) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(command.stdout.readline())
    return document


def request_runs(url: str, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.get(f"{url}/api/v1/runs", headers=headers, trust_env=False, timeout=60).status_code


def test_up_shows_a_key_once(environment: dict[str, str]) -> None:
    """The first start creates a working key and shows it; the second does not show it, and it still works."""
    with run_in_background(environment, "up", "--port", "0", "--json") as process:
        first = read_first_line(process)
        assert request_runs(first["url"], first["key"]) == 200
    with run_in_background(environment, "up", "--port", "0", "--json") as process:
        second = read_first_line(process)
        assert second["key"] is None
        assert second["sign_in"]
        assert request_runs(second["url"], first["key"]) == 200


def test_a_start_that_fails_creates_no_database(environment: dict[str, str]) -> None:
    """If the port is in use, `up` says so, and the next start shows the first key."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        finished = run_evalstop(environment, "up", "--port", port)
    assert finished.returncode == 1
    assert f"port {port}: Address already in use" in finished.stderr
    assert "--port 0 picks a free one" in finished.stderr
    assert [file.name for file in Path(environment["EVALSTOP_DATA_FOLDER"]).iterdir()] == ["lock"]
    with run_in_background(environment, "up", "--port", "0", "--json") as process:
        assert read_first_line(process)["key"]


def test_second_up_on_a_folder_is_refused(environment: dict[str, str]) -> None:
    """It says what to do; once the first has ended, another one starts."""
    with run_in_background(environment, "up", "--port", "0", "--json") as process:
        read_first_line(process)
        finished = run_evalstop(environment, "up", "--port", "0")
        assert finished.returncode == 1
        assert "another `evalstop up` uses" in finished.stderr
        assert "--data-folder" in finished.stderr
    with run_in_background(environment, "up", "--port", "0", "--json") as process:
        assert read_first_line(process)["url"]


def test_deliver_says_in_json_that_it_delivers(environment: dict[str, str]) -> None:
    """With --json its first line is JSON, as that of the other servers is."""
    assert run_evalstop(environment, "migrate").returncode == 0
    with run_in_background(environment, "deliver", "--json") as process:
        assert read_first_line(process) == {"delivering": True}


@pytest.mark.nightly
@pytest.mark.real
def test_up_prints_url_and_key_for_people(environment: dict[str, str]) -> None:
    """Without --json, `up` prints its URL and the key as text, and logs nothing before."""
    command = [sys.executable, "-m", "evalstop_service.cli", "up", "--port", "0"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        output = "".join(iter(process.stdout.readline, "\n"))  # up to the empty line at the start
        for _ in range(4):
            output += process.stdout.readline()
        logged, _, _ = select.select([process.stderr], [], [], 0)
        process.terminate()
    assert not logged
    assert "EvalStop is up at http://127.0.0.1:" in output
    assert "esk_" in output
    assert "/login?token=" in output


def test_installation_is_set_up_by_commands(environment: dict[str, str]) -> None:
    """migrate, key create, pause and resume print what they did, and fail with a reason."""
    assert json.loads(run_evalstop(environment, "migrate", "--json").stdout) == {
        "before": None,
        "after": schema.head_revision(),
    }
    key_arguments = ("--project", "alignment", "--name", "k", "--scopes", "read", "--json")
    created = run_evalstop(environment, "admin", "key", "create", *key_arguments)
    key = json.loads(created.stdout)
    assert (key["scopes"], key["key"][:4]) == (["read"], "esk_")
    plain = run_evalstop(
        environment, "admin", "key", "create", "--installation", "--name", "installation-admin", "--scopes", "admin"
    )
    assert plain.stdout.startswith("esk_")
    with run_in_background(environment, "serve", "--port", "0", "--json") as process:
        assert request_runs(read_first_line(process)["url"], key["key"]) == 200
    for name in ("a\nb", " ", "\udcff"):
        assert (
            run_evalstop(environment, "admin", "key", "create", "--project", "alignment", "--name", name).returncode
            == 1
        )


def test_missing_installation_is_not_created(environment: dict[str, str]) -> None:
    """A command that needs an installation says where it looked for one, and creates none."""
    finished = run_evalstop(environment, "admin", "key", "create", "--name", "k")
    assert finished.returncode == 1
    assert f"there is no installation in {environment['EVALSTOP_DATA_FOLDER']}" in finished.stderr
    assert not Path(environment["EVALSTOP_DATA_FOLDER"]).exists()


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["deliver"], ["admin", "key", "create", "--name", "k"]])
def test_commands_need_a_migrated_database(environment: dict[str, str], command: list[str]) -> None:
    """On an unmigrated database a command exits with 1 and names `evalstop migrate`."""
    folder = Path(environment["EVALSTOP_DATA_FOLDER"])
    folder.mkdir()
    (folder / "evalstop.db").touch()
    finished = run_evalstop(environment, *command)
    assert finished.returncode == 1
    assert "evalstop migrate" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_servers_switch_threads_every_millisecond(environment: dict[str, str]) -> None:
    """`up` and `serve` let other threads run after 1 ms, so that a busy event loop delays no other request."""
    for command in ("up", "serve"):
        reader, writer = FORKSERVER.Pipe(duplex=False)
        with reader, writer:
            arguments = (command, "--port", "0")
            process = FORKSERVER.Process(target=send_switch_interval, args=(arguments, environment, writer))
            process.start()
            assert reader.recv() == 0.001
            process.terminate()
            process.join()


@pytest.mark.parametrize(
    ("settings", "code", "message"),
    [
        ({"EVALSTOP_DATABASE_URL": "mysql://x"}, 2, "EVALSTOP_DATABASE_URL"),
        ({"EVALSTOP_DATABASE_URL": "postgresql://u@127.0.0.1:1/none"}, 1, "database cannot be used now"),
        ({"EVALSTOP_DATABASE_URL": "postgresql://u@127.0.0.1:port/none"}, 2, "EVALSTOP_DATABASE_URL"),
        ({"EVALSTOP_DATABASE_URL": "sqlite:////nosuch/folder/x.db"}, 1, "database refuses this: unable to open"),
        ({"EVALSTOP_DATABASE_URL": "sqlite:////dev/null/x.db"}, 1, "database refuses this: unable to open"),
        ({"EVALSTOP_DATA_FOLDER": "/dev/null/x"}, 1, "/dev/null"),
        ({"EVALSTOP_PORT": "99999"}, 2, "EVALSTOP_PORT"),
    ],
)
def test_invalid_setting_is_named(
    environment: dict[str, str], settings: dict[str, str], code: int, message: str
) -> None:
    """A setting that cannot be used, or an unreachable database, is named in an error without a traceback."""
    finished = run_evalstop(environment | settings, "migrate")
    assert (finished.returncode, finished.stdout) == (code, "")
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr
    assert "Value error" not in finished.stderr


def test_file_that_is_no_database_is_left_alone(environment: dict[str, str], tmp_path: Path) -> None:
    """A file that is not a SQLite database is not changed."""
    file = tmp_path / "notes.txt"
    file.write_text("not a database, but long enough to be looked at as one " * 100)
    finished = run_evalstop(environment | {"EVALSTOP_DATABASE_URL": f"sqlite:///{file}"}, "migrate")
    assert finished.returncode == 1
    assert "not a database" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert file.read_text().startswith("not a database")


def test_wrong_usage_exits_with_2(environment: dict[str, str]) -> None:
    """Invalid arguments exit with 2 and the usage; --help has examples."""
    for arguments in (
        [],
        ["nosuch"],
        ["admin", "key"],
        ["admin", "key", "create", "--name", "k", "--scopes", "nosuch"],
    ):
        finished = run_evalstop(environment, *arguments)
        assert finished.returncode == 2
        assert "usage: evalstop" in finished.stderr
    help_result = run_evalstop(environment, "--help")
    assert help_result.returncode == 0
    assert "examples:" in help_result.stdout


def test_invalid_key_is_refused_without_showing_it(environment: dict[str, str]) -> None:
    """An invalid encryption key fails every command at the start, and is not printed."""
    finished = run_evalstop(environment | {"EVALSTOP_SECRET_KEYS": "tellnobody"}, "migrate")
    assert finished.returncode == cli.USAGE
    assert "EVALSTOP_SECRET_KEYS: key 1" in finished.stderr
    assert "tellnobody" not in finished.stderr


@pytest.mark.parametrize("value", ["inf", "nan", "0", "1e9"])
@pytest.mark.parametrize("name", ["EVALSTOP_DELIVERY_TIMEOUT_SECONDS", "EVALSTOP_DELIVERY_LONGEST_PAUSE_SECONDS"])
def test_times_without_end_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    """A time is a number of seconds above 0 and at most a year."""
    monkeypatch.setenv(name, value)
    assert cli.main(["deliver", "--database-url", "sqlite:///never-opened.db"]) == cli.USAGE
    assert f"{name}: " in capsys.readouterr().err


def test_unsupported_database_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the variable and the supported URL forms."""
    monkeypatch.setenv("EVALSTOP_DATABASE_URL", "mysql://db/evalstop")
    assert cli.main(["migrate"]) == cli.USAGE
    errors = capsys.readouterr().err
    assert "EVALSTOP_DATABASE_URL: " in errors
    assert "postgresql://" in errors
