"""Reading Slurm's answers in the formats of its tools and versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest
from evalstop_client.errors import ConfigurationError, RequestRefused, SchedulerUnavailable
from evalstop_client.receivers import ForeignJob, Gone, Job, Present
from evalstop_client.receivers.slurm.commands import Programs
from evalstop_client.receivers.slurm.control import SlurmJobControl
from evalstop_client.receivers.slurm.job_record import (
    Record,
    parse_gpus,
    parse_rest,
    parse_squeue,
    select_job,
    summarize_end,
)
from evalstop_client.receivers.slurm.rest import Rest, parse_token, parse_user, validate_rest_url
from evalstop_client.receivers.stop.job_control import CheckpointSignal, choose_signal, parse_checkpoint_signal
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.clients.receivers.conformance import find_job, make_stop_request
from tests.fixtures.http_server import serve_app


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
    """GPUs are counted by the allocation if Slurm records it, else by the request."""
    assert parse_gpus(allocated, per_job, per_node, nodes) == gpus


@pytest.mark.parametrize(
    ("status", "exit_code", "signal"), [("15", 0, 15), ("0:15", 0, 15), ("1792", 7, None), ("7:0", 7, None)]
)
def test_squeue_line_is_parsed(status: str, exit_code: int, signal: int | None) -> None:
    """An array task that was killed or has failed, as squeue prints it; 26.05 splits the status, 22.05 does not."""
    line = f"11|6|1|N/A|CANCELLED|root|gpu|0|{status}|2026-11-21T16:19:12|1|cpu=1,node=1|N/A|gres:gpu:2|None|"
    record = parse_squeue(line)
    assert (record.name, record.state, record.gpus) == ("6_1", "CANCELLED", 2)
    report = summarize_end([record])
    assert (report["exit_code"], report["signal"], report["gpus_freed"]) == (exit_code, signal, 2)
    assert report["ended_at"].endswith("Z")


@pytest.mark.parametrize(
    "job",
    [
        {  # version 0.0.38
            "job_id": 7, "job_state": "CANCELLED", "user_name": "ann", "partition": "gpu", "array_job_id": 0,
            "array_task_id": None, "het_job_id": 0, "exit_code": 15, "end_time": 1795277952, "restart_cnt": 1,
            "tres_alloc_str": "cpu=1", "tres_per_node": "gres:gpu:4", "node_count": 1, "state_reason": "None",
        },
        {  # later versions: lists of states, wrapped numbers, structured exit codes
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
def test_slurmrestd_versions_give_the_same_record(job: dict[str, object]) -> None:
    """Answers of old and new slurmrestd versions give the same record."""
    record = parse_rest(job)
    assert (record.job_id, record.name, record.state, record.user) == ("7", "7", "CANCELLED", "ann")
    assert (record.exit_code, record.gpus, record.restarts, record.array_task_id) == (15, 4, 1, "")
    assert record.ended_at is not None


def test_completing_takes_precedence_over_other_states() -> None:
    """A cancelled job that is still COMPLETING holds its GPUs, and its state is COMPLETING."""
    assert parse_rest({"job_id": 7, "job_state": ["CANCELLED", "COMPLETING"]}).state == "COMPLETING"


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
    job_control = make_job_control(slurm_commands, PAST="7|7|CANCELLED by 1000|ann|gpu|0:15|cpu=1,gres/gpu=2")
    end = job_control.check_job(job := find_job(job_control, LABELS))
    assert isinstance(end, Gone)
    assert job.facts["user"] == "ann"
    assert (end.state, end.details["gpus_freed"], end.details["signal"]) == ("CANCELLED", 2, 15)
    foreign = make_job_control(slurm_commands, PAST="7|7|COMPLETED|eve|gpu|0:0|cpu=1")
    with pytest.raises(RequestRefused, match="allow-list"):
        foreign.find_job(make_stop_request(LABELS))


def test_sacct_knows_the_tasks_of_an_array(slurm_commands: Path) -> None:
    """The task whose id is that of its array is told from the others, which may still run."""
    lines = "8|7_0|RUNNING|ann|gpu|0:0|cpu=1", "7|7_1|FAILED|ann|gpu|1:0|cpu=1", "9|7_[2-3]|PENDING|ann|gpu|0:0|"
    job_control = make_job_control(slurm_commands, PAST="\n".join(lines))
    job = find_job(job_control, {**LABELS, "slurm_array_task_id": "1"})
    end = job_control.check_job(job)
    assert isinstance(end, Gone)
    assert (job.id, end.state) == ("7_1", "FAILED")


def test_sacct_knows_the_components_of_a_job(slurm_commands: Path) -> None:
    """A heterogeneous job is gone once all of its components have ended."""
    lines = "7|7+0|FAILED|ann|gpu|1:0|cpu=1", "8|7+1|RUNNING|ann|gpu|0:0|cpu=1"
    job_control = make_job_control(slurm_commands, PAST="\n".join(lines))
    assert job_control.check_job(find_job(job_control, LABELS)) == Present("RUNNING")


def test_unknown_job_is_no_proof(slurm_commands: Path) -> None:
    """A job that Slurm shows nowhere may be running, hidden or of a lost controller: the stop is refused."""
    job_control = make_job_control(slurm_commands)
    with pytest.raises(RequestRefused, match="cannot be confirmed"):
        job_control.find_job(make_stop_request(LABELS))
    assert isinstance(job_control.find_job(make_stop_request({**LABELS, "slurm_cluster": "beta"})), ForeignJob)


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


def test_token_and_its_user_are_parsed() -> None:
    """A token from a file or as `scontrol token` prints it; the user is read from the token."""
    token = "eyJhbGciOiJIUzI1NiJ9.eyJleHAiOjE3OTUyODAxMDMsInN1biI6InJvb3QifQ.K85hh"
    assert parse_token(f"SLURM_JWT={token}\n") == parse_token(token) == token
    assert parse_user(token) == "root"
    for bad in ("", "a.b.c", "a", "a.bnVsbA.c"):
        assert parse_user(bad) is None


def test_rest_url_is_validated() -> None:
    """An http(s) URL or a unix socket is accepted; anything else is a ConfigurationError."""
    assert validate_rest_url("http://127.0.0.1:6820/") == "http://127.0.0.1:6820"
    assert validate_rest_url("unix:/run/slurmrestd.sock") == "unix:/run/slurmrestd.sock"
    for bad in ("127.0.0.1:6820", "ftp://x", "http://", "unix:"):
        with pytest.raises(ConfigurationError):
            validate_rest_url(bad)
    assert httpx.URL(validate_rest_url("https://slurm.example")).scheme == "https"


class OccupiedPrograms(Programs):
    """A job in the given states, one of each component, which Slurm does not release because it is not pending."""

    def __init__(self, states: list[str]) -> None:
        super().__init__({})
        self.states = states

    def jobs(self, job_id: str) -> list[Record]:
        return [Record(str(7 + place), state, "ann", "gpu", het_job_id="7") for place, state in enumerate(self.states)]

    def release(self, job: str) -> None:
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


class CleaningPrograms(Programs):
    """A held job that Slurm refuses to move at first, as release 26.05 does while a job's last run is cleaned up."""

    def __init__(self, refusal: str) -> None:
        super().__init__({})
        self.refusal = refusal
        self.calls: list[str] = []

    def jobs(self, job_id: str) -> list[Record]:
        return [Record("7", "PENDING", "ann", "gpu", reason="JobHeldUser")]

    def hold(self, job: str) -> None:
        self.calls.append("hold")

    def move(self, job: str, partition: str) -> None:
        self.calls.append(f"move to {partition}")
        if self.calls.count(f"move to {partition}") == 1:
            raise SchedulerUnavailable(self.refusal)

    def release(self, job: str) -> None:
        self.calls.append("release")


def test_job_that_cannot_be_moved_yet_is_moved_later() -> None:
    """A resumed job is moved to its partition again until Slurm does it, and only then released."""
    programs = CleaningPrograms("Resource temporarily unavailable for job 7")
    job_control = SlurmJobControl(programs, users=None, park_partition="low")
    job_control.resume_job(Job("7", {"job_id": "7", "partition": "high"}))
    assert programs.calls == ["hold", "move to high", "move to high", "release"]


def test_job_that_can_never_be_moved_is_an_error_at_once() -> None:
    """A partition that does not exist is reported as Slurm names it, without a wait for the job's last run."""
    job_control = SlurmJobControl(
        CleaningPrograms("Invalid partition name specified"), users=None, park_partition="low"
    )
    with pytest.raises(SchedulerUnavailable, match="Invalid partition"):
        job_control.resume_job(Job("7", {"job_id": "7", "partition": "high"}))


@pytest.mark.parametrize(
    ("status", "answer", "error", "message"),
    [
        pytest.param(
            403,
            {
                "errors": [
                    {"error_number": 1, "error": "Operation not permitted", "description": "Signal request failed"}
                ]
            },
            SchedulerUnavailable,
            "Signal request failed: Operation not permitted",
            id="controller away",
        ),
        pytest.param(
            511,
            {"errors": [{"error_number": 1007, "error": "Protocol authentication error"}]},
            SchedulerUnavailable,
            "Protocol authentication error; renew the token",
            id="token rejected",
        ),
        pytest.param(
            200,
            {"status": [{"error": {"code": 2002, "string": "Access/permission denied"}}]},
            RequestRefused,
            "does not permit it: Access/permission denied",
            id="denied",
        ),
    ],
)
def test_errors_of_recent_slurmrestd(
    status: int, answer: dict[str, object], error: type[Exception], message: str
) -> None:
    """Only the denial of a job is a refusal: release 26.05 also returns 403 when its controller does not answer."""
    with connect_to_recent_slurmrestd(status, answer) as rest, pytest.raises(error, match=message):
        rest.cancel("7", "ann")


def test_recent_slurmrestd_reports_an_ended_job_as_its_status() -> None:
    """A job that has ended already needs no cancel."""
    error = {"code": 2021, "string": "Job/step already completing or completed"}
    with connect_to_recent_slurmrestd(200, {"errors": [], "status": [{"error": error}]}) as rest:
        rest.cancel("7", "ann")


@contextmanager
def connect_to_recent_slurmrestd(status: int, answer: Mapping[str, object]) -> Iterator[Rest]:
    """A slurmrestd of release 26.05 that answers a cancel of job 7 so."""

    async def describe(_: Request) -> Response:
        return JSONResponse({"paths": {"/slurm/v0.0.41/job/{job_id}": {}, "/slurm/v0.0.45/job/{job_id}": {}}})

    async def cancel(_: Request) -> Response:
        return JSONResponse(answer, status)

    routes = [Route("/openapi/v3", describe), Route("/slurm/v0.0.45/job/7", cancel, methods=["DELETE"])]
    with serve_app(Starlette(routes=routes)) as url, closing(Rest(url, "cluster", "ann", lambda: "a token")) as rest:
        yield rest
