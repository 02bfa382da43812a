"""`evalstop-receiver process` as a program, with children that are well behaved, deaf, fertile or already gone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from evalstop_client.receivers.process.descendants import DEAD_STATES, list_processes_by_ps
from evalstop_client.receivers.process.job_control import label_environment
from evalstop_client.settings import parse_labels

from tests.clients.fake_service import KEY, Answer, FakeServer, FakeService
from tests.clients.programs import is_alive, running_program, wait_until
from tests.clients.receivers.receiver_program import RECEIVER
from tests.clients.webhooks import SECRET, make_stop_event, post_event

pytestmark = pytest.mark.real

OBEDIENT = "import time; print('up', flush=True); time.sleep(3600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(3600)"
REST = "while True: time.sleep(0.1)"
"""For jobs with handlers: Python sleeps on when a signal has come just before it fell asleep."""
CLEAN = f"""
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print('up', flush=True)
{REST}
"""


@dataclass
class Guarded:
    """A receiver with its job."""

    process: subprocess.Popen[str]
    ready: dict[str, Any]

    @property
    def label(self) -> dict[str, str]:
        return {"receiver": self.ready["receiver"]}

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    def line(self) -> str:
        """What the job prints next: its standard output is the receiver's."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextlib.contextmanager
def guarded(folder: Path, server: FakeServer, code: str, *options: str, **environment: str) -> Iterator[Guarded]:
    """A Python job under a real receiver that listens."""
    ready = folder / "ready.json"
    command = [
        *RECEIVER, "process", "--url", server.url, "--ready-file", str(ready), *options,
        "--", sys.executable, "-c", code,
    ]  # fmt: skip
    settings = {"EVALSTOP_WEBHOOK_SECRET": SECRET, "EVALSTOP_KEY": KEY, **environment}
    with running_program(command, **settings) as process:
        try:
            wait_until(lambda: ready.exists() or process.poll() is not None)
            yield Guarded(process, json.loads(ready.read_text()))
        finally:
            if ready.exists():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(json.loads(ready.read_text())["job_pid"], signal.SIGKILL)


def only_report(service: FakeService) -> dict[str, Any]:
    ((_, report),) = wait_until(lambda: service.reports)
    return report


def test_obedient_job_is_ended_by_sigterm_and_confirmed(
    tmp_path: Path, server: FakeServer, service: FakeService
) -> None:
    """The usual way: SIGTERM, the job is gone, the service hears how; the receiver exits like a job that was killed."""
    with guarded(tmp_path, server, OBEDIENT) as job:
        assert job.line() == "up"
        assert post_event(job.url, make_stop_event(job.label)).status_code == 202
        report = only_report(service)
        assert report["state"] == "confirmed"
        assert report["actor"] == "evalstop-receiver process"
        details = report["details"]
        assert (details["exit_status"], details["signal"]) == (-15, "SIGTERM")
        assert details["ended_at"].endswith("Z")
        assert details["how"] == "cancelled"
        assert job.process.wait(20) == 128 + signal.SIGTERM
        assert not is_alive(job.ready["job_pid"])


def test_job_that_cleans_up_keeps_its_own_exit_code(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """A job that catches SIGTERM and exits 7 is reported with 7, and so does the receiver exit."""
    with guarded(tmp_path, server, CLEAN) as job:
        assert job.line() == "up"
        post_event(job.url, make_stop_event(job.label))
        details = only_report(service)["details"]
        assert (details["exit_status"], details["signal"]) == (7, None)
        assert job.process.wait(20) == 7


def test_a_job_that_can_be_started_again_is_parked(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """Parked it is ended; resumed it is started again under the same label, and its exit code is the receiver's."""
    code = f"""
import pathlib, sys, time
print('up', flush=True)
if pathlib.Path({str(tmp_path / "end")!r}).exists():
    sys.exit(7)
{REST}
"""
    with guarded(tmp_path, server, code, "--restartable") as job:
        assert job.line() == "up"
        assert post_event(job.url, {**make_stop_event(job.label), "type": "run.park_requested"}).status_code == 202
        report = only_report(service)
        assert (report["state"], report["details"]["parked_as"]) == ("parked", "terminated")
        assert not is_alive(job.ready["job_pid"])
        (tmp_path / "end").touch()
        assert job.process.poll() is None, "the receiver waits for its job to be resumed"
        resume = {**make_stop_event(job.label), "type": "run.resume_requested"}
        # 409 as long as the receiver has not recorded that its report was heard: the service sends it again
        wait_until(lambda: post_event(job.url, resume, webhook_id="msg_2").status_code == 202)
        assert job.line() == "up"
        assert job.process.wait(20) == 7


def test_a_parked_job_ends_with_its_receiver(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """Whoever ends the receiver while its job is parked gets the exit code that the job had."""
    with guarded(tmp_path, server, CLEAN, "--restartable") as job:
        assert job.line() == "up"
        post_event(job.url, {**make_stop_event(job.label), "type": "run.park_requested"})
        assert only_report(service)["state"] == "parked"
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(20) == 7


def test_a_job_that_cannot_be_started_again_is_not_parked(
    tmp_path: Path, server: FakeServer, service: FakeService
) -> None:
    """Nothing is done to it, and the report says why."""
    with guarded(tmp_path, server, OBEDIENT) as job:
        assert job.line() == "up"
        post_event(job.url, {**make_stop_event(job.label), "type": "run.park_requested"})
        report = only_report(service)
        assert (report["state"], "--restartable" in report["reason"]) == ("failed", True)
        assert is_alive(job.ready["job_pid"])


def test_deaf_job_is_killed_after_the_period_of_grace(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """A job that ignores SIGTERM gets its time, then SIGKILL, and the report says so."""
    with guarded(tmp_path, server, DEAF, "--grace-seconds", "0.5") as job:
        assert job.line() == "up"
        post_event(job.url, make_stop_event(job.label))
        report = only_report(service)
        assert report["state"] == "confirmed"
        assert report["reason"] == "the job ended after it was forced to"
        assert report["details"]["signal"] == "SIGKILL"
        assert report["details"]["seconds"] >= 0.5
        assert job.process.wait(20) == 128 + signal.SIGKILL


@pytest.mark.parametrize("new_session", [False, True])
def test_grandchildren_are_ended_too(
    tmp_path: Path, server: FakeServer, service: FakeService, new_session: bool
) -> None:
    """Confirmed means that nobody is left: deaf grandchildren too, even in sessions of their own, as torchrun's are."""
    code = (
        "import subprocess, sys, time\n"
        f"command, new_session = [sys.executable, '-c', {DEAF!r}], {new_session}\n"
        "worker = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=new_session)\n"
        "worker.stdout.readline(); print(worker.pid, flush=True); time.sleep(3600)"
    )
    with guarded(tmp_path, server, code, "--grace-seconds", "0.5") as job:
        worker = int(job.line())
        assert is_alive(worker)
        post_event(job.url, make_stop_event(job.label))
        report = only_report(service)
        assert report["state"] == "confirmed"
        assert not is_alive(worker)
        assert report["details"]["exit_status"] == -15


def test_repeats_and_second_decisions_get_the_same_answer(
    tmp_path: Path, server: FakeServer, service: FakeService
) -> None:
    """A stop that is asked for again while it is carried out is carried out once, and each decision is answered."""
    with guarded(tmp_path, server, DEAF, "--grace-seconds", "0.5") as job:
        assert job.line() == "up"
        assert post_event(job.url, make_stop_event(job.label)).status_code == 202
        assert post_event(job.url, make_stop_event(job.label)).status_code == 200
        assert post_event(job.url, make_stop_event(job.label, "decision-2"), webhook_id="msg_2").status_code == 202
        wait_until(lambda: len(service.reports) == 2)
        (one, first), (other, second) = sorted(service.reports)
        assert (one, other) == ("decision-1", "decision-2")
        assert first["details"]["signal"] == second["details"]["signal"] == "SIGKILL"


def test_stop_of_another_run_leaves_the_job_alone(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """Events go to all receivers; a run with another label, or none, is not ours to end."""
    with guarded(tmp_path, server, OBEDIENT) as job:
        assert job.line() == "up"
        assert post_event(job.url, make_stop_event({"receiver": "someone else"}, "1")).status_code == 202
        assert post_event(job.url, make_stop_event({}, "2")).status_code == 202
        assert post_event(job.url, make_stop_event(job.label, "3"), secret="whsec_AAAA").status_code == 401
        assert is_alive(job.ready["job_pid"])
        assert post_event(job.url, make_stop_event(job.label, "4")).status_code == 202
        only_report(service)


def test_job_that_ended_by_itself_is_reported_as_such(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """A trainer that polls may obey before the webhook arrives: the stop is confirmed all the same."""
    with guarded(tmp_path, server, "raise SystemExit(3)", "--linger-seconds", "60") as job:
        wait_until(lambda: not is_alive(job.ready["job_pid"]))
        post_event(job.url, make_stop_event(job.label))
        report = only_report(service)
        assert report["state"] == "confirmed"
        assert report["details"]["how"] == "by_itself"
        assert report["details"]["exit_status"] == 3
        assert job.process.wait(20) == 3


def test_receiver_stays_until_its_report_is_accepted(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """A service that is away when the job ends gets the report when it is back, and only then the receiver exits."""
    service.scripted_answers = [Answer(503, {}), Answer(503, {})]
    with guarded(tmp_path, server, OBEDIENT) as job:
        assert job.line() == "up"
        post_event(job.url, make_stop_event(job.label))
        assert job.process.wait(30) == 143
        assert only_report(service)["state"] == "confirmed"


def test_receiver_does_not_stay_for_ever(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """A service that never takes the report does not hold the machine."""
    service.scripted_answers = [Answer(503, {})] * 10_000
    with guarded(tmp_path, server, OBEDIENT, "--report-seconds", "0", "--grace-seconds", "1") as job:
        assert job.line() == "up"
        post_event(job.url, make_stop_event(job.label))
        assert job.process.wait(40) == 143


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signal_at_the_receiver_reaches_the_job(
    tmp_path: Path, server: FakeServer, service: FakeService, number: signal.Signals
) -> None:
    """Whoever signals the receiver means the job: a scheduler's cancel, Ctrl-C, a call for a checkpoint."""
    code = (
        "import os, signal, time\n"  # print is not to be entered again by a signal that comes while it prints
        f"signal.signal({int(number)}, lambda got, _: (os.write(1, b'got %d\\n' % got), os._exit(9)))\n"
        f"print('up', flush=True)\n{REST}"
    )
    with guarded(tmp_path, server, code, "--linger-seconds", "0") as job:
        assert job.line() == "up"
        job.process.send_signal(number)
        assert job.line() == f"got {int(number)}"
        assert job.process.wait(20) == 9
    assert service.reports == []


def test_job_has_our_streams_the_label_and_no_secret(tmp_path: Path, server: FakeServer) -> None:
    """The job is told its label beside those it had; the webhook secret and the operator's key are not its business."""
    code = (
        "import json, os, sys; print(json.dumps([dict(os.environ), sys.stdin.read()]), flush=True);"
        "print('e', file=sys.stderr)"
    )
    command = [
        *RECEIVER, "process", "--url", server.url, "--linger-seconds", "0",
        "--secret-env", "MY_SECRET", "--key-env", "OPERATOR_KEY", "--", sys.executable, "-c", code,
    ]  # fmt: skip
    environment = {
        **os.environ, "MY_SECRET": SECRET, "OPERATOR_KEY": "esk_operator", "EVALSTOP_KEY": "esk_ingest",
        "EVALSTOP_LABELS": "seed=3",
    }  # fmt: skip
    done = subprocess.run(
        command, input="hello", capture_output=True, text=True, env=environment, timeout=60, check=True
    )
    seen, standard_input = json.loads(done.stdout)
    labels = parse_labels(seen["EVALSTOP_LABELS"])
    assert standard_input == "hello"
    assert done.stderr.splitlines()[-1] == "e"
    assert labels["seed"] == "3"
    assert labels["receiver"]
    assert seen["EVALSTOP_KEY"] == "esk_ingest"
    assert SECRET not in seen.values()
    assert "esk_operator" not in seen.values()


@pytest.mark.parametrize(
    ("options", "key"), [((), None), (("--job-key-env", "TRAINER_KEY"), "esk_ingest")], ids=["none", "its own"]
)
def test_job_never_gets_the_receiver_s_key(
    tmp_path: Path, server: FakeServer, options: tuple[str, ...], key: str | None
) -> None:
    """By default the job has no key at all; it has the one that is named for it, as EVALSTOP_KEY and nothing else."""
    code = "import json, os; print(json.dumps(dict(os.environ)), flush=True)"
    with guarded(tmp_path, server, code, *options, TRAINER_KEY="esk_ingest") as job:
        seen = json.loads(job.line())
    assert seen.get("EVALSTOP_KEY") == key
    assert KEY not in seen.values()
    assert ("TRAINER_KEY" in seen) == (key is None)


def test_a_receiver_cannot_be_read_by_its_user(server: FakeServer) -> None:
    """No other process of its user may read the receiver's memory, with keys and secrets; the job's may be read."""
    asks = "import ctypes; print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), flush=True)"  # PR_GET_DUMPABLE
    options = ["process", "--url", server.url, "--linger-seconds", "0", "--", sys.executable, "-c", asks]
    receiver = f"from evalstop_client.receivers.cli.entry import main; main({options!r}); {asks}"
    environment = {**os.environ, "EVALSTOP_WEBHOOK_SECRET": SECRET, "EVALSTOP_KEY": KEY}
    done = subprocess.run([sys.executable, "-c", receiver], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["1", "0"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["process"], 2, "after --"),
        (["process", "--listen", "nowhere", "--", "true"], 2, "host:port"),
        (["process", "--listen", "203.0.113.1:9", "--", "true"], 2, "203.0.113.1"),
        (["process", "--grace-seconds", "-1", "--", "true"], 2, "86400"),
        (["process", "--url", "localhost", "--", "true"], 2, "http://"),
        (["process", "--secret-env", "NOT_SET", "--", "true"], 2, "NOT_SET"),
        (["process", "--", "/no/such/program"], 127, "/no/such/program"),
        (["process", "--", "/etc/passwd"], 126, "/etc/passwd"),
        ([], 2, "usage"),
    ],
)
def test_wrong_usage_is_explained(arguments: list[str], code: int, words: str) -> None:
    """What cannot work is said in a line, with the exit code that belongs to it."""
    command = [*RECEIVER, *arguments]
    environment = {**os.environ, "EVALSTOP_WEBHOOK_SECRET": SECRET}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_help_teaches_by_example() -> None:
    """--help shows whole commands that can be copied."""
    command = [*RECEIVER, "process", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "evalstop-receiver process --listen 0.0.0.0:9000 --job-key-env TRAINER_KEY -- python train.py" in done.stdout


@pytest.mark.skipif(shutil.which("ps") is None, reason="needs ps")
def test_ps_tells_what_proc_tells() -> None:
    """Where there is no /proc, `ps` names the same parent and group."""
    (by_ps,) = [process for process in list_processes_by_ps() if process.pid == os.getpid()]
    assert (by_ps.parent, by_ps.group) == (os.getppid(), os.getpgid(0))
    assert by_ps.state[:1] not in DEAD_STATES


def test_label_replaces_that_of_an_outer_receiver() -> None:
    """A receiver started by a job of another receiver has its own label."""
    outer = label_environment({"EVALSTOP_LABELS": "a=b"}, "outer")
    assert parse_labels(label_environment(outer, "inner")["EVALSTOP_LABELS"]) == {"a": "b", "receiver": "inner"}


def test_mlflow_clients_are_given_the_label_and_those_of_the_scheduler() -> None:
    """What MLflow's clients read as tags holds the label, a scheduler's labels, and what was there before."""
    environment = {"MLFLOW_RUN_CONTEXT": '{"team": "a", "receiver": "outer"}', "SLURM_JOB_ID": "4711"}
    tags = json.loads(label_environment(environment, "inner")["MLFLOW_RUN_CONTEXT"])
    assert (tags["receiver"], tags["team"], tags["slurm_job_id"]) == ("inner", "a", "4711")
    for broken in ("", "[]", "{"):
        assert json.loads(label_environment({"MLFLOW_RUN_CONTEXT": broken}, "inner")["MLFLOW_RUN_CONTEXT"]) == {
            "receiver": "inner"
        }


def test_whole_way_from_the_trainers_post_to_the_confirmed_end(
    tmp_path: Path, server: FakeServer, service: FakeService
) -> None:
    """A real trainer under a real receiver: its run carries the label by which the stop finds it."""
    code = (
        "import time\nfrom evalstop_client import Run\n"
        "with Run(name='a run') as run:\n    run.log({'gold': 1.0}, step=1)\n    time.sleep(3600)"
    )
    own_key = "--job-key-env", "TRAINER_KEY"
    with guarded(tmp_path, server, code, *own_key, EVALSTOP_URL=server.url, TRAINER_KEY=KEY) as job:
        stored = wait_until(lambda: [run for run in service.runs.values() if run.observations])
        post_event(job.url, make_stop_event(stored[0].opening["labels"]))
        assert only_report(service)["state"] == "confirmed"
