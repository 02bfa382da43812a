"""Stops from the eval to the freed GPU on a real Slurm, by webhook and pull endpoint, with faults."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from evalstop_lab.rlhf.checkpoint import load_checkpoint
from evalstop_lab.service_process import Service

from tests.acceptance.examples.programs import EXAMPLES
from tests.clients.programs import wait_until
from tests.clients.receivers.slurm import trainer
from tests.clients.receivers.slurm.deployment import STOP_SECONDS, Deployment, Job, deploy
from tests.fixtures.forked_service import running_service
from tests.fixtures.slurm import SlurmCluster

pytestmark = pytest.mark.real

CHECKPOINT_OPTIONS = ("--checkpoint-signal", "USR1@batch", "--checkpoint-grace-seconds", "60")

EXAMPLE = """
trap 'kill -TERM $trainer' USR1  # the example saves its checkpoint on SIGTERM, and ends
{python} -m evalstop_lab.cli train --json --stop-by signal --policy paper --mode enforce --hasten 20 \\
  --preset {preset} --checkpoints {folder}/checkpoints --steps {steps} & trainer=$!
wait $trainer; wait $trainer
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, cluster: SlurmCluster) -> Iterator[Service]:
    """`evalstop up`."""
    with running_service(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture
def deployment(cluster: SlurmCluster, service: Service, tmp_path: Path) -> Iterator[Deployment]:
    """Cluster and service, without jobs or receivers; the logs of receivers are printed."""
    with ExitStack() as stack:
        deployment = stack.enter_context(deploy(cluster, service, tmp_path))
        yield deployment
        for log in sorted(tmp_path.glob("*/log")):
            print(f"--- {log}\n{log.read_text()}")


def submit_example(deployment: Deployment, run: str, preset: str, steps: int) -> Job:
    """Submit a job that runs the example trainer."""
    folder = deployment.folder / run
    script = EXAMPLE.format(python=sys.executable, preset=preset, folder=folder, steps=steps)
    return deployment.submit_script(run, script, OMP_NUM_THREADS="1")


def check_stop_frees_a_gpu(deployment: Deployment, receiver: str) -> None:
    """Of two trainers the overoptimizing one is stopped and a waiting job gets its GPU; the healthy one completes."""
    hacking = submit_example(deployment, f"hacking-{receiver}", "overoptimizes", 10_000)
    healthy = submit_example(deployment, f"healthy-{receiver}", "healthy", 400)
    wait_until(lambda: deployment.find_run(hacking) and deployment.find_run(healthy), STOP_SECONDS)
    waiting = deployment.submit_script(f"waiting-{receiver}", "date")
    assert deployment.cluster.get_job_state(waiting.id) == "PENDING"

    details = deployment.wait_for_confirmation(hacking)
    assert details["job"] == hacking.id
    wait_until(lambda: deployment.cluster.get_job_state(waiting.id) == "COMPLETED", STOP_SECONDS)
    wait_until(lambda: deployment.cluster.get_job_state(healthy.id) == "COMPLETED", STOP_SECONDS)
    # On a busy machine the healthy trainer may complete before the other one is stopped.
    freed = min(
        datetime.fromisoformat(deployment.cluster.get_job_field(job.id, "EndTime")) for job in (hacking, healthy)
    )
    started = datetime.fromisoformat(deployment.cluster.get_job_field(waiting.id, "StartTime"))
    assert started >= freed - timedelta(seconds=1)  # Slurm rounds both to whole seconds

    stopped, finished = deployment.find_run(hacking), deployment.find_run(healthy)
    assert stopped is not None
    assert finished is not None
    assert (stopped["status"], finished["status"], finished["decision"]) == ("stopped", "completed", None)
    assert stopped["labels"]["slurm_job_id"] == hacking.id
    checkpoints = sorted((hacking.folder / "checkpoints").iterdir())
    assert [file.suffix for file in checkpoints] == [".npz"] * len(checkpoints), "a checkpoint is incomplete"
    last = load_checkpoint(checkpoints[-1])
    assert last.state.step >= stopped["last_step"], "the final checkpoint is missing"
    assert Path(stopped["best_checkpoint"]["uri"].removeprefix("file://")) in checkpoints


def assert_saved_first(job: Job) -> None:
    """The job saved after it was asked, and before it was terminated."""
    events = job.read_events()
    assert events["asked"] < events["saved"]
    assert "terminated" not in events or events["saved"] < events["terminated"]


def test_stop_by_webhook(deployment: Deployment) -> None:
    """A receiver that listens stops the trainer, which saves on the signal."""
    deployment.start_listening_receiver("webhook", *CHECKPOINT_OPTIONS)
    check_stop_frees_a_gpu(deployment, "webhook")


@pytest.mark.nightly
def test_stop_by_pull_endpoint(deployment: Deployment) -> None:
    """A receiver that fetches its events does the same."""
    deployment.start_pulling_receiver("pull", *CHECKPOINT_OPTIONS)
    check_stop_frees_a_gpu(deployment, "pull")


@pytest.mark.nightly
def test_stop_continues_after_a_controller_restart(deployment: Deployment) -> None:
    """While slurmctld is down the stop stays open; afterwards it is confirmed."""
    deployment.start_listening_receiver("restart", *CHECKPOINT_OPTIONS)
    job = deployment.submit_trainer("through-a-restart", "--slow-save-seconds", "1")
    wait_until(lambda: "asked" in job.read_events(), STOP_SECONDS)
    deployment.cluster.stop_controller()
    try:
        wait_until(lambda: "saved" in job.read_events(), STOP_SECONDS)
        wait_until(lambda: "retrying" in deployment.read_log("restart"), STOP_SECONDS)
        decision = deployment.find_decision(job)
        assert decision is not None
        assert decision["state"] in ("requested", "acknowledged")
    finally:
        deployment.cluster.start_controller()
    details = deployment.wait_for_confirmation(job)
    assert (details["how"], details["checkpoint"]) == ("cancelled", "saved")
    assert_saved_first(job)


@pytest.mark.nightly
def test_stop_continues_after_a_receiver_crash(deployment: Deployment) -> None:
    """After SIGKILL during the save the next receiver continues the stop, and asks the job for no second checkpoint."""
    receiver = deployment.start_listening_receiver("killed", *CHECKPOINT_OPTIONS)
    job = deployment.submit_trainer("through-a-kill", "--slow-save-seconds", "1.5")
    wait_until(lambda: "asked" in job.read_events(), STOP_SECONDS)
    state = deployment.folder / "killed" / "state"
    wait_until(lambda: any('"checkpoint_requested_at": 1' in file.read_text() for file in state.glob("*.json")))
    receiver.send_signal(signal.SIGKILL)
    receiver.wait()
    deployment.start_listening_receiver("killed", *CHECKPOINT_OPTIONS)
    details = deployment.wait_for_confirmation(job)
    assert (details["how"], details["checkpoint"]) == ("cancelled", "saved")
    assert_saved_first(job)
    assert job.count_events("asked") == 1
    assert "continuing the stop" in deployment.read_log("killed")


@pytest.mark.parametrize("start", ["", "srun -n1 --overlap"], ids=["in the batch script", "a step each"])
def test_healthy_run_in_the_same_job_lives_on(deployment: Deployment, start: str) -> None:
    """The stop of one of two runs is on hold while both are in the batch script, and ends one step of two."""
    deployment.start_listening_receiver(f"two-runs{len(start)}", *CHECKPOINT_OPTIONS)
    turning, healthy = (
        Job("", run, deployment.make_folder(run)) for run in (f"turning{len(start)}", f"healthy{len(start)}")
    )
    first, second = (
        f"{start} {sys.executable} {trainer.__file__} {run.run} {run.folder} --peak {peak} &"
        for run, peak in ((healthy, 10**6), (turning, 5))
    )
    # A stop that is handed over before the service knows of the other run would end the whole job.
    script = f"{first}\nuntil [ -e {healthy.folder}/step-5 ]; do sleep 0.1; done\nsleep 1\n{second}"
    job = deployment.submit_script("two-runs", f"{script}\nwait")

    def find_state() -> str | None:
        decision = deployment.find_decision(turning)
        return decision["state"] if decision else None

    wait_until(lambda: find_state() == ("confirmed" if start else "on_hold"), STOP_SECONDS)
    run, decision = deployment.find_run(healthy), deployment.find_decision(turning)
    assert run is not None
    assert decision is not None
    assert (run["status"], run["decision"]) == ("running", None)
    assert "terminated" not in healthy.read_events()
    assert deployment.cluster.get_job_state(job.id) == "RUNNING"
    if start:
        assert "terminated" in turning.read_events()
    else:
        assert decision["state_reason"] == f"1 other live run in this job: {healthy.run}"


REQUEUES = """
trap 'scontrol requeue $SLURM_JOB_ID' {signal}  # as Lightning does by USR1, and submitit by USR2
{python} {trainer} {run} {folder} & wait $!
while kill -0 $! 2>/dev/null; do wait $!; done
"""


@pytest.mark.parametrize(
    "signal", ["USR1", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("USR2", "HUP"))]
)
def test_job_that_requeues_itself_when_asked_to_save_is_ended(deployment: Deployment, signal: str) -> None:
    """The requeue that the stop provoked is cancelled too: confirmed means that the job does not wait to run again."""
    run = f"requeues-itself-{signal}"
    deployment.start_listening_receiver(run, "--checkpoint-signal", f"{signal}@batch")
    folder = deployment.make_folder(run)
    values = {"python": sys.executable, "trainer": trainer.__file__, "run": run, "folder": folder}
    job = deployment.submit_script(run, REQUEUES.format(signal=signal, **values))
    details = deployment.wait_for_confirmation(job)
    assert (details["how"], details["scheduler_state"]) == ("cancelled", "CANCELLED")
    assert deployment.cluster.get_job_field(job.id, "Restarts") == "1"


@pytest.mark.nightly
def test_parked_run_recovers_and_completes(cluster: SlurmCluster, tmp_path: Path) -> None:
    """A held run continues from its checkpoint when nobody waits, recovers, and ends with a better eval."""
    with running_service(tmp_path / "service") as service, deploy(cluster, service, tmp_path) as deployment:
        deployment.start_listening_receiver("receiver", "--return-idle", "1")
        suspect, folder, parked = park_while_another_runs(deployment, tmp_path)
        wait_until(lambda: "may run while nobody waits" in deployment.read_log("receiver"), STOP_SECONDS)
        cluster.start_requeued_job(suspect.id)
        completed = wait_for_status(deployment, suspect, "completed")
        history = deployment.api.get(f"/decisions/{parked['decision']['id']}").raise_for_status().json()["history"]
    assert [change["state"] for change in history][-2:] == ["parked", "undone"]
    assert history[-1]["actor"] == "policy reversible version 1"
    assert (folder / "output").read_text().count("resumed at step") == 1
    assert completed["best_checkpoint"]["score"] < parked["best_checkpoint"]["score"], (
        "the eval, a loss, did not improve"
    )
    decided, freed = (datetime.fromisoformat(history[i]["at"]) for i in (0, -2))
    print(f"{(freed - decided).total_seconds():.2f} s from the decision to the freed GPUs")


def park_while_another_runs(deployment: Deployment, tmp_path: Path) -> tuple[Job, Path, dict[str, Any]]:
    """The job of a run that is parked, so that another job could run and complete; its folder, and the run."""
    folder = tmp_path / "suspect"
    folder.mkdir()
    script = f"cd {folder} && exec {sys.executable} {EXAMPLES / 'park_and_resume.py'}"
    suspect = deployment.submit_script("suspect", script, gpus=2, EXAMPLE_PAUSE="0.02")
    wait_until(lambda: deployment.find_run(suspect), STOP_SECONDS)
    waiting = deployment.submit_script("waiting", "sleep 2", gpus=2)
    parked = wait_for_status(deployment, suspect, "parked")
    wait_until(lambda: deployment.cluster.get_job_state(waiting.id) == "COMPLETED", STOP_SECONDS)
    return suspect, folder, parked


def wait_for_status(deployment: Deployment, job: Job, status: str) -> dict[str, Any]:
    """A job's run, once it has this status."""

    def find() -> dict[str, Any]:
        run = deployment.find_run(job) or {}
        return run if run.get("status") == status else {}

    return wait_until(find, 2 * STOP_SECONDS)
