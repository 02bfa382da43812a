"""Access to a Slurm cluster with its commands: squeue, scancel, scontrol and, if available, sacct."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping

from evalstop_client.errors import RequestRefused, SchedulerUnavailable
from evalstop_client.receivers.slurm.job_record import SQUEUE_FORMAT, Record, parse_exit_code, parse_squeue
from evalstop_client.receivers.stop.processes import Done, run

TIMEOUT_SECONDS = 30.0
REQUIRED = ("squeue", "scancel", "scontrol")
UNKNOWN = "Invalid job id specified"
ON_ITS_WAY = ("already completing or completed", UNKNOWN)
FORBIDDEN = ("denied", "not permitted", "Invalid user")
SACCT_FIELDS = ("JobIDRaw", "JobID", "State", "User", "Partition", "ExitCode", "AllocTRES")


class Programs:
    """`environment` is that of the commands, without variables that would change their output."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        changing = ("SQUEUE_", "SCANCEL_", "SACCT_", "SLURM_TIME_FORMAT", "SLURM_CLUSTERS")
        inherited = {name: value for name, value in environment.items() if not name.startswith(changing)}
        self._environment = {**inherited, "LC_ALL": "C"}
        self._config: str | None = None
        self._has_accounting: bool | None = None

    def list_missing(self) -> list[str]:
        """The required commands that PATH lacks."""
        return [name for name in REQUIRED if not self._is_installed(name)]

    def name(self) -> str:
        return self._read_config("ClusterName")

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

    def signal(self, job: str, user: str, name: str, where: str) -> bool:
        """`scancel --signal`, with --batch or --full as wanted."""
        reach = {"batch": ["--batch"], "full": ["--full"], "steps": []}[where]
        self._cancel_job(job, user, f"--signal={name}", *reach)
        return True

    def cancel(self, job: str, user: str) -> None:
        self._cancel_job(job, user)

    def kill(self, job: str, user: str) -> None:
        """`scancel --signal=KILL --full`, and a plain `scancel` for jobs that KILL leaves in the queue."""
        self._cancel_job(job, user, "--signal=KILL", "--full")
        self._cancel_job(job, user)

    def is_requeuable(self, job: str) -> bool:
        result = self._run_command("scontrol", "--oneliner", "show", "job", job)
        if result.exit_code != 0:
            raise SchedulerUnavailable(f"scontrol: {result.last_line}")
        return "Requeue=0" not in result.output.split()

    def move(self, job: str, partition: str) -> None:
        self._run_scontrol("update", f"JobId={job}", f"Partition={partition}")

    def requeue_held(self, job: str) -> None:
        self._run_scontrol("requeuehold", job)

    def hold(self, job: str) -> None:
        self._run_scontrol("hold", job)

    def release(self, job: str) -> None:
        self._run_scontrol("release", job)

    def comment(self, job: str, text: str) -> None:
        self._run_scontrol("update", f"JobId={job}", f"Comment={text}")

    def _list_lines(self, *command: str) -> list[str]:
        """The lines that a command prints; none if it does not know the job."""
        result = self._run_command(*command, "--noheader")
        if result.exit_code != 0 and UNKNOWN not in result.errors:
            raise SchedulerUnavailable(f"{command[0]}: {result.last_line}")
        return [line for line in result.output.splitlines() if line.strip() and result.exit_code == 0]

    def _cancel_job(self, job: str, user: str, *options: str) -> None:
        # --user: no effect if the id meanwhile belongs to another user's job
        self._raise_for_failure(self._run_command("scancel", f"--user={user}", *options, job))

    def _run_scontrol(self, *arguments: str) -> None:
        self._raise_for_failure(self._run_command("scontrol", *arguments))

    def _raise_for_failure(self, result: Done) -> None:
        output = result.errors + result.output
        if result.exit_code == 0 or any(sign in output for sign in ON_ITS_WAY):
            return
        if any(sign in output for sign in FORBIDDEN):
            raise RequestRefused(f"Slurm does not permit it: {result.last_line}")
        raise SchedulerUnavailable(result.last_line)

    def _read_config(self, name: str) -> str:
        if self._config is None:
            result = self._run_command("scontrol", "show", "config")
            if result.exit_code != 0:
                raise SchedulerUnavailable(f"scontrol: {result.last_line}")
            self._config = result.output
        match = re.search(rf"^{name}\s*=\s*(.*?)\s*$", self._config, re.MULTILINE)
        if match is None:
            raise SchedulerUnavailable(f"scontrol show config does not show {name}")
        return match[1]

    def _is_installed(self, name: str) -> bool:
        return shutil.which(name, path=self._environment.get("PATH")) is not None

    def _run_command(self, *command: str) -> Done:
        return run(command, self._environment, TIMEOUT_SECONDS)


def _parse_sacct(line: str) -> Record:
    """One line; the name may read `6_1` or `6+1`, the state `CANCELLED by 1000`, the exit code `0:15`."""
    job_id, name, state, user, partition, exit_code, allocated = line.split("|")[: len(SACCT_FIELDS)]
    array, _, array_task = name.partition("_")
    leader, component, _ = name.partition("+")
    counted = re.search(r"gres/gpu=(\d+)", allocated)
    return Record(
        job_id=job_id,
        state=state.split()[0] if state else "",
        user=user,
        partition=partition,
        array_job_id=array if array_task else "",
        array_task_id=array_task,
        het_job_id=leader if component else "",
        exit_code=parse_exit_code(exit_code),
        gpus=int(counted[1]) if counted else 0,
    )
