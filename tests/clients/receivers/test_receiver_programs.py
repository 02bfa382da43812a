"""`evalstop-receiver command` and `slurm` as programs: stops, restarts, shutdown and wrong usage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from evalstop_client.errors import ConfigurationError
from evalstop_client.receivers.cli import main
from evalstop_client.receivers.stop.execution import ReportClient
from evalstop_client.receivers.stop.receiver import choose_state_folder

from tests.clients.fake_service import KEY, FakeServer, FakeService
from tests.clients.programs import wait_until
from tests.clients.receivers.receiver_program import RECEIVER, ReceiverProgram, run_receivers
from tests.clients.webhooks import SECRET, make_stop_event, post_event

pytestmark = pytest.mark.real

SCHEDULER = """
echo "$1 $2" >> {folder}/log
case $1 in
check) [ -e {folder}/gone ] && {{ echo ended; exit 3; }}; echo running;;
cancel) [ -e {folder}/ignores-sigterm ] || touch {folder}/gone;;
esac
exit 0
"""


def list_scheduler_calls(folder: Path) -> list[str]:
    """The calls of the scheduler's script, without checks."""
    file = folder / "log"
    lines = file.read_text().splitlines() if file.exists() else []
    return [line for line in lines if not line.startswith("check")]


@pytest.fixture
def receiver(tmp_path: Path, server: FakeServer) -> Iterator[ReceiverProgram]:
    """`evalstop-receiver command` with a scheduler that has one job."""
    (tmp_path / "scheduler").write_text(SCHEDULER.format(folder=tmp_path))
    script = f"sh {tmp_path}/scheduler"
    command = ["command", "--run", f"{script} cancel {{job_id}}", "--check", f"{script} check {{job_id}}"]
    command += ["--pattern", "job_id=[0-9]+", "--signal", f"{script} save {{job_id}}"]
    with ExitStack() as stack:
        yield ReceiverProgram(tmp_path, server, stack, [*command, "--checkpoint-grace-seconds", "0.2"])


def test_stop_is_carried_out_by_the_commands(receiver: ReceiverProgram, service: FakeService) -> None:
    """The job is saved, cancelled and checked by the commands, and the check's output is in the report."""
    url = receiver.start()
    assert post_event(url, make_stop_event({"job_id": "7"})).status_code == 202
    ((_, report),) = wait_until(lambda: service.reports)
    assert report["state"] == "confirmed"
    assert report["details"].items() >= {"job": "7", "said": "ended", "checkpoint": "not seen in time"}.items()
    assert list_scheduler_calls(receiver.folder) == ["save 7", "cancel 7"]
    assert httpx.get(url + "livez", timeout=60).json() == {"status": "ok"}
    assert receiver.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_restarted_receiver_continues_the_stop(
    receiver: ReceiverProgram, service: FakeService, number: signal.Signals
) -> None:
    """After SIGKILL or SIGTERM during a stop the next receiver repeats no command, and reports the end."""
    (receiver.folder / "ignores-sigterm").touch()
    url = receiver.start()
    post_event(url, make_stop_event({"job_id": "7"}))
    wait_until(lambda: "cancel 7" in list_scheduler_calls(receiver.folder))
    state = receiver.folder / "state" / "decision-1.json"
    wait_until(lambda: json.loads(state.read_text())["stop"]["cancelled_at"])
    assert receiver.end(number) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    assert service.reports == []
    (receiver.folder / "gone").touch()
    url = receiver.start()
    ((_, report),) = wait_until(lambda: service.reports)
    assert report["reason"] == "the job ended after it was cancelled"
    assert list_scheduler_calls(receiver.folder) == ["save 7", "cancel 7"]
    assert post_event(url, make_stop_event({"job_id": "7"})).json() == {"repeat": "decision-1"}


ENVIRONMENT = {"EVALSTOP_URL": "http://127.0.0.1:9", "EVALSTOP_WEBHOOK_SECRET": SECRET, "PATH": "/usr/bin:/bin"}
COMMAND = ["command", "--run", "a {job_id}", "--check", "b {job_id}", "--pattern", "job_id=[0-9]+"]
WRONG_USES: list[tuple[list[str], str]] = [
    (["command", "--run", "a {job_id}"], "--check"),
    (["command", "--run", "a {", "--check", "b"], "brace"),
    (["command", "--run", "a {job_id}", "--check", "b"], "for {job_id}"),
    (["command", "--run", "a", "--check", "b {user}"], "for {user}"),
    ([*COMMAND, "--pattern", "job_id=["], "--pattern"),
    (["command", "--run", "{program}", "--check", "b"], "program"),
    ([*COMMAND, "--mine", "nonsense"], "NAME=VALUE"),
    ([*COMMAND, "--url", ""], "--url"),
    ([*COMMAND, "--listen", "nowhere"], "host:port"),
    ([*COMMAND, "--command-seconds", "long"], "long: it must be from 0 to 86400 seconds"),
    ([*COMMAND, "--state", "/dev/null/state"], "--state"),
    (["slurm", "--checkpoint-signal", "KILL"], "USR1"),
    ([*COMMAND, "--secret-env", "NOT_SET"], "NOT_SET"),
    (["kubernetes"], "kubectl proxy"),
    (["kubernetes", "--api-server", "10.0.0.1"], "https://"),
    (["kubernetes", "--token-file", "x"], "--api-server"),
    (["process"], "after --"),
    (["process", "--listen", "nowhere", "--", "true"], "host:port"),
    (["process", "--listen", "203.0.113.1:9", "--", "true"], "203.0.113.1"),
    (["process", "--grace-seconds", "-1", "--", "true"], "86400"),
    (["process", "--url", "localhost", "--", "true"], "http://"),
    (["process", "--secret-env", "NOT_SET", "--", "true"], "NOT_SET"),
    ([], "usage"),
]
"""Arguments of the receiver, and a part of the message about them."""
UNUSABLE_PROGRAMS = {"/no/such/program": 127, "/etc/passwd": 126}
"""The exit code for each, as a shell's."""


@pytest.fixture(scope="module")
def wrong_uses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """The exit code and the output of a receiver with each of the wrong arguments, by their text."""
    folder = tmp_path_factory.mktemp("wrong")
    uses = [arguments for arguments, _ in WRONG_USES] + [["process", "--", program] for program in UNUSABLE_PROGRAMS]
    ends = run_receivers(uses, folder, ENVIRONMENT | {"XDG_STATE_HOME": str(folder)})
    return {str(arguments): end for arguments, end in zip(uses, ends, strict=True)}


@pytest.mark.parametrize(("arguments", "message"), WRONG_USES)
def test_wrong_usage_is_explained(arguments: list[str], message: str, wrong_uses: dict[str, tuple[int, str]]) -> None:
    """Options that cannot work are named in one message before the receiver listens."""
    code, output = wrong_uses[str(arguments)]
    assert code == 2
    assert message in output
    assert "Traceback" not in output


@pytest.mark.parametrize(("program", "exit_code"), UNUSABLE_PROGRAMS.items())
def test_program_that_cannot_be_started_is_named(
    program: str, exit_code: int, wrong_uses: dict[str, tuple[int, str]]
) -> None:
    """The exit code is a shell's, and the message has the program."""
    code, output = wrong_uses[str(["process", "--", program])]
    assert code == exit_code
    assert program in output
    assert "Traceback" not in output


def test_slurm_receiver_needs_the_commands_of_slurm(tmp_path: Path) -> None:
    """The missing ones are named; the receiver does not start."""
    (tmp_path / "squeue").write_text("#!/bin/sh\n")
    (tmp_path / "squeue").chmod(0o755)
    command = [*RECEIVER, "slurm", "--allow-user", "ann", "--listen", "127.0.0.1:0", "--state", str(tmp_path / "state")]
    environment = ENVIRONMENT | {"PATH": str(tmp_path)}
    completed = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert completed.returncode == 2
    assert "scancel, scontrol" in completed.stderr
    assert "squeue" not in completed.stderr


def test_key_is_checked_at_startup(server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong key, one without the scope `report`, or an unreachable service is logged when the receiver starts."""
    service.scopes = ["ingest"]
    for url, key, expected in (
        (server.url, KEY, "the key 'test' may not report, it has ingest"),
        (server.url, "esk_wrong", "answered 401"),
        ("http://127.0.0.1:1", KEY, "Connection refused"),
    ):
        caplog.clear()
        ReportClient(url, key).check_key()
        assert expected in caplog.text
    service.scopes = ["report"]
    caplog.clear()
    ReportClient(server.url, KEY).check_key()
    assert caplog.text == ""


def test_user_without_a_name_needs_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A container's user that no file names has no name and no home: the message says which option to set."""
    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert main(["slurm"]) == 2
    assert "--allow-user" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="--state"):
        choose_state_folder(None, "slurm")
