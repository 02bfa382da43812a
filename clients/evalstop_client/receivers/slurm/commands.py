"""Access to a Slurm cluster with its commands (squeue, scancel, scontrol and, if available, sacct), and its records."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from evalstop_client.errors import RequestRefused, SchedulerUnavailable
from evalstop_client.receivers.stop.processes import Done, run

ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
"""States in which a job holds no resources; neither COMPLETING nor unknown states are among them."""

WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"})


@dataclass(frozen=True)
class Record:
    """One job, one task of an array, or one component of a heterogeneous job."""

    job_id: str
    state: str  # COMPLETING takes precedence over other states
    user: str
    partition: str
    array_job_id: str = ""
    array_task_id: str = ""
    het_job_id: str = ""
    reason: str = ""
    exit_code: int | None = None  # as from wait(): the exit code times 256, plus the signal
    restarts: int = 0

    @property
    def name(self) -> str:
        """The id to cancel. Never the bare id of an array task, which may be that of the whole array."""
        if self.array_task_id:
            return f"{self.array_job_id}_{self.array_task_id}"
        return self.het_job_id or self.job_id

    @property
    def is_held(self) -> bool:
        """Whether it waits in the queue until it is released."""
        return self.state in WAITING and "held" in self.reason.lower()


def select_job(records: Iterable[Record], job_id: str) -> list[Record]:
    """The records of the job with this id: itself, and the other components if it is heterogeneous."""
    records = list(records)
    own_records = [record for record in records if record.job_id == job_id]
    leaders = {record.het_job_id for record in own_records if record.het_job_id}
    return own_records + [record for record in records if record.het_job_id in leaders and record.job_id != job_id]


def summarize_end(records: Iterable[Record]) -> dict[str, Any]:
    """The details of a job's end for the report."""
    records = list(records)
    first = records[0]
    facts: dict[str, Any] = {"scheduler_state": first.state}
    if first.exit_code is not None:
        facts |= {"exit_code": first.exit_code >> 8, "signal": (first.exit_code & 127) or None}
    return facts


def parse_squeue(line: str) -> Record:
    """From a line of `squeue` in the format of `FIELDS`."""
    values = dict(zip(FIELDS, line.split(SEPARATOR), strict=False))
    fields = {name: "" if value in ("N/A", "(null)", "None") else value for name, value in values.items()}
    array_task = fields["ArrayTaskID"]
    return Record(
        job_id=fields["JobID"],
        state=fields["State"],
        user=fields["UserName"],
        partition=fields["Partition"],
        array_job_id=fields["ArrayJobID"] if array_task else "",
        array_task_id=array_task,
        het_job_id=fields["HetJobID"],
        reason=fields["Reason"],
        exit_code=parse_exit_code(fields["exit_code"]),
        restarts=_parse_number(fields["RestartCnt"]),
    )


def parse_exit_code(text: str) -> int | None:
    """The status as from wait(); sacct and recent versions of squeue split it, such as `7:0` or `0:15`."""
    code, colon, signal = text.partition(":")
    if not code.isdecimal():
        return None
    return (int(code) << 8) | _parse_number(signal) if colon else int(code)


SEPARATOR = "|"
FIELDS = (
    "JobID",
    "ArrayJobID",
    "ArrayTaskID",
    "HetJobID",
    "State",
    "UserName",
    "Partition",
    "RestartCnt",
    "exit_code",
    "Reason",
)
SQUEUE_FORMAT = ",".join(f"{name}:{SEPARATOR}" for name in FIELDS)


def _parse_number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


TIMEOUT_SECONDS = 30.0
REQUIRED = ("squeue", "scancel", "scontrol")
UNKNOWN = "Invalid job id specified"
ON_ITS_WAY = ("already completing or completed", UNKNOWN)
FORBIDDEN = ("denied", "not permitted", "Invalid user")
SACCT_FIELDS = ("JobIDRaw", "JobID", "State", "User", "Partition", "ExitCode")


class Programs:
    """`environment` is that of the commands, without variables that would change their output."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        changing = ("SQUEUE_", "SCANCEL_", "SACCT_", "SLURM_TIME_FORMAT", "SLURM_CLUSTERS")
        inherited = {name: value for name, value in environment.items() if not name.startswith(changing)}
        self._environment = {**inherited, "LC_ALL": "C"}
        self._name: str | None = None
        self._has_accounting: bool | None = None

    def list_missing(self) -> list[str]:
        """The required commands that PATH lacks."""
        return [name for name in REQUIRED if not self._is_installed(name)]

    def name(self) -> str:
        """The name of the cluster."""
        if self._name is None:
            result = self._run_command("scontrol", "show", "config")
            match = re.search(r"^ClusterName\s*=\s*(.*?)\s*$", result.output, re.MULTILINE)
            if result.exit_code != 0 or match is None:
                raise SchedulerUnavailable(f"scontrol: {result.last_line}")
            self._name = match[1]
        return self._name

    def jobs(self, job_id: str) -> list[Record]:
        """The records of this id and of its other components, from squeue; for some minutes also of ended jobs."""
        lines = self._list_lines("squeue", "--states=all", f"--jobs={job_id}", f"--Format={SQUEUE_FORMAT}")
        return list(map(parse_squeue, lines))

    def waiting_jobs(self) -> list[Record]:
        """The pending jobs of all users whose jobs Slurm shows to this one."""
        return list(map(parse_squeue, self._list_lines("squeue", "--states=PENDING", f"--Format={SQUEUE_FORMAT}")))

    def node_partitions(self) -> list[tuple[str, str]]:
        """Each node with each of its partitions."""
        lines = self._list_lines("sinfo", "--Node", "--format=%N %R")
        return [(node, partition) for node, _, partition in (line.partition(" ") for line in lines)]

    def steps(self, job: str) -> list[str]:
        """The steps of a job that have not ended, such as `7.0`."""
        return [line.strip() for line in self._list_lines("squeue", "--steps", f"--jobs={job}", "--format=%i")]

    def past(self, job_id: str) -> list[Record]:
        """The same from sacct, also of other tasks; empty if accounting is not stored."""
        if self._has_accounting is None:
            self._has_accounting = self._is_installed("sacct")
        if not self._has_accounting:
            return []
        options = ["--allocations", "--noheader", "--parsable2", f"--jobs={job_id}"]
        result = self._run_command("sacct", *options, f"--format={','.join(SACCT_FIELDS)}")
        if result.exit_code != 0:
            if "disabled" in result.errors:
                self._has_accounting = False
                return []
            raise SchedulerUnavailable(f"sacct: {result.last_line}")
        return [_parse_sacct(line) for line in result.output.splitlines() if line.count("|") >= len(SACCT_FIELDS) - 1]

    def signal(self, job: str, user: str, name: str, where: str) -> None:
        """Send a signal, with --batch or --full as wanted."""
        reach = {"batch": ["--batch"], "full": ["--full"], "steps": []}[where]
        self.cancel(job, user, f"--signal={name}", *reach)

    def cancel(self, job: str, user: str, *options: str) -> None:
        # --user: no effect if the id meanwhile belongs to another user's job
        self._raise_for_failure(self._run_command("scancel", f"--user={user}", *options, job))

    def control(self, *arguments: str) -> None:
        """Run `scontrol`, as with `hold JOB`."""
        self._raise_for_failure(self._run_command("scontrol", *arguments))

    def is_requeuable(self, job: str) -> bool:
        result = self._run_command("scontrol", "--oneliner", "show", "job", job)
        if result.exit_code != 0:
            raise SchedulerUnavailable(f"scontrol: {result.last_line}")
        return "Requeue=0" not in result.output.split()

    def _list_lines(self, *command: str) -> list[str]:
        """The lines that a command prints; none if it does not know the job."""
        result = self._run_command(*command, "--noheader")
        if result.exit_code != 0 and UNKNOWN not in result.errors:
            raise SchedulerUnavailable(f"{command[0]}: {result.last_line}")
        return [line for line in result.output.splitlines() if line.strip() and result.exit_code == 0]

    def _raise_for_failure(self, result: Done) -> None:
        output = result.errors + result.output
        if result.exit_code == 0 or any(sign in output for sign in ON_ITS_WAY):
            return
        if any(sign in output for sign in FORBIDDEN):
            raise RequestRefused(f"Slurm does not permit it: {result.last_line}")
        raise SchedulerUnavailable(result.last_line)

    def _is_installed(self, name: str) -> bool:
        return shutil.which(name, path=self._environment.get("PATH")) is not None

    def _run_command(self, *command: str) -> Done:
        return run(command, self._environment, TIMEOUT_SECONDS)


def _parse_sacct(line: str) -> Record:
    """One line; the name may read `6_1` or `6+1`, the state `CANCELLED by 1000`, the exit code `0:15`."""
    job_id, name, state, user, partition, exit_code = line.split("|")[: len(SACCT_FIELDS)]
    array, _, array_task = name.partition("_")
    leader, component, _ = name.partition("+")
    return Record(
        job_id=job_id,
        state=state.split()[0] if state else "",
        user=user,
        partition=partition,
        array_job_id=array if array_task else "",
        array_task_id=array_task,
        het_job_id=leader if component else "",
        exit_code=parse_exit_code(exit_code),
    )
