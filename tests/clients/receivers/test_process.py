"""`evalstop-receiver process` as a program, with jobs that obey, ignore SIGTERM, have descendants or have ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from evalstop_client.receivers.child_job import DEAD_STATES, list_processes, list_processes_by_ps
from evalstop_client.receivers.process import label_environment
from evalstop_client.settings import parse_labels

from tests.clients.fake_service import KEY, Answer, FakeServer, FakeService
from tests.clients.programs import is_alive, wait_until
from tests.clients.receivers.process_receiver import (
    ENDS_ON_SIGTERM,
    EXITS_WITH_7,
    IGNORES_SIGTERM,
    SLEEP,
    start_job,
    start_receiver,
    wait_for_report,
)
from tests.clients.receivers.receiver_program import RECEIVER
from tests.clients.webhooks import SECRET, make_event, make_stop_event, post_event

pytestmark = pytest.mark.real


def test_job_is_ended_by_sigterm_and_confirmed(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """A stop sends SIGTERM and is confirmed; the receiver exits like a job that was killed by it."""
    with start_job(tmp_path, server, ENDS_ON_SIGTERM) as job:
        assert post_event(job.url, make_stop_event(job.label)).status_code == 202
        report = wait_for_report(service)
        assert report["state"] == "confirmed"
        details = report["details"]
        assert details["exit_status"] == -signal.SIGTERM
        assert details["how"] == "cancelled"
        assert job.process.wait(60) == 128 + signal.SIGTERM
        assert not is_alive(job.ready["job_pid"])


@pytest.mark.nightly
def test_job_that_cleans_up_keeps_its_own_exit_code(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """A job that handles SIGTERM and exits with 7 is reported with 7, which is the receiver's exit code too."""
    with start_job(tmp_path, server, EXITS_WITH_7) as job:
        post_event(job.url, make_stop_event(job.label))
        details = wait_for_report(service)["details"]
        assert details["exit_status"] == 7
        assert job.process.wait(60) == 7


def test_job_that_survives_until_its_stop_is_taken_back_runs_on(
    tmp_path: Path, server: FakeServer, service: FakeService
) -> None:
    """A job that ignores SIGTERM is not killed once the stop is undone. A later decision kills it after its grace."""
    code = IGNORES_SIGTERM.replace("signal.SIG_IGN", "lambda *_: print('asked', flush=True)")
    with start_job(tmp_path, server, code, "--grace-seconds", "2") as job:
        post_event(job.url, make_stop_event(job.label))
        assert job.read_line() == "asked"
        resume = make_event("run.resume_requested", job.label)
        assert post_event(job.url, resume, webhook_id="msg_2").status_code == 409
        wait_until(lambda: post_event(job.url, resume, webhook_id="msg_2").status_code == 202)
        assert is_alive(job.ready["job_pid"])
        assert service.reports == []
        later = make_stop_event(job.label)
        later["data"]["decision"]["id"] = "decision-2"
        post_event(job.url, later, webhook_id="msg_3")
        report = wait_for_report(service)
        assert (report["state"], report["reason"]) == ("confirmed", "the job ended after it was forced to")
        assert report["details"]["seconds"] >= 2
        assert job.process.wait(60) == 128 + signal.SIGKILL


@pytest.mark.parametrize("new_session", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_descendants_are_ended(tmp_path: Path, server: FakeServer, service: FakeService, new_session: bool) -> None:
    """Descendants that ignore SIGTERM are killed, in sessions of their own too, as torchrun's workers are."""
    code = (
        "import subprocess, sys, time\n"
        f"command, new_session = [sys.executable, '-c', {IGNORES_SIGTERM!r}], {new_session}\n"
        "worker = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=new_session)\n"
        "worker.stdout.readline(); print(worker.pid, flush=True); time.sleep(3600)"
    )
    with start_receiver(tmp_path, server, code, "--grace-seconds", "0.5") as job:
        worker = int(job.read_line())
        assert is_alive(worker)
        post_event(job.url, make_stop_event(job.label))
        report = wait_for_report(service)
        assert report["state"] == "confirmed"
        assert not is_alive(worker)
        assert report["details"]["exit_status"] == -15


def test_concurrent_decisions_are_reported_once_each(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """A repeated webhook has no effect, and a second decision during the stop gets the same report."""
    with start_job(tmp_path, server, IGNORES_SIGTERM, "--grace-seconds", "0.5") as job:
        assert post_event(job.url, make_stop_event(job.label)).status_code == 202
        assert post_event(job.url, make_stop_event(job.label)).status_code == 200
        assert post_event(job.url, make_stop_event(job.label, "decision-2"), webhook_id="msg_2").status_code == 202
        wait_until(lambda: len(service.reports) == 2)
        (first_id, first), (second_id, second) = sorted(service.reports)
        assert (first_id, second_id) == ("decision-1", "decision-2")
        assert first["details"]["exit_status"] == second["details"]["exit_status"] == -signal.SIGKILL


def test_stop_of_another_run_is_ignored(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """A stop for a run with another label, or none, or with a bad signature does not end the job."""
    with start_job(tmp_path, server, ENDS_ON_SIGTERM) as job:
        assert post_event(job.url, make_stop_event({"receiver": "someone else"}, "1")).status_code == 202
        assert post_event(job.url, make_stop_event({}, "2")).status_code == 202
        assert post_event(job.url, make_stop_event(job.label, "3"), secret="whsec_AAAA").status_code == 401
        assert is_alive(job.ready["job_pid"])
        assert post_event(job.url, make_stop_event(job.label, "4")).status_code == 202
        wait_for_report(service)


@pytest.mark.nightly
def test_job_that_ended_by_itself_is_confirmed(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """A stop that arrives after the job has ended is confirmed, with the job's exit status."""
    with start_receiver(tmp_path, server, "raise SystemExit(3)", "--linger-seconds", "60") as job:
        wait_until(lambda: not is_alive(job.ready["job_pid"]))
        post_event(job.url, make_stop_event(job.label))
        report = wait_for_report(service)
        assert report["state"] == "confirmed"
        assert report["details"]["how"] == "by_itself"
        assert report["details"]["exit_status"] == 3
        assert job.process.wait(60) == 3


@pytest.mark.nightly
def test_receiver_waits_until_its_report_is_accepted(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """The receiver exits only after the service, unavailable at first, has accepted the report."""
    service.scripted_answers = [Answer(503, {}), Answer(503, {})]
    with start_job(tmp_path, server, ENDS_ON_SIGTERM) as job:
        post_event(job.url, make_stop_event(job.label))
        assert job.process.wait(60) == 143
        assert wait_for_report(service)["state"] == "confirmed"


@pytest.mark.nightly
def test_receiver_gives_up_reporting_after_its_timeout(
    tmp_path: Path, server: FakeServer, service: FakeService
) -> None:
    """A service that never accepts the report does not keep the receiver running."""
    service.scripted_answers = [Answer(503, {})] * 10_000
    with start_job(tmp_path, server, ENDS_ON_SIGTERM, "--report-seconds", "0", "--grace-seconds", "1") as job:
        post_event(job.url, make_stop_event(job.label))
        assert job.process.wait(40) == 143


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.nightly) for number in (signal.SIGINT, signal.SIGUSR1))],
)
def test_signals_are_passed_to_the_job(
    tmp_path: Path, server: FakeServer, service: FakeService, number: signal.Signals
) -> None:
    """SIGTERM, SIGINT and SIGUSR1 to the receiver reach the job, which may handle them."""
    code = (
        "import os, signal, time\n"  # os.write is safe in a signal handler, print is not
        f"signal.signal({int(number)}, lambda got, _: (os.write(1, b'got %d\\n' % got), os._exit(9)))\n"
        f"print('up', flush=True)\n{SLEEP}"
    )
    with start_job(tmp_path, server, code, "--linger-seconds", "0") as job:
        job.process.send_signal(number)
        assert job.read_line() == f"got {int(number)}"
        assert job.process.wait(60) == 9
    assert service.reports == []


def test_job_gets_streams_and_label_but_no_secret(server: FakeServer) -> None:
    """The job has the receiver's streams and label; the webhook secret and the operator's key are removed."""
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
    completed = subprocess.run(
        command, input="hello", capture_output=True, text=True, env=environment, timeout=60, check=True
    )
    job_environment, standard_input = json.loads(completed.stdout)
    labels = parse_labels(job_environment["EVALSTOP_LABELS"])
    assert standard_input == "hello"
    assert "e" in completed.stderr.splitlines()  # the receiver logs there too, before or after
    assert labels["seed"] == "3"
    assert labels["receiver"]
    assert job_environment["EVALSTOP_KEY"] == "esk_ingest"
    assert SECRET not in job_environment.values()
    assert "esk_operator" not in job_environment.values()


@pytest.mark.parametrize(
    ("options", "key"), [((), None), (("--job-key-env", "TRAINER_KEY"), "esk_ingest")], ids=["none", "its own"]
)
def test_job_never_gets_the_receiver_s_key(
    tmp_path: Path, server: FakeServer, options: tuple[str, ...], key: str | None
) -> None:
    """By default the job has no key; with --job-key-env it has that one, as EVALSTOP_KEY only."""
    code = "import json, os; print(json.dumps(dict(os.environ)), flush=True)"
    with start_receiver(tmp_path, server, code, *options, TRAINER_KEY="esk_ingest") as job:
        job_environment = json.loads(job.read_line())
    assert job_environment.get("EVALSTOP_KEY") == key
    assert KEY not in job_environment.values()
    assert ("TRAINER_KEY" in job_environment) == (key is None)


def test_a_receiver_cannot_be_read_by_its_user(server: FakeServer) -> None:
    """The receiver is not dumpable, so other processes of its user cannot read its memory; the job is."""
    asks = "import ctypes; print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), flush=True)"  # PR_GET_DUMPABLE
    options = ["process", "--url", server.url, "--linger-seconds", "0", "--", sys.executable, "-c", asks]
    receiver = f"from evalstop_client.receivers.cli import main; main({options!r}); {asks}"
    environment = {**os.environ, "EVALSTOP_WEBHOOK_SECRET": SECRET, "EVALSTOP_KEY": KEY}
    completed = subprocess.run(
        [sys.executable, "-c", receiver], capture_output=True, text=True, env=environment, check=True
    )
    assert completed.stdout.split() == ["1", "0"]


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("ps") is None, reason="needs ps")
def test_ps_lists_parent_and_group() -> None:
    """Without /proc, `ps` gives the parent and the process group."""
    (by_ps,) = [process for process in list_processes_by_ps() if process.pid == os.getpid()]
    assert (by_ps.parent, by_ps.group) == (os.getppid(), os.getpgid(0))
    assert by_ps.state[:1] not in DEAD_STATES


@pytest.mark.nightly
def test_label_replaces_an_outer_receivers_label() -> None:
    """A receiver inside a job of another receiver sets its own label."""
    outer = label_environment({"EVALSTOP_LABELS": "a=b"}, "outer")
    assert parse_labels(label_environment(outer, "inner")["EVALSTOP_LABELS"]) == {"a": "b", "receiver": "inner"}


def test_mlflow_run_context_has_receiver_and_scheduler_labels() -> None:
    """MLFLOW_RUN_CONTEXT has the receiver's label, and the scheduler's labels."""
    tags = json.loads(label_environment({"SLURM_JOB_ID": "4711"}, "inner")["MLFLOW_RUN_CONTEXT"])
    assert (tags["receiver"], tags["slurm_job_id"]) == ("inner", "4711")


def test_real_trainer_is_stopped_by_its_label(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """A trainer under a receiver sends the label, and a stop with that label ends it."""
    code = (
        "import time\nfrom evalstop_client import Run\n"
        "with Run(name='a run') as run:\n    run.log({'score': 1.0}, step=1)\n    time.sleep(3600)"
    )
    own_key = "--job-key-env", "TRAINER_KEY"
    with start_receiver(tmp_path, server, code, *own_key, EVALSTOP_URL=server.url, TRAINER_KEY=KEY) as job:
        stored = wait_until(lambda: [run for run in service.runs.values() if run.observations])
        post_event(job.url, make_stop_event(stored[0].opening["labels"]))
        assert wait_for_report(service)["state"] == "confirmed"


TWO_RUNS = """
import subprocess, sys
code = '''
import os, signal, subprocess, sys, time
from evalstop_client.job_identity import name_process
worker = subprocess.Popen(["sleep", "3600"])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
os.write(1, name_process({}).encode() + bytes([10]))  # at once: print may write the end of the line by itself
while True: time.sleep(0.1)
'''
runs = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
print("ended", [run.wait() for run in runs], flush=True)
"""


def test_one_of_two_runs_ends_alone(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """A stop that may end only a process ends it and its children; the other run, and the job, go on."""
    with start_receiver(tmp_path, server, TWO_RUNS) as job:
        stopped, healthy = (job.read_line() for _ in range(2))
        event = make_stop_event({**job.label, "process_id": stopped})
        event["data"]["job"] = {"ends": "process", "other_runs": ["b"]}
        family = [int(stopped.partition(":")[0]), *list_children(int(stopped.partition(":")[0]))]
        assert len(family) == 2
        post_event(job.url, event)
        report = wait_for_report(service)
        assert (report["state"], report["details"]["job"]) == ("confirmed", stopped)
        assert not any(map(is_alive, family))
        others = [int(healthy.partition(":")[0]), *list_children(int(healthy.partition(":")[0])), job.ready["job_pid"]]
        assert all(map(is_alive, others))


@pytest.mark.parametrize(
    "process_id",
    [pytest.param("", marks=pytest.mark.nightly), "1:1", pytest.param("99999999:5", marks=pytest.mark.nightly)],
)
def test_process_that_is_not_the_jobs_is_refused(
    tmp_path: Path, server: FakeServer, service: FakeService, process_id: str
) -> None:
    """A label that names no living process of the job ends nothing, and the stop fails."""
    with start_job(tmp_path, server, ENDS_ON_SIGTERM) as job:
        event = make_stop_event({**job.label, "process_id": process_id})
        event["data"]["job"] = {"ends": "process", "other_runs": ["b"]}
        post_event(job.url, event)
        assert wait_for_report(service)["state"] == "failed"
        assert is_alive(job.ready["job_pid"])


def list_children(pid: int) -> list[int]:
    return [process.pid for process in list_processes() if process.parent == pid]
