"""SlurmJobControl on a real Slurm, by its commands and through slurmrestd."""

from __future__ import annotations

import os
import pwd
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from evalstop_client.errors import RequestRefused, SchedulerUnavailable
from evalstop_client.receivers import ForeignJob, Gone, Job, Present
from evalstop_client.receivers.slurm.commands import Programs
from evalstop_client.receivers.slurm.job_control import SlurmJobControl
from evalstop_client.receivers.slurm.protocol import Cluster
from evalstop_client.receivers.slurm.rest import Rest

from tests.clients.programs import wait_until
from tests.clients.receivers.conformance import Conformance, find_job, make_stop_request, wait_until_gone
from tests.clients.receivers.slurm.launcher import BOTH, ME, SlurmLauncher, connect_by_commands, connect_by_rest, opened
from tests.fixtures.slurm import SlurmCluster

pytestmark = pytest.mark.real


class TestByCommands(Conformance):
    """squeue, scancel and scontrol."""

    connect = staticmethod(connect_by_commands)


class TestByRest(Conformance):
    """slurmrestd."""

    connect = staticmethod(connect_by_rest)


INTERFACES = pytest.mark.parametrize("connect", [connect_by_commands, connect_by_rest], ids=["commands", "rest"])


@INTERFACES
def test_one_task_of_an_array_is_stopped_and_no_other(
    launcher: SlurmLauncher, connect: Callable[[SlurmCluster], Cluster]
) -> None:
    """The last task of an array has the array's own id: cancelled by that id, all of it would go."""
    launcher.connect = lambda: connect(launcher.cluster)
    started = launcher.run("", "--array=0-1", "--gres=gpu:1")
    array = launcher.jobs[0]
    wait_until(lambda: [one.state for one in launcher.connect().jobs(array)] == ["RUNNING", "RUNNING"])
    records = launcher.connect().jobs(array)
    namesake = next(one for one in records if one.job_id == array)
    labels = launcher.labels(array, SLURM_ARRAY_JOB_ID=array, SLURM_ARRAY_TASK_ID=namesake.array_task_id)
    job = find_job(started.job_control, labels)
    assert job.id == f"{array}_{namesake.array_task_id}"
    started.job_control.cancel_job(job, make_stop_request(labels))
    assert wait_until_gone(started.job_control, job).details["gpus_freed"] == 1
    states = {one.array_task_id: one.state for one in launcher.connect().jobs(array)}
    assert states.pop(namesake.array_task_id) == "CANCELLED"
    assert set(states.values()) == {"RUNNING"}


def test_report_tells_what_slurm_tells(launcher: SlurmLauncher) -> None:
    """State, exit code, signal, the time of the end and the GPUs that are free now; the job has a comment."""
    started = launcher.run("trap 'exit 7' TERM", "--gres=gpu:2")
    job = started.find()
    assert dict(job.facts).items() >= {"user": ME, "partition": "gpu", "cluster": launcher.cluster.name}.items()
    started.job_control.cancel_job(job, make_stop_request(started.labels, "decision-9"))
    end = wait_until_gone(started.job_control, job)
    assert end.details["gpus_freed"] == 2
    assert end.details["ended_at"].endswith("Z")
    assert end.state == end.details["scheduler_state"] == launcher.cluster.get_job_state(job.id)
    comment = launcher.cluster.run_command(
        "squeue", "--noheader", "--states=all", f"--jobs={job.id}", "--Format=Comment:100"
    )
    assert comment == "stopped by EvalStop: 3 declines in a row; decision decision-9"


def test_gone_means_that_a_waiting_job_can_start(launcher: SlurmLauncher) -> None:
    """While a job is COMPLETING its GPUs are not free, and it is not called gone."""
    started = launcher.run("trap 'sleep 1.5; exit' TERM", "--gres=gpu:2")
    waiting = launcher.cluster.submit_job("sleep 0.1", "--gres=gpu:2", "--output=/dev/null")
    launcher.jobs.append(waiting)
    job = started.find()
    started.job_control.cancel_job(job, make_stop_request(started.labels))
    seen = wait_until(lambda: started.job_control.check_job(job))
    assert seen == Present("COMPLETING")
    assert launcher.cluster.get_job_state(waiting) == "PENDING"
    wait_until_gone(started.job_control, job)
    wait_until(lambda: launcher.cluster.get_job_state(waiting) in ("RUNNING", "COMPLETED"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"users": frozenset({"somebody"})}, "allow-list"),
        ({"partitions": frozenset({"other"})}, "allow-list"),
    ],
)
def test_job_outside_the_allow_list_is_refused(
    launcher: SlurmLauncher, change: dict[str, frozenset[str]], words: str
) -> None:
    """Whose job it is and where it runs is asked of Slurm, not of the labels."""
    started = launcher.start()
    for name, value in change.items():
        setattr(launcher, name, value)
    with pytest.raises(RequestRefused, match=words):
        launcher.job_control().find_job(
            make_stop_request({**started.labels, "slurm_user": "somebody", "slurm_partition": "other"})
        )


@pytest.mark.parametrize(
    "labels",
    [
        {"slurm_user": "somebody"},
        {"slurm_array_task_id": "3"},
        {"slurm_job_id": "7; reboot"},
        {"slurm_job_id": "-A"},
        {"slurm_job_id": "999999"},
        {"checkpoint_signal": "KILL"},
    ],
)
def test_labels_that_contradict_slurm_are_refused_or_find_nothing(
    launcher: SlurmLauncher, labels: dict[str, str]
) -> None:
    """A label that is not so is a mistake or worse; a job that Slurm does not know, and would show, is gone."""
    started = launcher.start()
    try:
        job = started.job_control.find_job(make_stop_request({**started.labels, **labels}))
    except RequestRefused:
        return
    assert labels.get("slurm_job_id") == "999999"
    assert isinstance(job, Job)
    assert isinstance(started.job_control.check_job(job), Gone)


def test_job_of_another_cluster_is_not_ours(launcher: SlurmLauncher) -> None:
    """Job ids are only unique within a cluster."""
    started = launcher.start()
    for labels in ({**started.labels, "slurm_cluster": "alpha"}, {**started.labels, "slurm_cluster": ""}, {}):
        assert isinstance(started.job_control.find_job(make_stop_request(labels)), ForeignJob)


def test_life_after_a_requeue_is_not_stopped_for_the_one_before(launcher: SlurmLauncher) -> None:
    """A stop that was asked for the job's first life, and comes late, leaves its second one alone."""
    started = launcher.run("", "--gres=gpu:1", "--requeue")
    job = started.find()
    launcher.cluster.run_command("scontrol", "requeue", job.id)
    wait_until(lambda: launcher.cluster.get_job_state(job.id) == "PENDING")
    seen = started.job_control.check_job(job)
    assert isinstance(seen, Gone)
    assert seen.state == "REQUEUED"
    again = started.job_control.find_job(make_stop_request(started.labels))  # its labels say restart 0
    assert isinstance(again, Job)
    assert isinstance(started.job_control.check_job(again), Gone)


def test_cancelled_job_cannot_be_undone(launcher: SlurmLauncher) -> None:
    """It says so, instead of doing nothing."""
    started = launcher.start()
    job = started.find()
    started.job_control.cancel_job(job, make_stop_request(started.labels))
    wait_until_gone(started.job_control, job)
    with pytest.raises(RequestRefused, match="cannot be resumed"):
        started.job_control.resume_job(job)


def test_heterogeneous_job_goes_as_a_whole(launcher: SlurmLauncher) -> None:
    """Slurm refuses to cancel one component; its leader's id ends them all, and all of them must be gone."""
    components = ["-n1", "--gres=gpu:1", ":", "-n1", "--gres=gpu:1"]
    job_id = launcher.cluster.run_command(
        "sbatch", "--parsable", "--output=/dev/null", *components, "--wrap", "sleep 60"
    )
    launcher.jobs.append(job_id)
    job = find_job(launcher.job_control(), launcher.labels(job_id))
    component = str(int(job_id) + 1)
    assert find_job(launcher.job_control(), launcher.labels(component)).id == job.id == job_id
    launcher.job_control().cancel_job(job, make_stop_request({}))
    end = wait_until_gone(launcher.job_control(), job)
    assert (end.state, end.details["gpus_freed"]) == ("CANCELLED", 2)


def test_signal_reaches_the_batch_script_or_the_steps(launcher: SlurmLauncher) -> None:
    """@batch spares the steps, @steps the script; slurmrestd, which can only do both, says that it cannot."""
    file = launcher.folder / "heard"
    step = f"import signal, time; signal.signal(signal.SIGUSR1, lambda *_: open({str(file)!r}, 'a').write('step '));"
    step += f"open({str(file)!r}, 'a').write('up '); [time.sleep(0.1) for _ in range(600)]"
    script = f'trap \'echo -n "batch " >> {file}\' USR1\nsrun {sys.executable} -c "{step}" &\nwait; wait; wait\n'
    job = launcher.cluster.submit_job(script, "--output=/dev/null", "--gres=gpu:1")
    launcher.jobs.append(job)
    wait_until(lambda: file.exists() and "up" in file.read_text())
    programs = connect_by_commands(launcher.cluster)
    assert programs.signal(job, ME, "USR1", "batch")
    wait_until(lambda: "batch" in file.read_text())
    assert programs.signal(job, ME, "USR1", "steps")
    wait_until(lambda: "step" in file.read_text())
    assert file.read_text().split() == ["up", "batch", "step"]
    assert not connect_by_rest(launcher.cluster).signal(job, ME, "USR1", "batch")
    assert launcher.cluster.get_job_state(job) == "RUNNING"


def test_slurmrestd_that_cannot_answer_is_away(launcher: SlurmLauncher) -> None:
    """A bad token, and a socket where nobody listens, mean to try again: neither says anything about a job."""
    for connect in (
        Rest(launcher.cluster.rest_url, launcher.cluster.name, ME, lambda: "bad"),
        Rest("http://127.0.0.1:1", launcher.cluster.name, ME, lambda: "bad"),
    ):
        opened.append(connect)
        with pytest.raises(SchedulerUnavailable):
            connect.jobs("1")


def test_controller_that_is_down_is_away(launcher: SlurmLauncher) -> None:
    """While slurmctld is down nothing is known, and nothing is taken for gone; afterwards the job is as it was."""
    started = launcher.run(
        ""
    )  # without a GPU: Slurm 22.05 counts one that a job held over a restart as in use for good
    job = started.find()
    by_http = SlurmJobControl(connect_by_rest(launcher.cluster), users=None)
    assert isinstance(by_http.check_job(job), Present)
    launcher.cluster.stop_controller()
    try:
        for job_control in (started.job_control, by_http):
            with pytest.raises(SchedulerUnavailable):
                job_control.check_job(job)
    finally:
        launcher.cluster.start_controller()
    assert isinstance(started.job_control.check_job(job), Present)


@pytest.fixture
def stranger(cluster: SlurmCluster, tmp_path: Path) -> dict[str, str]:
    """An environment in which Slurm's commands are somebody else's."""
    if os.geteuid() != 0:
        pytest.skip("only root can be somebody else")
    nobody = pwd.getpwnam("nobody")
    become = f"exec setpriv --reuid={nobody.pw_uid} --regid={nobody.pw_gid} --clear-groups"
    for name in ("squeue", "scancel", "scontrol"):
        file = tmp_path / name
        file.write_text(f'#!/bin/sh\n{become} {shutil.which(name)} "$@"\n')
        file.chmod(0o755)
    return {**cluster.environment, "PATH": f"{tmp_path}{os.pathsep}{cluster.environment['PATH']}"}


def test_slurm_decides_whose_jobs_may_be_cancelled(launcher: SlurmLauncher, stranger: dict[str, str]) -> None:
    """Where Slurm forbids it, the stop is refused with Slurm's words, by commands and by REST; the job runs on."""
    started = launcher.start()
    token = launcher.cluster.run_command("scontrol", "token", "username=nobody").removeprefix("SLURM_JWT=")
    opened.append(Rest(launcher.cluster.rest_url, launcher.cluster.name, None, lambda: token))
    doors: list[Cluster] = [Programs(stranger), opened[-1]]
    for connect in doors:
        job_control = SlurmJobControl(connect, users=None, default_signal=BOTH)
        job = job_control.find_job(make_stop_request(started.labels))
        assert isinstance(job, Job)
        with pytest.raises(RequestRefused, match="denied"):
            job_control.request_checkpoint(job, make_stop_request(started.labels))
        with pytest.raises(RequestRefused, match="denied"):
            job_control.cancel_job(job, make_stop_request(started.labels))
        with pytest.raises(RequestRefused, match="denied"):
            job_control.kill_job(job)
        assert isinstance(job_control.check_job(job), Present)
    assert launcher.count_saves() == 0


def test_job_that_may_not_be_seen_is_not_taken_for_gone(launcher: SlurmLauncher, stranger: dict[str, str]) -> None:
    """With PrivateData=jobs another's job looks as if it did not exist: that it is gone is not claimed."""
    started = launcher.run("")  # without a GPU, as above
    file = launcher.cluster.folder / "etc/slurm.conf"
    before = file.read_text()
    file.write_text(before + "PrivateData=jobs\n")
    try:
        launcher.cluster.run_command("scontrol", "reconfigure")
        wait_until(lambda: Programs(stranger).jobs(launcher.jobs[0]) == [])
        with pytest.raises(RequestRefused, match="cannot be confirmed"):
            SlurmJobControl(Programs(stranger), users=None).find_job(make_stop_request(started.labels))
    finally:
        file.write_text(before)
        launcher.cluster.run_command("scontrol", "reconfigure")
