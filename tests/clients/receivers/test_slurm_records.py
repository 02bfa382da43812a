"""Reading Slurm's answers in the formats of its tools and versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from evalstop_client.errors import ConfigurationError, RequestRefused, SchedulerUnavailable
from evalstop_client.receivers.slurm.commands import (
    Programs,
    Record,
    parse_squeue,
    select_job,
    summarize_end,
)
from evalstop_client.receivers.slurm.control import SlurmJobControl
from evalstop_client.receivers.stop.job_control import (
    CheckpointSignal,
    Gone,
    Job,
    Present,
    choose_signal,
    parse_checkpoint_signal,
)

from tests.clients.receivers.conformance import find_job, make_stop_request


@pytest.mark.parametrize(
    ("status", "exit_code", "signal"), [("15", 0, 15), ("0:15", 0, 15), ("1792", 7, None), ("7:0", 7, None)]
)
def test_squeue_line_is_parsed(status: str, exit_code: int, signal: int | None) -> None:
    """An array task that was killed or has failed, as squeue prints it; 26.05 splits the status, 22.05 does not."""
    line = f"11|6|1|N/A|CANCELLED|root|gpu|0|{status}|None|"
    record = parse_squeue(line)
    assert (record.name, record.state) == ("6_1", "CANCELLED")
    report = summarize_end([record])
    assert (report["exit_code"], report["signal"]) == (exit_code, signal)


def test_array_task_name_includes_its_index() -> None:
    """A task's own job id may be that of the whole array, so its name is array_index."""
    task = Record("6", "RUNNING", "ann", "gpu", array_job_id="6", array_task_id="0")
    assert task.name == "6_0"
    assert select_job([task, Record("7", "RUNNING", "ann", "gpu", array_job_id="6", array_task_id="1")], "6") == [task]


FAKE_SLURM = """#!/bin/sh
case "$0:$*" in
*scontrol:*config*) echo "ClusterName             = alpha";;
*squeue:*) echo "slurm_load_jobs error: ${TROUBLE:-Invalid job id specified}" >&2; exit 1;;
*sacct:*) [ -n "$PAST" ] || { echo "Slurm accounting storage is disabled" >&2; exit 1; }; echo "$PAST";;
esac
"""


@pytest.fixture
def slurm_commands(tmp_path: Path) -> Path:
    """The Slurm commands of a controller that has forgotten the job."""
    for name in ("scontrol", "squeue", "sacct"):
        (tmp_path / name).write_text(FAKE_SLURM)
        (tmp_path / name).chmod(0o755)
    return tmp_path


LABELS = {"slurm_job_id": "7", "slurm_cluster": "alpha"}


def make_job_control(slurm_commands: Path, **variables: str) -> SlurmJobControl:
    """Job control by the fake commands, with an allow-list of one user."""
    return SlurmJobControl(Programs({"PATH": f"{slurm_commands}:/usr/bin:/bin", **variables}), users=frozenset({"ann"}))


def test_sacct_knows_jobs_that_slurmctld_forgot(slurm_commands: Path) -> None:
    """With sacct the end of a forgotten job is known, and its user is checked against the allow-list."""
    job_control = make_job_control(slurm_commands, PAST="7|7|CANCELLED by 1000|ann|gpu|0:15")
    end = job_control.check_job(job := find_job(job_control, LABELS))
    assert isinstance(end, Gone)
    assert job.facts["user"] == "ann"
    assert (end.state, end.details["signal"]) == ("CANCELLED", 15)
    foreign = make_job_control(slurm_commands, PAST="7|7|COMPLETED|eve|gpu|0:0")
    with pytest.raises(RequestRefused, match="allow-list"):
        foreign.find_job(make_stop_request(LABELS))


def test_sacct_knows_the_tasks_of_an_array(slurm_commands: Path) -> None:
    """The task whose id is that of its array is told from the others, which may still run."""
    lines = "8|7_0|RUNNING|ann|gpu|0:0", "7|7_1|FAILED|ann|gpu|1:0", "9|7_[2-3]|PENDING|ann|gpu|0:0"
    job_control = make_job_control(slurm_commands, PAST="\n".join(lines))
    job = find_job(job_control, {**LABELS, "slurm_array_task_id": "1"})
    end = job_control.check_job(job)
    assert isinstance(end, Gone)
    assert (job.id, end.state) == ("7_1", "FAILED")


def test_sacct_knows_the_components_of_a_job(slurm_commands: Path) -> None:
    """A heterogeneous job is gone once all of its components have ended."""
    lines = "7|7+0|FAILED|ann|gpu|1:0", "8|7+1|RUNNING|ann|gpu|0:0"
    job_control = make_job_control(slurm_commands, PAST="\n".join(lines))
    assert job_control.check_job(find_job(job_control, LABELS)) == Present("RUNNING")


def test_unknown_job_is_no_proof(slurm_commands: Path) -> None:
    """A job that Slurm shows nowhere may be running, hidden or of a lost controller: the stop is refused."""
    job_control = make_job_control(slurm_commands)
    with pytest.raises(RequestRefused, match="cannot be confirmed"):
        job_control.find_job(make_stop_request(LABELS))
    assert job_control.find_job(make_stop_request({**LABELS, "slurm_cluster": "beta"})) is None


@pytest.mark.parametrize("trouble", ["Unable to contact slurm controller (connect failure)", "Socket timed out", ""])
def test_failed_squeue_is_unavailable(slurm_commands: Path, trouble: str) -> None:
    """Only the controller's own message that the job is unknown means that it is gone."""
    cluster = Programs({"PATH": f"{slurm_commands}:/usr/bin:/bin", "TROUBLE": trouble})
    if trouble:
        with pytest.raises(SchedulerUnavailable):
            cluster.jobs("7")
    else:
        assert cluster.jobs("7") == []


def test_checkpoint_label_overrides_the_option() -> None:
    """A label chooses another signal, or none; a signal that would end the job is refused."""
    default = CheckpointSignal("USR1", "batch")
    assert choose_signal({}, default) == default
    assert choose_signal({"checkpoint_signal": "SIGUSR2@steps"}, default) == CheckpointSignal("USR2", "steps")
    assert choose_signal({"checkpoint_signal": "none"}, default) is None
    for bad in ("KILL", "TERM", "USR1@everywhere", "9", "USR1 USR2"):
        with pytest.raises(RequestRefused, match="checkpoint"):
            choose_signal({"checkpoint_signal": bad}, default)
        with pytest.raises(ConfigurationError):
            parse_checkpoint_signal(bad)


class OccupiedPrograms(Programs):
    """A job in the given states, one of each component, which Slurm does not release because it is not pending."""

    def __init__(self, states: list[str]) -> None:
        super().__init__({})
        self.states = states

    def jobs(self, job_id: str) -> list[Record]:
        return [Record(str(7 + place), state, "ann", "gpu", het_job_id="7") for place, state in enumerate(self.states)]

    def control(self, *arguments: str) -> None:
        raise SchedulerUnavailable("Job is no longer pending execution")


@pytest.mark.parametrize("states", [["RUNNING"], ["SUSPENDED"], ["RUNNING", "CANCELLED"]])
def test_job_that_has_survived_its_stop_is_not_released(states: list[str]) -> None:
    """A job that occupies nodes runs on when its stop is undone, also if it is suspended or a component has ended."""
    job_control = SlurmJobControl(OccupiedPrograms(states), users=None)
    job_control.resume_job(Job("7", {"job_id": "7", "partition": "gpu"}))


def test_job_that_is_ending_is_resumed_later() -> None:
    """A job that is being requeued is not held yet: it could not be released, and would then be held for good."""
    job_control = SlurmJobControl(OccupiedPrograms(["COMPLETING"]), users=None)
    with pytest.raises(SchedulerUnavailable, match="not ended yet"):
        job_control.resume_job(Job("7", {"job_id": "7", "partition": "gpu"}))
