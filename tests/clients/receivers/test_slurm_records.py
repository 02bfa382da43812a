"""What Slurm's answers mean, as different versions and tools write them."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from evalstop_client.errors import ConfigurationError, RequestRefused, SchedulerUnavailable
from evalstop_client.receivers import ForeignJob, Gone, Job
from evalstop_client.receivers.slurm.commands import Programs
from evalstop_client.receivers.slurm.job_control import SlurmJobControl
from evalstop_client.receivers.slurm.job_record import Record, details, from_rest, from_squeue, of_job, parse_gpus
from evalstop_client.receivers.slurm.rest import parse_token, parse_user, validate_rest_url
from evalstop_client.receivers.stop.checkpoint_signal import CheckpointSignal, checkpoint_signal, choose_signal

from tests.clients.receivers.conformance import find_job, make_stop_request


@pytest.mark.parametrize(
    ("allocated", "per_job", "per_node", "nodes", "gpus"),
    [
        ("cpu=1,node=1,billing=1,gres/gpu=4", "", "gres:gpu:4", 1, 4),
        ("cpu=1,gres/gpu=4,gres/gpu:a100=4", "", "", 1, 4),
        ("cpu=1,gres/gpu:a100=3,gres/gpu:h100=1", "", "", 1, 4),
        ("cpu=1", "gres:gpu:8", "", 4, 8),
        ("cpu=1", "", "gres:gpu:2", 4, 8),
        ("cpu=1", "", "gres:gpu:fake:2", 1, 2),
        ("cpu=1", "", "gres/gpu:a100:2", 2, 4),
        ("cpu=1", "", "gres:gpu", 1, 1),
        ("cpu=1", "", "gres:gpu:2(IDX:0-1)", 1, 2),
        ("cpu=1", "", "gres:shard:2", 1, 0),
        ("", "", "", 0, 0),
    ],
)
def test_gpus_are_counted(allocated: str, per_job: str, per_node: str, nodes: int, gpus: int) -> None:
    """From what was allocated, if Slurm keeps it; else from what was asked for."""
    assert parse_gpus(allocated, per_job, per_node, nodes) == gpus


def test_line_of_squeue_is_read() -> None:
    """A task of an array that was killed, as squeue 22.05 prints it."""
    line = "11|6|1|N/A|CANCELLED|root|gpu|0|15|2026-11-21T16:19:12|1|cpu=1,node=1|N/A|gres:gpu:2|None|"
    record = from_squeue(line)
    assert (record.name, record.state, record.gpus, record.exit_code) == ("6_1", "CANCELLED", 2, 15)
    told = details([record])
    assert (told["exit_code"], told["signal"], told["gpus_freed"]) == (0, 15, 2)
    assert told["ended_at"].endswith("Z")


@pytest.mark.parametrize(
    "job",
    [
        {  # version 0.0.38
            "job_id": 7, "job_state": "CANCELLED", "user_name": "ann", "partition": "gpu", "array_job_id": 0,
            "array_task_id": None, "het_job_id": 0, "exit_code": 15, "end_time": 1795277952, "restart_cnt": 1,
            "tres_alloc_str": "cpu=1", "tres_per_node": "gres:gpu:4", "node_count": 1, "state_reason": "None",
        },
        {  # later ones: lists of states, numbers that are wrapped, exit codes that are taken apart
            "job_id": 7, "job_state": ["CANCELLED"], "user_name": "ann", "partition": "gpu",
            "array_job_id": {"set": True, "infinite": False, "number": 0},
            "array_task_id": {"set": False, "infinite": False, "number": 0},
            "het_job_id": {"set": True, "infinite": False, "number": 0},
            "exit_code": {
                "status": ["SIGNALED"],
                "return_code": {"set": True, "infinite": False, "number": 0},
                "signal": {"id": {"set": True, "infinite": False, "number": 15}, "name": "SIGTERM"},
            },
            "end_time": {"set": True, "infinite": False, "number": 1795277952}, "restart_cnt": 1,
            "tres_alloc_str": "cpu=1,gres/gpu=4", "tres_per_node": "", "state_reason": "None",
            "node_count": {"set": True, "infinite": False, "number": 1},
        },
    ],
)  # fmt: skip
def test_answers_of_slurmrestd_mean_the_same_in_every_version(job: dict[str, object]) -> None:
    """Old and new shapes give one record."""
    record = from_rest(job)
    assert (record.job_id, record.name, record.state, record.user) == ("7", "7", "CANCELLED", "ann")
    assert (record.exit_code, record.gpus, record.restarts, record.array_task_id) == (15, 4, 1, "")
    assert record.ended_at is not None


def test_completing_counts_before_any_other_state() -> None:
    """A job that was cancelled and is still being cleaned up holds its GPUs."""
    assert from_rest({"job_id": 7, "job_state": ["CANCELLED", "COMPLETING"]}).state == "COMPLETING"


def test_name_of_a_task_is_never_the_bare_id() -> None:
    """The id of a task may be that of its whole array."""
    task = Record("6", "RUNNING", "ann", "gpu", array_job_id="6", array_task_id="0")
    assert task.name == "6_0"
    assert of_job([task, Record("7", "RUNNING", "ann", "gpu", array_job_id="6", array_task_id="1")], "6") == [task]


FAKE_SLURM = """#!/bin/sh
case "$0:$*" in
*scontrol:*config*) echo "ClusterName             = alpha"; echo "PrivateData             = $PRIVATE";;
*squeue:*) echo "slurm_load_jobs error: ${TROUBLE:-Invalid job id specified}" >&2; exit 1;;
*sacct:*) [ -n "$PAST" ] || { echo "Slurm accounting storage is disabled" >&2; exit 1; }; echo "$PAST";;
esac
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A controller that has forgotten the job."""
    for name in ("scontrol", "squeue", "sacct"):
        (tmp_path / name).write_text(FAKE_SLURM)
        (tmp_path / name).chmod(0o755)
    return tmp_path


LABELS = {"slurm_job_id": "7", "slurm_cluster": "alpha"}


def job_control(programs: Path, **variables: str) -> SlurmJobControl:
    return SlurmJobControl(Programs({"PATH": f"{programs}:/usr/bin:/bin", **variables}), users=frozenset({"ann"}))


def test_accounting_tells_of_a_job_that_the_controller_has_forgotten(programs: Path) -> None:
    """With sacct the end of a job is known however long ago it was, and whose it was is checked."""
    ours = job_control(programs, PRIVATE="jobs", PAST="7|CANCELLED by 1000|ann|gpu|0:15|cpu=1,gres/gpu=2")
    end = ours.check_job(ours_job := ours_found(ours))
    assert isinstance(end, Gone)
    assert ours_job.facts["user"] == "ann"
    assert (end.state, end.details["gpus_freed"], end.details["signal"]) == ("CANCELLED", 2, 15)
    others = job_control(programs, PRIVATE="jobs", PAST="7|COMPLETED|eve|gpu|0:0|cpu=1")
    with pytest.raises(RequestRefused, match="allow-list"):
        others.find_job(make_stop_request(LABELS))


def ours_found(ours: SlurmJobControl) -> Job:
    return find_job(ours, LABELS)


def test_unknown_job_is_gone_only_where_nothing_is_hidden(programs: Path) -> None:
    """Where PrivateData hides jobs, one that is not shown may run: that it is gone is not claimed."""
    with pytest.raises(RequestRefused, match="cannot be confirmed"):
        job_control(programs, PRIVATE="accounts,jobs").find_job(make_stop_request(LABELS))
    open_one = job_control(programs, PRIVATE="none")
    assert isinstance(open_one.check_job(ours_found(open_one)), Gone)
    assert isinstance(open_one.find_job(make_stop_request({**LABELS, "slurm_cluster": "beta"})), ForeignJob)


@pytest.mark.parametrize("trouble", ["Unable to contact slurm controller (connect failure)", "Socket timed out", ""])
def test_squeue_that_fails_says_nothing_about_a_job(programs: Path, trouble: str) -> None:
    """Only the controller's own word that it knows no such job is taken for that."""
    cluster = Programs({"PATH": f"{programs}:/usr/bin:/bin", "TROUBLE": trouble})
    if trouble:
        with pytest.raises(SchedulerUnavailable):
            cluster.jobs("7")
    else:
        assert cluster.jobs("7") == []


def test_checkpoint_signal_comes_from_the_label_then_from_the_option() -> None:
    """A label asks for another signal, or for none; what would end the job cannot be asked for."""
    default = CheckpointSignal("USR1", "batch")
    assert choose_signal({}, default) == default
    assert choose_signal({"checkpoint_signal": "SIGUSR2@steps"}, default) == CheckpointSignal("USR2", "steps")
    assert choose_signal({"checkpoint_signal": "none"}, default) is None
    for bad in ("KILL", "TERM", "USR1@everywhere", "9", "USR1 USR2"):
        with pytest.raises(RequestRefused, match="checkpoint"):
            choose_signal({"checkpoint_signal": bad}, default)
        with pytest.raises(ConfigurationError):
            checkpoint_signal(bad)


def test_token_and_its_owner_are_read() -> None:
    """As a file holds it or as `scontrol token` prints it; the user is in the token itself."""
    token = "eyJhbGciOiJIUzI1NiJ9.eyJleHAiOjE3OTUyODAxMDMsInN1biI6InJvb3QifQ.K85hh"
    assert parse_token(f"SLURM_JWT={token}\n") == parse_token(token) == token
    assert parse_user(token) == "root"
    for bad in ("", "a.b.c", "a", "a.bnVsbA.c"):
        assert parse_user(bad) is None


def test_rest_url_is_checked_at_the_start() -> None:
    """A socket or an address, anything else is told at once."""
    assert validate_rest_url("http://127.0.0.1:6820/") == "http://127.0.0.1:6820"
    assert validate_rest_url("unix:/run/slurmrestd.sock") == "unix:/run/slurmrestd.sock"
    for bad in ("127.0.0.1:6820", "ftp://x", "http://", "unix:"):
        with pytest.raises(ConfigurationError):
            validate_rest_url(bad)
    assert httpx.URL(validate_rest_url("https://slurm.example")).scheme == "https"
