"""`evalstop-receiver process` as a program: a job that is started again from the checkpoint of another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clients.fake_service import KEY, FakeServer, FakeService
from tests.clients.programs import is_alive
from tests.clients.receivers.process_receiver import SLEEP, start_job
from tests.clients.webhooks import make_event, post_event

pytestmark = pytest.mark.real

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
