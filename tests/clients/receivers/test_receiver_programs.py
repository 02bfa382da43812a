"""`evalstop-receiver command` and `slurm` as programs: obeying, killed in the middle, going down, misused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from evalstop_client.receivers.stop.report import ReportClient

from tests.clients.fake_service import KEY, FakeServer, FakeService
from tests.clients.programs import eventually, program
from tests.clients.webhooks import SECRET, send, stop_event

pytestmark = pytest.mark.real

RECEIVER = [sys.executable, "-m", "evalstop_client.receivers.cli"]
SCHEDULER = """
echo "$1 $2" >> {folder}/log
case $1 in
check) [ -e {folder}/gone ] && {{ echo '{{"exit_code": 0}}'; exit 3; }}; echo running;;
cancel) [ -e {folder}/deaf ] || touch {folder}/gone;;
esac
exit 0
"""


@dataclass
class LatestAnswer:
    """A receiver in front of a scheduler of one job, started again as often as one likes."""

    folder: Path
    server: FakeServer
    stack: ExitStack
    process: subprocess.Popen[str] | None = None
    options: list[str] = field(default_factory=list)

    def start(self) -> str:
        """Its address."""
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        script = f"sh {self.folder}/scheduler"
        command = [
            *RECEIVER,
            "command",
            "--run",
            f"{script} cancel {{job_id}}",
            "--check",
            f"{script} check {{job_id}}",
        ]
        command += ["--pattern", "job_id=[0-9]+", "--signal", f"{script} save {{job_id}}"]
        command += ["--listen", "127.0.0.1:0", "--ready-file", str(ready)]
        command += ["--state", str(self.folder / "state"), "--url", self.server.url, "--poll-seconds", "0.1"]
        command += self.options
        environment = {"EVALSTOP_WEBHOOK_SECRET": SECRET, "EVALSTOP_KEY": KEY}
        self.process = process = self.stack.enter_context(program(command, **environment))
        eventually(lambda: ready.exists() or process.poll() is not None)
        return str(json.loads(ready.read_text())["url"])

    def end(self, number: signal.Signals) -> int:
        """How it ended on this signal."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(30)

    def verbs(self) -> list[str]:
        """What the scheduler was asked, looks left out."""
        file = self.folder / "log"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in lines if not line.startswith("check")]


@pytest.fixture
def standing(tmp_path: Path, server: FakeServer) -> Iterator[LatestAnswer]:
    (tmp_path / "scheduler").write_text(SCHEDULER.format(folder=tmp_path))
    with ExitStack() as stack:
        yield LatestAnswer(tmp_path, server, stack, options=["--checkpoint-grace-seconds", "0.2"])


def test_stop_is_obeyed_and_reported(standing: LatestAnswer, service: FakeService) -> None:
    """By the commands alone: save, cancel, look, and what the look printed is in the report; the metrics are there."""
    url = standing.start()
    assert send(url, stop_event({"job_id": "7"})).status_code == 202
    ((_, report),) = eventually(lambda: service.reports)
    assert (report["state"], report["actor"]) == ("confirmed", "evalstop-receiver command")
    assert report["details"].items() >= {"job": "7", "exit_code": 0, "checkpoint": "not seen in time"}.items()
    assert standing.verbs() == ["save 7", "cancel 7"]
    assert httpx.get(url + "livez").json() == {"status": "ok"}
    eventually(lambda: 'stops_total{result="confirmed"} 1' in httpx.get(url + "metrics").text)
    assert standing.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_receiver_that_ended_in_the_middle_is_followed_by_one_that_goes_on(
    standing: LatestAnswer, service: FakeService, number: signal.Signals
) -> None:
    """Killed, or asked to go, while it waits for the job: the next one cancels nothing anew, and reports the end."""
    (standing.folder / "deaf").touch()
    url = standing.start()
    send(url, stop_event({"job_id": "7"}))
    eventually(lambda: "cancel 7" in standing.verbs())
    state = standing.folder / "state" / "decision-1.json"
    eventually(lambda: json.loads(state.read_text())["stop"]["cancelled_at"])
    assert standing.end(number) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    assert service.reports == []
    (standing.folder / "gone").touch()
    url = standing.start()
    ((_, report),) = eventually(lambda: service.reports)
    assert report["reason"] == "the job ended after it was cancelled"
    assert standing.verbs() == ["save 7", "cancel 7"]
    assert send(url, stop_event({"job_id": "7"})).json() == {"repeat": "decision-1"}


def test_hostile_label_is_refused_and_told(standing: LatestAnswer, service: FakeService) -> None:
    """Nothing is run for it, and the service hears why."""
    url = standing.start()
    send(url, stop_event({"job_id": "7; touch /tmp/x"}))
    ((_, report),) = eventually(lambda: service.reports)
    assert report["state"] == "failed"
    assert "label job_id" in report["reason"]
    assert not (standing.folder / "log").exists()


def test_second_receiver_on_the_same_memory_does_not_start(standing: LatestAnswer) -> None:
    """Two that share a memory would both obey."""
    standing.start()
    command = [*RECEIVER, "command", "--run", "a {job_id}", "--check", "b {job_id}", "--listen", "127.0.0.1:0"]
    command += ["--pattern", "job_id=[0-9]+"]
    command += ["--state", str(standing.folder / "state")]
    assert "another receiver" in usage(command)


COMMAND = ["command", "--run", "a {job_id}", "--check", "b {job_id}", "--pattern", "job_id=[0-9]+"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["command", "--run", "a {job_id}"], "--check"),
        (["command", "--run", "a {", "--check", "b"], "brace"),
        (["command", "--run", "a {job_id}", "--check", "b"], "for {job_id}"),
        (["command", "--run", "a", "--check", "b {run_id} {user}"], "for {user}"),
        ([*COMMAND, "--pattern", "job_id=["], "--pattern"),
        (["command", "--run", "{program}", "--check", "b"], "program"),
        ([*COMMAND, "--gone-exit-code", "0"], "gone-exit-code"),
        ([*COMMAND, "--mine", "nonsense"], "label=value"),
        ([*COMMAND, "--pull", "e1"], "--url"),
        ([*COMMAND, "--listen", "nowhere"], "host:port"),
        ([*COMMAND, "--state", "/dev/null/state"], "--state"),
        (["slurm", "--rest", "http://127.0.0.1:1", "--checkpoint-signal", "USR1@batch"], "@full"),
        (["slurm", "--rest", "http://127.0.0.1:1"], "--cluster"),
        (["slurm", "--rest", "nowhere", "--cluster", "a", "--token-file", "x"], "http://"),
        (["slurm", "--rest", "http://127.0.0.1:1", "--cluster", "a"], "SLURM_JWT"),
        (["slurm", "--rest", "http://127.0.0.1:1", "--cluster", "a", "--park-partition", "low"], "cancel"),
        (["slurm", "--cluster", "a"], "--rest"),
        (["slurm", "--checkpoint-signal", "KILL"], "USR1"),
        (["slurm", "--secret-env", "NOT_SET"], "NOT_SET"),
        (["kubernetes", "--kubeconfig", "/nowhere"], "/nowhere"),
        (["kubernetes", "--api-server", "10.0.0.1"], "https://"),
        (["kubernetes", "--api-server", "http://127.0.0.1:1", "--context", "lab"], "only one of them"),
        (["kubernetes", "--token-file", "x"], "--api-server"),
        (["kubernetes", "--stop-by", "kill"], "suspend"),
    ],
)
def test_misuse_is_explained(arguments: list[str], words: str, tmp_path: Path) -> None:
    """What cannot work is said in a line before anything is listened to."""
    if "--state" not in arguments:
        arguments = [*arguments, "--state", str(tmp_path)]
    if "--listen" not in arguments:
        arguments = [*arguments, "--listen", "127.0.0.1:0"]
    assert words in usage([*RECEIVER, *arguments])


def usage(command: list[str]) -> str:
    """What a receiver that is wrongly used says."""
    environment = {"EVALSTOP_WEBHOOK_SECRET": SECRET, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("scheduler", ["process", "slurm", "kubernetes", "command"])
def test_help_shows_examples(scheduler: str) -> None:
    """--help of each has whole commands that can be copied."""
    done = subprocess.run([*RECEIVER, scheduler, "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert f"  evalstop-receiver {scheduler} --" in done.stdout


def test_a_key_that_cannot_report_is_said_before_the_first_stop(
    server: FakeServer, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong key, one that may only post, or no service at all is in the log when the receiver starts."""
    service.scopes = ["ingest"]
    for url, key, said in (
        (server.url, KEY, "the key 'test' may not report, it has ingest"),
        (server.url, "esk_wrong", "answered 401"),
        ("http://127.0.0.1:1", KEY, "Connection refused"),
        (None, None, "no url was given"),
    ):
        caplog.clear()
        ReportClient(url, key, "test").check_key()
        assert said in caplog.text
    service.scopes = ["report"]
    caplog.clear()
    ReportClient(server.url, KEY, "test").check_key()
    assert caplog.text == ""
