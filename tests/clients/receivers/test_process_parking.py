"""`evalstop-receiver process` as a program: a job that is ended to be started again, later or from a copy."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from evalstop_client.receivers.child_job import ChildJob, ProcessJobControl
from evalstop_client.receivers.process import FORWARDED, Forwarding, await_end
from evalstop_client.receivers.stop.job_control import Job, Parked, parse_stop_request

from tests.clients.fake_service import KEY, FakeServer, FakeService
from tests.clients.programs import is_alive, wait_until
from tests.clients.receivers.process_receiver import (
    ENDS_ON_SIGTERM,
    EXITS_WITH_7,
    SLEEP,
    start_job,
    wait_for_report,
)
from tests.clients.webhooks import make_event, make_stop_event, post_event

pytestmark = pytest.mark.real

SAVES_FOR_A_SECOND = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(3)))
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


def test_restartable_job_is_parked_and_resumed(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """A parked job is ended; resumed, it starts again under its label, and its exit code is the receiver's."""
    code = f"""
import pathlib, sys, time
print('up', flush=True)
if pathlib.Path({str(tmp_path / "end")!r}).exists():
    sys.exit(7)
{SLEEP}
"""
    with start_job(tmp_path, server, code, "--restartable") as job:
        assert post_event(job.url, make_event("run.park_requested", job.label)).status_code == 202
        report = wait_for_report(service)
        assert (report["state"], report["details"]["parked_as"]) == ("parked", "terminated")
        assert not is_alive(job.ready["job_pid"])
        (tmp_path / "end").touch()
        assert job.process.poll() is None, "the receiver ended while its job was parked"
        resume = make_event("run.resume_requested", job.label)
        # 409 until the receiver has recorded that its report was accepted; the service retries
        wait_until(lambda: post_event(job.url, resume, webhook_id="msg_2").status_code == 202)
        assert job.read_line() == "up"
        assert job.process.wait(60) == 7


@pytest.mark.nightly
def test_receiver_of_a_parked_job_exits_with_its_code(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """SIGTERM to the receiver of a parked job ends it with the exit code that the job had."""
    with start_job(tmp_path, server, EXITS_WITH_7, "--restartable") as job:
        post_event(job.url, make_event("run.park_requested", job.label))
        assert wait_for_report(service)["state"] == "parked"
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(60) == 7


def test_receiver_of_a_parked_job_exits_when_it_is_stopped(
    tmp_path: Path, server: FakeServer, service: FakeService
) -> None:
    """A stop of a parked job is confirmed, and ends its receiver with the exit code that the job had."""
    with start_job(tmp_path, server, EXITS_WITH_7, "--restartable") as job:
        post_event(job.url, make_event("run.park_requested", job.label))
        assert wait_for_report(service)["state"] == "parked"
        stop = make_stop_event(job.label)
        # 200 until the receiver has recorded that its report was accepted
        wait_until(lambda: post_event(job.url, stop, webhook_id="msg_2").status_code == 202)
        assert job.process.wait(60) == 7
        assert [report["state"] for _, report in service.reports] == ["parked", "confirmed"]


class JobWithReusedId(ChildJob):
    """Its process id belongs to another job once it has ended."""

    reused_by: ChildJob | None = None

    @property
    def pid(self) -> int:
        return super().pid if self.reused_by is None else self.reused_by.pid


def test_process_that_has_the_id_of_a_parked_job_is_left_alone() -> None:
    """Once a parked job has ended, a process group that gets its id is not taken for the job."""
    command = [sys.executable, "-c", ENDS_ON_SIGTERM]
    parked, other = JobWithReusedId(command, os.environ), ChildJob(command, os.environ)
    control = ProcessJobControl(parked, "receiver-1", restart=lambda added: other)
    job, request = Job("1"), parse_stop_request("msg_1", make_stop_event({}))
    control.park_job(job, request)
    wait_until(lambda: isinstance(control.check_parked(job), Parked))
    parked.reused_by = other
    assert isinstance(control.check_parked(job), Parked)
    control.cancel_job(job, request)
    control.kill_job(job)
    assert other.wait(0.5) is None, "it was ended"
    control.resume_job(job)
    assert control.job is other
    other.signal(signal.SIGKILL)
    other.wait()


class ResumedMeanwhile(ProcessJobControl):
    """Is resumed just after its parked job was first looked at."""

    looked_at = False

    @property
    def job(self) -> ChildJob:
        job = super().job
        if not self.looked_at:
            self.looked_at = True
            self.resume_job(Job("1"))
        return job


@pytest.fixture
def forwarding() -> Iterator[Forwarding]:
    """Forwards the signals of this process until the test ends."""
    before = {number: signal.getsignal(number) for number in FORWARDED}
    yield Forwarding()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.nightly
def test_exit_code_is_that_of_the_resumed_job(forwarding: Forwarding) -> None:
    """A job that is resumed while its receiver checks whether it is parked is waited for."""
    first, second = (ChildJob([sys.executable, "-c", f"raise SystemExit({code})"], os.environ) for code in (3, 7))
    control = ResumedMeanwhile(first, "receiver-1", restart=lambda added: second)
    assert first.wait(60) == 3
    control.park_job(Job("1"), parse_stop_request("msg_1", make_stop_event({})))
    assert await_end(control, forwarding) == 7


def test_parked_job_that_is_resumed_while_it_ends_starts_again(tmp_path: Path, forwarding: Forwarding) -> None:
    """However long it takes to save its checkpoint, the receiver waits for it and then starts it again."""
    first = ChildJob([sys.executable, "-c", SAVES_FOR_A_SECOND, str(tmp_path / "started")], os.environ)
    control = ProcessJobControl(
        first, "receiver-1", restart=lambda added: ChildJob([sys.executable, "-c", "raise SystemExit(7)"], os.environ)
    )
    wait_until((tmp_path / "started").exists)
    control.park_job(Job("1"), parse_stop_request("msg_1", make_stop_event({})))
    control.resume_job(Job("1"))
    assert control.job is first
    assert await_end(control, forwarding) == 7


@pytest.mark.nightly
def test_job_that_is_being_started_again_gets_the_signal_to_end(forwarding: Forwarding) -> None:
    """A signal that arrives between the end of a parked job and its new start ends the job that is started."""
    first = forwarding.to(ChildJob([sys.executable, "-c", ""], os.environ))
    assert first.wait(60) == 0
    signal.raise_signal(signal.SIGTERM)
    second = forwarding.to(ChildJob([sys.executable, "-c", "import time; time.sleep(20)"], os.environ))
    assert second.wait(60) == -signal.SIGTERM


def test_job_that_is_not_restartable_is_not_parked(tmp_path: Path, server: FakeServer, service: FakeService) -> None:
    """Without --restartable the job runs on, and the report says why."""
    with start_job(tmp_path, server, ENDS_ON_SIGTERM) as job:
        post_event(job.url, make_event("run.park_requested", job.label))
        report = wait_for_report(service)
        assert (report["state"], "--restartable" in report["reason"]) == ("failed", True)
        assert is_alive(job.ready["job_pid"])


COPY = {
    "decision_id": "decision-1",
    "source_run": "run-9",
    "source_name": "member-3",
    "source_step": 20,
    "source_checkpoint": "s3://of 3/20",
    "hyperparameters": {"lr": 0.1},
}

JOB = f"""
import os, signal
from evalstop_client import Limits, Run
if os.environ.get("DEAF"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with Run("a run", resume="allow", limits=Limits(flush_seconds=60)) as run:
    step = int(os.environ.get("EVALSTOP_EXPLOIT_STEP", 30)) + 1
    run.log({{"score": 0.5}}, step=step)
    run.flush()
    print("up", flush=True)
    names = ("CHECKPOINT", "STEP", "HYPERPARAMETERS")
    print(*(os.environ.get(f"EVALSTOP_EXPLOIT_{{name}}") for name in names), flush=True)
    import time
    {SLEEP}
"""


def make_copy_event(labels: dict[str, str], **fields: Any) -> dict[str, Any]:
    event = make_event("run.exploit_requested", labels)
    return event | {"data": event["data"] | {"exploit": COPY} | fields}


@pytest.mark.parametrize("deaf", ["", pytest.param("1", marks=pytest.mark.nightly)])
def test_job_is_started_again_for_a_copy(tmp_path: Path, server: FakeServer, service: FakeService, deaf: str) -> None:
    """It finds what to load in its environment, and its client confirms the copy. It is killed if SIGTERM does not end
    it; the same request again changes nothing."""
    service.exploit = dict(COPY)
    options = ("--restartable", "--job-key-env", "TRAINER_KEY", "--grace-seconds", "0.5" if deaf else "30")
    with start_job(tmp_path, server, JOB, *options, DEAF=deaf, EVALSTOP_URL=server.url, TRAINER_KEY=KEY) as job:
        assert job.read_line() == "None None None"
        event = make_copy_event(job.label)
        assert post_event(job.url, event).status_code == 202
        assert job.read_line() == "up"
        assert job.read_line() == 's3://of 3/20 20 {"lr": 0.1}'
        assert not is_alive(job.ready["job_pid"])
        assert post_event(job.url, event, webhook_id="msg_2").status_code == 202
        run = service.find_run("a run")
        assert run.observations == {(1, "score", 31): 0.5, (2, "score", 21): 0.5}
        assert post_event(job.url, make_event("run.stop_requested", job.label, "decision-2")).status_code == 202
        assert job.process.wait(60) in (128 + 9, 128 + 15)
        assert service.reports[0][1]["state"] == "confirmed", "the job that copied can be stopped as any other"
        assert run.attempt == 2, "it was started again for the repeated request"


@pytest.mark.parametrize(
    ("options", "fields", "status"),
    [
        ((), {}, 200),
        (("--restartable",), {"job": {"ends": "process"}}, 200),
        (("--restartable",), {"run": {"id": "run-1", "labels": {"receiver": "another"}}}, 200),
        (("--restartable",), {"exploit": None}, 422),
        (("--restartable",), {"exploit": COPY | {"source_step": None}}, 422),
    ],
)
def test_job_that_is_not_to_be_restarted_runs_on(
    tmp_path: Path, server: FakeServer, options: tuple[str, ...], fields: dict[str, Any], status: int
) -> None:
    """Without --restartable, with other runs in the job, under another receiver, or with an event that names nothing
    to copy."""
    with start_job(tmp_path, server, "import time; print('up', flush=True); time.sleep(3600)", *options) as job:
        assert post_event(job.url, make_copy_event(job.label, **fields)).status_code == status
        assert is_alive(job.ready["job_pid"])
