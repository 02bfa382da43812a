"""SlurmJobControl on a real Slurm: conformance, and Slurm's own rules."""

from __future__ import annotations

import os
import pwd
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from evalstop_client.errors import RequestRefused, SchedulerUnavailable
from evalstop_client.receivers.slurm.commands import Programs
from evalstop_client.receivers.slurm.control import SlurmJobControl
from evalstop_client.receivers.stop.execution import ReceiverContext
from evalstop_client.receivers.stop.job_control import Job, Present, Unproven, parse_stop_request
from evalstop_client.receivers.stop.journal import Journal
from evalstop_client.receivers.stop.receiver import IdleReturns
from evalstop_client.receivers.stop.state_machine import Phase, Report, Stop, StopTimeouts
from evalstop_client.receivers.stop.webhooks import Receiver

from tests.clients.programs import wait_until
from tests.clients.receivers.conformance import (
    DroppedReports,
    SavingConformance,
    find_job,
    make_stop_request,
    wait_until_gone,
    wait_until_parked,
)
from tests.clients.receivers.slurm.launcher import FULL_SIGNAL, USER, SlurmLauncher
from tests.clients.webhooks import make_stop_event
from tests.fixtures.slurm import SlurmCluster

pytestmark = pytest.mark.real


class TestSlurm(SavingConformance):
    """squeue, scancel and scontrol."""


def test_only_one_task_of_an_array_is_cancelled(launcher: SlurmLauncher) -> None:
    """The last task of an array has the array's own id, and a cancel by that id would end every task."""
    started = launcher.start_script("", "--array=0-1", "--gres=gpu:1")
    array = launcher.jobs[0]
    wait_until(lambda: [record.state for record in launcher.connect().jobs(array)] == ["RUNNING", "RUNNING"])
    records = launcher.connect().jobs(array)
    last_task = next(record for record in records if record.job_id == array)
    labels = launcher.make_labels(array, SLURM_ARRAY_JOB_ID=array, SLURM_ARRAY_TASK_ID=last_task.array_task_id)
    job = find_job(started.job_control, labels)
    assert job.id == f"{array}_{last_task.array_task_id}"
    started.job_control.cancel_job(job, make_stop_request(labels))
    wait_until_gone(started.job_control, job)
    states = {record.array_task_id: record.state for record in launcher.connect().jobs(array)}
    assert states.pop(last_task.array_task_id) == "CANCELLED"
    assert set(states.values()) == {"RUNNING"}


def test_report_has_slurms_details(launcher: SlurmLauncher) -> None:
    """The report has Slurm's state and the job's comment names the decision."""
    started = launcher.start_script("trap 'exit 7' TERM", "--gres=gpu:2")
    job = started.find()
    assert dict(job.facts).items() >= {"user": USER, "partition": "gpu", "cluster": launcher.cluster.name}.items()
    started.job_control.cancel_job(job, make_stop_request(started.labels, "decision-9"))
    end = wait_until_gone(started.job_control, job)
    assert end.state == end.details["scheduler_state"] == launcher.cluster.get_job_state(job.id)
    comment = launcher.cluster.run_command(
        "squeue", "--noheader", "--states=all", f"--jobs={job.id}", "--Format=Comment:100"
    )
    assert comment == "stopped by EvalStop: 3 declines in a row; decision decision-9"


@pytest.mark.nightly
def test_completing_job_is_not_gone(launcher: SlurmLauncher) -> None:
    """While a job is COMPLETING its GPUs are not free, and a waiting job starts only when it is gone."""
    started = launcher.start_script("trap 'sleep 1.5; exit' TERM", "--gres=gpu:2")
    waiting = launcher.cluster.submit_job("sleep 0.1", "--gres=gpu:2", "--output=/dev/null")
    launcher.jobs.append(waiting)
    job = started.find()
    started.cancel(job)
    assert started.job_control.check_job(job) == Present("COMPLETING", runs=False)
    assert launcher.cluster.get_job_state(waiting) == "PENDING"
    wait_until_gone(started.job_control, job)
    wait_until(lambda: launcher.cluster.get_job_state(waiting) in ("RUNNING", "COMPLETED"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"users": frozenset({"other-user"})}, "allow-list"),
        ({"partitions": frozenset({"other"})}, "allow-list"),
    ],
)
def test_job_outside_the_allow_list_is_refused(
    launcher: SlurmLauncher, change: dict[str, frozenset[str]], message: str
) -> None:
    """A job's user and partition are read from Slurm, not from the run's labels."""
    started = launcher.start()
    for name, value in change.items():
        setattr(launcher, name, value)
    with pytest.raises(RequestRefused, match=message):
        launcher.job_control().find_job(
            make_stop_request({**started.labels, "slurm_user": "other-user", "slurm_partition": "other"})
        )


@pytest.mark.parametrize(
    "labels",
    [
        {"slurm_user": "other-user"},
        {"slurm_array_task_id": "3"},
        {"slurm_job_id": "7; reboot"},
        {"slurm_job_id": "-A"},
        {"slurm_job_id": "999999"},
        {"checkpoint_signal": "KILL"},
    ],
)
def test_labels_that_contradict_slurm_are_refused(launcher: SlurmLauncher, labels: dict[str, str]) -> None:
    """A label that contradicts Slurm is refused, and a job id that Slurm does not know: it may never have existed."""
    started = launcher.start()
    with pytest.raises(RequestRefused):
        started.job_control.find_job(make_stop_request({**started.labels, **labels}))


def test_job_that_slurm_forgets_is_not_proven_gone(launcher: SlurmLauncher) -> None:
    """A job that was found, and that neither the controller nor the accounting knows any more, is not confirmed."""
    started = launcher.start()
    job = started.find()
    state = started.job_control.check_job(replace(job, facts={**job.facts, "job_id": "999999"}))
    assert isinstance(state, Unproven)


@pytest.mark.nightly
def test_job_of_another_cluster_is_foreign(launcher: SlurmLauncher) -> None:
    """Job ids are unique only within a cluster."""
    started = launcher.start()
    for labels in ({**started.labels, "slurm_cluster": "alpha"}, {**started.labels, "slurm_cluster": ""}, {}):
        assert started.job_control.find_job(make_stop_request(labels)) is None


def test_requeue_during_a_stop_does_not_end_the_job(launcher: SlurmLauncher) -> None:
    """A job requeued since its stop found it is there again and is cancelled; a stop of its earlier run is refused."""
    started = launcher.start_script("", "--gres=gpu:1", "--requeue")
    job = started.find()
    launcher.cluster.run_command("scontrol", "requeue", job.id)
    wait_until(lambda: started.job_control.check_job(job) == Present("PENDING", again=True, runs=False))
    with pytest.raises(RequestRefused, match="was requeued since its run was judged"):
        started.job_control.find_job(make_stop_request(started.labels))  # its labels say restart 0
    started.cancel(job)
    assert wait_until_gone(started.job_control, job).state == "CANCELLED"


@pytest.mark.nightly
def test_resume_of_a_cancelled_job_is_refused(launcher: SlurmLauncher) -> None:
    """Slurm cannot resume a cancelled job, and the refusal says so."""
    started = launcher.start()
    job = started.find()
    started.cancel(job)
    wait_until_gone(started.job_control, job)
    with pytest.raises(RequestRefused, match="cannot be resumed"):
        started.job_control.resume_job(job)


@pytest.mark.nightly
def test_heterogeneous_job_is_cancelled_as_a_whole(launcher: SlurmLauncher) -> None:
    """The leader's id cancels every component; whichever the label names, all of their GPUs are freed."""
    components = ["-n1", "--gres=gpu:1", ":", "-n1", "--gres=gpu:1"]
    job_id = launcher.cluster.run_command(
        "sbatch", "--parsable", "--output=/dev/null", *components, "--wrap", "sleep 60"
    )
    launcher.jobs.append(job_id)
    job = find_job(launcher.job_control(), launcher.make_labels(job_id))
    component = str(int(job_id) + 1)
    by_component = find_job(launcher.job_control(), launcher.make_labels(component))
    assert by_component.id == job.id == job_id
    launcher.job_control().cancel_job(job, make_stop_request({}))
    for found in (job, by_component):
        end = wait_until_gone(launcher.job_control(), found)
        assert end.state == "CANCELLED"


@pytest.mark.nightly
def test_signal_target_is_the_batch_script_or_the_steps(launcher: SlurmLauncher) -> None:
    """@batch signals only the script and @steps only the steps."""
    file = launcher.folder / "signals"
    step = f"import signal, time; signal.signal(signal.SIGUSR1, lambda *_: open({str(file)!r}, 'a').write('step '));"
    step += f"open({str(file)!r}, 'a').write('up '); [time.sleep(0.1) for _ in range(600)]"
    script = f'trap \'echo -n "batch " >> {file}\' USR1\nsrun {sys.executable} -c "{step}" &\nwait; wait; wait\n'
    job = launcher.cluster.submit_job(script, "--output=/dev/null", "--gres=gpu:1")
    launcher.jobs.append(job)
    wait_until(lambda: file.exists() and "up" in file.read_text())
    programs = launcher.connect()
    programs.signal(job, USER, "USR1", "batch")
    wait_until(lambda: "batch" in file.read_text())
    programs.signal(job, USER, "USR1", "steps")
    wait_until(lambda: "step" in file.read_text())
    assert file.read_text().split() == ["up", "batch", "step"]
    assert launcher.cluster.get_job_state(job) == "RUNNING"


@pytest.mark.nightly
def test_stopped_controller_is_unavailable(launcher: SlurmLauncher) -> None:
    """While slurmctld is down a job is neither present nor gone, nor is its cancel refused; afterwards it is found as
    before."""
    started = launcher.start_script(
        ""
    )  # without a GPU: Slurm 22.05 never frees one that was held over a restart of slurmctld
    job = started.find()
    launcher.cluster.stop_controller()
    try:
        with pytest.raises(SchedulerUnavailable):
            started.job_control.check_job(job)
        with pytest.raises(SchedulerUnavailable):
            started.job_control.cancel_job(job, make_stop_request(started.labels))
    finally:
        launcher.cluster.start_controller()
    assert isinstance(started.job_control.check_job(job), Present)


@pytest.fixture
def other_user(cluster: SlurmCluster, tmp_path: Path) -> dict[str, str]:
    """An environment in which Slurm's commands run as another user."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    nobody = pwd.getpwnam("nobody")
    switch_user = f"exec setpriv --reuid={nobody.pw_uid} --regid={nobody.pw_gid} --clear-groups"
    for name in ("squeue", "scancel", "scontrol"):
        file = tmp_path / name
        file.write_text(f'#!/bin/sh\n{switch_user} {shutil.which(name)} "$@"\n')
        file.chmod(0o755)
    return {**cluster.environment, "PATH": f"{tmp_path}{os.pathsep}{cluster.environment['PATH']}"}


@pytest.mark.nightly
def test_denial_by_slurm_is_refused(launcher: SlurmLauncher, other_user: dict[str, str]) -> None:
    """Where Slurm denies access to a job, its message is in the refusal, and the job runs on."""
    started = launcher.start()
    job_control = SlurmJobControl(Programs(other_user), users=None, default_signal=FULL_SIGNAL)
    job = find_job(job_control, started.labels)
    with pytest.raises(RequestRefused, match="denied"):
        job_control.request_checkpoint(job, make_stop_request(started.labels))
    with pytest.raises(RequestRefused, match="denied"):
        job_control.cancel_job(job, make_stop_request(started.labels))
    with pytest.raises(RequestRefused, match="denied"):
        job_control.kill_job(job)
    assert isinstance(job_control.check_job(job), Present)
    assert launcher.count_saves() == 0


@pytest.mark.nightly
def test_hidden_job_is_not_reported_as_gone(launcher: SlurmLauncher, other_user: dict[str, str]) -> None:
    """With PrivateData=jobs another user's job looks unknown: the stop is refused, not confirmed."""
    started = launcher.start_script("")  # without a GPU, as above
    file = launcher.cluster.folder / "etc/daemons.conf"
    before = file.read_text()
    file.write_text(before + "PrivateData=jobs\n")
    try:
        launcher.cluster.run_command("scontrol", "reconfigure")
        wait_until(lambda: Programs(other_user).jobs(launcher.jobs[0]) == [])
        with pytest.raises(RequestRefused, match="cannot be confirmed"):
            SlurmJobControl(Programs(other_user), users=None).find_job(make_stop_request(started.labels))
    finally:
        file.write_text(before)
        launcher.cluster.run_command("scontrol", "reconfigure")


STEP = """
trap 'echo $1 saved >> $2' USR1
trap 'echo $1 ended >> $2; exit 0' TERM
echo $1 $SLURM_STEP_ID >> $2
while :; do sleep 0.1; done
"""


def test_step_of_a_shared_job_ends_alone(launcher: SlurmLauncher) -> None:
    """A stop that may end only a step asks it to save, ends it with SIGTERM, and leaves the job and its other steps."""
    events, script = launcher.folder / "events", launcher.folder / "step.sh"
    script.write_text(STEP)
    steps = [f"srun -n1 --overlap bash {script} {name} {events} &" for name in "ab"]
    job = launcher.cluster.submit_job("\n".join([*steps, "wait"]), "--output=/dev/null", "-n2")

    def read_events(name: str) -> list[str]:
        lines = events.read_text().splitlines() if events.exists() else []
        return [line.partition(" ")[2] for line in lines if line.startswith(name)]

    wait_until(lambda: read_events("a") and read_events("b"))
    (step,) = read_events("a")
    event = make_stop_event(launcher.make_labels(job, SLURM_STEP_ID=step))
    event["data"]["job"] = {"ends": "step", "other_runs": ["b"]}
    request, control = parse_stop_request("msg_1", event), launcher.job_control()
    found = control.find_job(request)
    assert isinstance(found, Job)
    assert found.id == f"{job}.{step}"
    assert control.request_checkpoint(found, request)
    wait_until(lambda: "saved" in read_events("a"))
    control.cancel_job(found, request)
    end = wait_until_gone(control, found)
    assert end.state == "STEP_ENDED"
    assert read_events("a") == [step, "saved", "ended"]
    assert len(read_events("b")) == 1, "the other step got no signal"
    assert launcher.cluster.get_job_state(job) == "RUNNING"


def test_parked_job_is_held_until_it_is_resumed(launcher: SlurmLauncher) -> None:
    """A parked job is held in the queue without GPUs; a resumed one runs again."""
    started = launcher.start()
    job = started.find()
    for _ in range(2):  # parking a parked job changes nothing
        started.job_control.park_job(job, make_stop_request(started.labels))
        assert wait_until_parked(started.job_control, job).details["parked_as"] == "held"
    assert isinstance(started.job_control.check_job(job), Present), "a parked job is not gone"
    started.job_control.resume_job(job)
    launcher.cluster.start_requeued_job(job.id)
    wait_until(lambda: launcher.cluster.get_job_state(job.id) == "RUNNING")


@pytest.mark.nightly
def test_held_job_runs_while_nobody_waits(launcher: SlurmLauncher) -> None:
    """A held job stays held while others wait, runs when nobody does, and is held again, as often as it may."""
    started = launcher.start_script("", "--gres=gpu:2")
    job, request = started.find(), make_stop_request(started.labels)
    started.job_control.park_job(job, request)
    wait_until_parked(started.job_control, job)
    journal = Journal(None)
    journal.record_stop(request, Stop(0.0, Phase.DONE, job=job, parks=True, report=Report("parked", "")))
    context = ReceiverContext(started.job_control, journal, DroppedReports(), StopTimeouts())
    returns = IdleReturns(Receiver(context, list), most=1)

    def look_until(condition: Callable[[], bool]) -> None:
        def look() -> bool:
            returns.look()
            return condition()

        wait_until(look)

    def submit_waiting() -> str:
        launcher.jobs.append(launcher.cluster.submit_job("sleep 90", "--output=/dev/null", "--gres=gpu:2"))
        return launcher.jobs[-1]

    first, second = submit_waiting(), submit_waiting()
    wait_until(lambda: launcher.job_control().others_wait(job, [job]))
    returns.look()
    wait_until_parked(started.job_control, job)
    launcher.cluster.run_command("scancel", first, second)
    look_until(lambda: isinstance(started.job_control.check_parked(job), Present))
    launcher.cluster.start_requeued_job(job.id)
    look_until(lambda: launcher.cluster.get_job_state(job.id) == "RUNNING")
    with pytest.raises(RequestRefused, match="requeued since"):
        started.job_control.find_job(request)
    again = started.job_control.find_job(replace(request, was_parked=True))
    assert isinstance(again, Job), "a stop of the run finds its job, although it was started again"
    third = submit_waiting()
    look_until(lambda: launcher.cluster.get_job_state(third) == "RUNNING")
    wait_until_parked(started.job_control, job)
    launcher.cluster.run_command("scancel", third)
    wait_until(lambda: launcher.cluster.get_job_state(third) == "CANCELLED")
    assert [entry.stop.idle_returns for entry in journal.list_parked()] == [1]
    returns.look()
    wait_until_parked(started.job_control, job)


@pytest.mark.nightly
def test_job_without_requeue_is_not_parked(launcher: SlurmLauncher) -> None:
    """A job submitted with --no-requeue is refused before anything is done to it."""
    started = launcher.start_script("", "--gres=gpu:1", "--no-requeue")
    job = started.find()
    with pytest.raises(RequestRefused, match="--requeue"):
        started.job_control.park_job(job, make_stop_request(started.labels))
    assert launcher.cluster.get_job_state(job.id) == "RUNNING"


@pytest.mark.nightly
def test_parked_job_can_be_cancelled(launcher: SlurmLauncher) -> None:
    """A held job is cancelled by a stop, and not asked for a checkpoint, which it could not save."""
    started = launcher.start()
    job = started.find()
    started.job_control.park_job(job, make_stop_request(started.labels))
    wait_until_parked(started.job_control, job)
    found_again = started.find()
    assert isinstance(started.job_control.check_job(found_again), Present)
    assert not started.job_control.request_checkpoint(found_again, make_stop_request(started.labels))
    started.cancel(found_again)
    assert wait_until_gone(started.job_control, found_again).state == "CANCELLED"
