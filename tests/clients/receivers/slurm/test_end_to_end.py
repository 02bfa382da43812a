"""Stops from the eval to the freed GPU, on a real Slurm: the story, by every way in, with faults at the worst time."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from evalstop_lab.rlhf.checkpoint import load_checkpoint
from evalstop_lab.service_process import Service, running_service

from tests.clients.programs import wait_until
from tests.clients.receivers.slurm.deployment import PATIENCE_SECONDS, Job, Stage, staged
from tests.fixtures.slurm import SlurmCluster

pytestmark = pytest.mark.real

SIGNAL = ("--checkpoint-signal", "USR1@batch", "--checkpoint-grace-seconds", "60")

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
def stage(cluster: SlurmCluster, service: Service, tmp_path: Path) -> Iterator[Stage]:
    """Cluster and service, without a job or a receiver; a test that fails shows what its receivers said."""
    with ExitStack() as stack:
        stage = stack.enter_context(staged(cluster, service, tmp_path))
        yield stage
        for log in sorted(tmp_path.glob("*/log")):
            print(f"--- {log}\n{log.read_text()}")


def example(stage: Stage, run: str, preset: str, steps: int) -> Job:
    """A job that runs the example trainer."""
    folder = stage.folder / run
    script = EXAMPLE.format(python=sys.executable, preset=preset, folder=folder, steps=steps)
    return stage.batch(run, script, OMP_NUM_THREADS="1")


def play(stage: Stage, receiver: str) -> None:
    """Two trainers have the GPUs, a third job waits; one trainer is hacking and is stopped, the other one finishes."""
    hacking = example(stage, f"hacking-{receiver}", "overoptimizes", 10_000)
    healthy = example(stage, f"healthy-{receiver}", "healthy", 400)
    wait_until(lambda: stage.run(hacking) and stage.run(healthy), PATIENCE_SECONDS)
    waiting = stage.batch(f"waiting-{receiver}", "date")
    assert stage.cluster.get_job_state(waiting.id) == "PENDING"

    details = stage.confirmed(hacking)
    assert details["gpus_freed"] == 1
    assert details["job"] == hacking.id
    assert details["actor"] == "evalstop-receiver slurm"
    wait_until(lambda: stage.cluster.get_job_state(waiting.id) == "COMPLETED", PATIENCE_SECONDS)
    wait_until(lambda: stage.cluster.get_job_state(healthy.id) == "COMPLETED", PATIENCE_SECONDS)
    # On a busy machine the healthy trainer may be done before the other one is stopped.
    freed = min(datetime.fromisoformat(stage.cluster.get_job_field(job.id, "EndTime")) for job in (hacking, healthy))
    began = datetime.fromisoformat(stage.cluster.get_job_field(waiting.id, "StartTime"))
    assert began >= freed - timedelta(seconds=1)  # Slurm rounds both to whole seconds

    stopped, finished = stage.run(hacking), stage.run(healthy)
    assert stopped is not None
    assert finished is not None
    assert (stopped["status"], finished["status"], finished["decision"]) == ("stopped", "completed", None)
    assert stopped["labels"]["slurm_job_id"] == hacking.id
    checkpoints = sorted((hacking.folder / "checkpoints").iterdir())
    assert [file.suffix for file in checkpoints] == [".npz"] * len(checkpoints), "one was left half written"
    last = load_checkpoint(checkpoints[-1])
    assert last.state.step >= stopped["last_step"], "the checkpoint of where it ended is missing"
    assert Path(stopped["best_checkpoint"]["uri"].removeprefix("file://")) in checkpoints


def assert_saved_first(job: Job) -> None:
    """The job was asked, saved, and only then told to end."""
    story = job.story()
    assert story["asked"] < story["saved"]
    assert "terminated" not in story or story["saved"] < story["terminated"]


def test_story_by_webhook(stage: Stage) -> None:
    """The example trainer saves on the signal and ends; the GPU goes to the job that waits for it."""
    stage.listening_receiver("webhook", *SIGNAL)
    play(stage, "webhook")


def test_story_by_pull(stage: Stage) -> None:
    """The same for a receiver that nobody can connect to."""
    stage.pulling_receiver("pull", *SIGNAL)
    play(stage, "pull")


def test_stop_through_slurmrestd(stage: Stage) -> None:
    """Signal, cancel and confirmation through the REST interface, with a token that a command makes."""
    options = ["--rest", stage.cluster.rest_url, "--cluster", stage.cluster.name]
    options += ["--token-command", "scontrol token lifespan=60", "--checkpoint-signal", "USR1@full"]
    stage.listening_receiver("rest", *options)
    job = stage.submit("through-rest", "--slow-save-seconds", "1")
    details = stage.confirmed(job)
    assert (details["how"], details["checkpoint"], details["gpus_freed"]) == ("cancelled", "saved", 1)
    assert_saved_first(job)


def test_controller_is_restarted_in_the_middle(stage: Stage) -> None:
    """slurmctld goes away while the job saves, and comes back: the stop is gone on with, nothing is taken for gone."""
    stage.listening_receiver("restart", *SIGNAL)
    job = stage.submit("through-a-restart", "--slow-save-seconds", "1")
    wait_until(lambda: "asked" in job.story(), PATIENCE_SECONDS)
    stage.cluster.stop_controller()
    try:
        wait_until(lambda: "saved" in job.story(), PATIENCE_SECONDS)
        wait_until(lambda: "retrying" in stage.log("restart"), PATIENCE_SECONDS)
        decision = stage.decision(job)
        assert decision is not None
        assert decision["state"] in ("requested", "acknowledged")
    finally:
        stage.cluster.start_controller()
    details = stage.confirmed(job)
    assert (details["how"], details["checkpoint"]) == ("cancelled", "saved")
    assert_saved_first(job)


def test_receiver_is_killed_in_the_middle(stage: Stage) -> None:
    """kill -9 while the job saves: the next receiver goes on where it was, the job is asked no second time."""
    receiver = stage.listening_receiver("killed", *SIGNAL)
    job = stage.submit("through-a-kill", "--slow-save-seconds", "1.5")
    wait_until(lambda: "asked" in job.story(), PATIENCE_SECONDS)
    state = stage.folder / "killed" / "state"
    wait_until(lambda: any('"asked_at": 1' in file.read_text() for file in state.glob("*.json")))
    receiver.send_signal(signal.SIGKILL)
    receiver.wait()
    stage.listening_receiver("killed", *SIGNAL)
    details = stage.confirmed(job)
    assert (details["how"], details["checkpoint"]) == ("cancelled", "saved")
    assert_saved_first(job)
    assert job.times("asked") == 1
    assert "continuing the stop" in stage.log("killed")


def test_trainer_that_ignores_sigterm_is_ended(stage: Stage) -> None:
    """Deaf to the cancel, it still saves when it is asked, and is gone after Slurm's KillWait."""
    stage.listening_receiver("deaf", *SIGNAL)
    job = stage.submit("deaf", "--deaf")
    details = stage.confirmed(job)
    assert details["checkpoint"] == "saved"
    assert "saved" in job.story()
    assert details["seconds"] >= 3
    assert details["signal"] in (9, 15, None)
