"""`evalstop-receiver slurm`: ends jobs of a Slurm cluster.

Checkpoint signal, cancel, then polling until the job has left COMPLETING. Parking requeues a job and holds it; resuming
releases it.

A run identifies its job with labels that the client adds: slurm_job_id, slurm_cluster and others.
"""

from __future__ import annotations

import argparse
import getpass
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from evalstop_client.errors import ConfigurationError, RequestRefused, SchedulerUnavailable
from evalstop_client.receivers.slurm.commands import ENDED, WAITING, Programs, Record, select_job, summarize_end
from evalstop_client.receivers.stop.job_control import (
    CheckpointSignal,
    Gone,
    Job,
    JobControl,
    Parked,
    Present,
    StopRequest,
    Unproven,
    choose_signal,
    parse_checkpoint_signal,
)
from evalstop_client.receivers.stop.processes import copy_environment
from evalstop_client.receivers.stop.receiver import (
    add_receiver_options,
    add_return_option,
    add_service_options,
    run_receiver,
)

logger = logging.getLogger("evalstop_client.receivers")

STEP_ID = re.compile(r"\d{1,10}", re.ASCII)
JOB_ID = re.compile(r"[1-9]\d{0,17}", re.ASCII)

FOR_RESOURCES = frozenset({"", "Priority", "Resources"})
"""Reasons of pending jobs that GPUs would help, unlike held ones, those with dependencies and those at a limit."""


class SlurmJobControl(JobControl):
    """`users`: whose jobs may be stopped; None: anyone's. `partitions`: in which; None: any."""

    part = "step"

    def __init__(
        self,
        programs: Programs,
        *,
        users: frozenset[str] | None,
        partitions: frozenset[str] | None = None,
        default_signal: CheckpointSignal | None = None,
    ) -> None:
        self._programs = programs
        self._users = users
        self._partitions = partitions
        self._default_signal = default_signal

    def find_job(self, request: StopRequest) -> Job | None:
        """The job that the run's labels name, if it is in this cluster and allowed."""
        labels = request.labels
        job_id, cluster = labels.get("slurm_job_id", ""), labels.get("slurm_cluster", "")
        if not job_id or cluster != self._programs.name():
            return None
        if not JOB_ID.fullmatch(job_id):
            raise RequestRefused(f"label slurm_job_id is {job_id[:40]!r}, which is not a job id")
        facts = {"cluster": cluster, "job_id": job_id}
        signal = choose_signal(labels, self._default_signal)
        if signal is not None:
            facts["checkpoint_signal"] = str(signal)
        records = self._find_records(job_id)
        if not records:
            raise RequestRefused(
                f"Slurm shows no job {job_id}: it ended more than MinJobAge ago, never existed, or this receiver may "
                "not see it; it cannot be confirmed that the job is gone"
            )
        record = records[0]
        self._check_record(record, labels)
        restarts = labels.get("slurm_restart_count", "")
        was_requeued = restarts.isdecimal() and record.restarts > int(restarts)
        if was_requeued and not (request.was_parked or record.is_held):
            raise RequestRefused(
                f"job {record.name} was requeued since its run was judged: it is at restart {record.restarts}, and the "
                f"run was in restart {restarts}; it is not ended for that"
            )
        facts |= {"user": record.user, "partition": record.partition, "restarts": str(record.restarts)}
        facts["job_id"] = record.het_job_id or job_id  # of the first component: asked by it, Slurm shows all
        if request.ends == "job":
            return Job(record.name, facts)
        step = labels.get("slurm_step_id", "")
        if not STEP_ID.fullmatch(step):
            raise RequestRefused(
                f"other runs of the job go on, and label slurm_step_id is {step[:40]!r}, which is no step"
            )
        return Job(f"{record.name}.{step}", {**facts, "step": step})

    def request_checkpoint(self, job: Job, request: StopRequest) -> bool:
        """Send the checkpoint signal of the run's label, else of the receiver; a waiting job gets none."""
        if "checkpoint_signal" not in job.facts:
            return False
        if all(
            record.state in WAITING for record in self._find_records(job.facts["job_id"])
        ):  # scancel would retry for minutes
            return False
        signal = parse_checkpoint_signal(job.facts["checkpoint_signal"])
        if "step" in job.facts:  # whatever else the signal would reach belongs to other runs
            signal = replace(signal, where="steps")
        logger.info("SIG%s to %s of job %s", signal.name, signal.where, job.id)
        self._programs.signal(job.id, job.facts["user"], signal.name, signal.where)
        return True

    def cancel_job(self, job: Job, request: StopRequest) -> None:
        """Add a comment, because a job that exits 0 on SIGTERM looks like one that ended by itself; then cancel."""
        logger.info("cancelling job %s", job.id)
        if "step" in job.facts:  # Slurm would kill a cancelled step at once
            self._programs.signal(job.id, job.facts["user"], "TERM", "steps")
            return
        self._comment_job(job, request)
        self._programs.cancel(job.id, job.facts["user"])

    def park_job(self, job: Job, request: StopRequest) -> None:
        """Hold it in the queue, for which a running job is requeued; RequestRefused if it is not requeuable."""
        if not self._programs.is_requeuable(job.id):
            raise RequestRefused(f"job {job.id} cannot be parked: it was submitted without --requeue")
        self._comment_job(job, request)
        logger.info("parking job %s", job.id)
        records = self._find_records(job.facts["job_id"])
        if not records or all(record.state in ENDED for record in records):
            raise RequestRefused(f"job {job.id} has ended")
        if all(record.state in WAITING for record in records):
            self._programs.control("hold", job.id)
        else:
            self._programs.control("requeuehold", job.id)

    def kill_job(self, job: Job) -> None:
        """Send SIGKILL, which Slurm itself should have sent after KillWait."""
        logger.info("killing job %s", job.id)
        if "step" not in job.facts:
            self._programs.signal(job.id, job.facts["user"], "KILL", "full")
        self._programs.cancel(job.id, job.facts["user"])  # also a job that KILL leaves in the queue

    def check_job(self, job: Job) -> Present | Gone | Unproven:
        """The state from slurmctld, or from the accounting once slurmctld has dropped the job.

        A job that Slurm starts again was not ended by that, whoever or whatever had it requeued.
        """
        records = self._find_records(job.facts["job_id"])
        if not records:  # it may have dropped the job, or have lost its own state
            reason = f"Slurm no longer knows job {job.id}: nothing proves that it has ended and that its GPUs are free"
            return Unproven(reason, {"scheduler_state": "UNKNOWN"})
        if all(record.state in ENDED for record in records):
            return Gone(records[0].state, summarize_end(records))
        if "step" in job.facts and job.id not in self._programs.steps(records[0].name):
            note = f"step {job.facts['step']} has ended; the job goes on with its GPUs"
            return Gone("STEP_ENDED", {"scheduler_state": records[0].state, "note": note})
        return self._describe_present(records, job)

    def _describe_present(self, records: list[Record], job: Job) -> Present:
        """Not `again`: a parked job, which waits until it is resumed, and a job that is still cleaned up."""
        alive = [record for record in records if record.state not in ENDED]
        before = int(job.facts.get("restarts", "0"))
        again = all(record.restarts > before and record.state != "COMPLETING" for record in alive)
        runs = any(record.state not in WAITING | {"COMPLETING"} for record in alive)
        return Present(alive[0].state, again and not records[0].is_held, runs)

    def check_parked(self, job: Job) -> Present | Parked | Gone | Unproven:
        """Parked once it is held."""
        records = self._find_records(job.facts["job_id"])
        if not records or all(record.state in ENDED for record in records):
            return self.check_job(job)
        if all(record.is_held for record in records):
            return Parked("held", {**summarize_end(records), "scheduler_state": "REQUEUE_HOLD", "parked_as": "held"})
        return self._describe_present(records, job)

    def resume_job(self, job: Job) -> None:
        """Release a held job.

        A job that neither waits in the queue nor is ending has survived the stop and runs on.
        """
        records = self._find_records(job.facts["job_id"])
        if not records or all(record.state in ENDED for record in records):
            raise RequestRefused(f"job {job.id} has ended and cannot be resumed")
        if "step" in job.facts:
            if job.id not in self._programs.steps(records[0].name):
                raise RequestRefused(f"step {job.id} has ended and cannot be resumed")
            return
        if any(record.state == "COMPLETING" for record in records):  # it will be held, or have ended
            raise SchedulerUnavailable(f"job {job.id} has not ended yet")
        if any(record.state in WAITING for record in records):  # Slurm refuses to release any other
            self._programs.control("release", job.id)

    def others_wait(self, job: Job, parked: Collection[Job]) -> bool:
        """Whether a pending job waits for resources, in a partition that shares a node with the job's own."""
        own, places = job.facts["partition"].split(","), self._programs.node_partitions()
        nodes = {node for node, partition in places if partition in own}
        partitions, known = {partition for node, partition in places if node in nodes}, {job.id for job in parked}
        return any(
            record.reason in FOR_RESOURCES
            and record.name not in known
            and partitions & set(record.partition.split(","))
            for record in self._programs.waiting_jobs()
        )

    def _comment_job(self, job: Job, request: StopRequest) -> None:
        try:
            self._programs.control("update", f"JobId={job.id}", f"Comment={request.explanation}")
        except (RequestRefused, SchedulerUnavailable) as error:
            logger.warning("job %s gets no comment: %s", job.id, error)

    def _find_records(self, job_id: str) -> list[Record]:
        """The records from slurmctld, or from the accounting once slurmctld has dropped the job."""
        return select_job(self._programs.jobs(job_id), job_id) or select_job(self._programs.past(job_id), job_id)

    def _check_record(self, record: Record, labels: Mapping[str, str]) -> None:
        if self._users is not None and record.user not in self._users:
            raise RequestRefused(f"job {record.name} belongs to {record.user}, who is not on the allow-list")
        if self._partitions is not None and not set(record.partition.split(",")) <= self._partitions:
            raise RequestRefused(f"job {record.name} is in {record.partition}, which is not on the allow-list")
        claimed = {"slurm_user": record.user, "slurm_array_task_id": record.array_task_id}
        for label, value in claimed.items():
            if labels.get(label, value) not in ("", value):
                raise RequestRefused(
                    f"label {label} is {labels[label][:80]!r}, but of job {record.name} it is {value!r}"
                )


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--allow-user",
        action="append",
        metavar="NAME",
        help="user whose jobs may be stopped (default: the receiver's user)",
    )
    add("--allow-any-user", action="store_true", help="stop any job that Slurm permits the receiver's user to stop")
    add(
        "--allow-partition",
        action="append",
        metavar="NAME",
        help="partition in which jobs may be stopped (default: all)",
    )
    add(
        "--checkpoint-signal",
        metavar="NAME[@WHERE]",
        help="USR1, USR2 or HUP, to the batch script (@batch), the steps (@steps) or both (@full); "
        "for runs without a label checkpoint_signal (default: none is sent)",
    )
    add_return_option(parser)
    add_service_options(parser)
    add_receiver_options(parser)


def run(options: argparse.Namespace) -> int:
    users = None if options.allow_any_user else frozenset(options.allow_user or [_find_user()])
    partitions = frozenset(options.allow_partition) if options.allow_partition else None
    signal = parse_checkpoint_signal(options.checkpoint_signal) if options.checkpoint_signal else None
    programs = Programs(copy_environment(options.secret_env, options.key_env))
    if missing := programs.list_missing():
        raise ConfigurationError(
            f"PATH: it has no {', '.join(missing)}; start the receiver where Slurm's commands are installed."
        )
    action = SlurmJobControl(programs, users=users, partitions=partitions, default_signal=signal)
    return run_receiver(action, options, "slurm", options.return_idle)


def _find_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        raise ConfigurationError("allow-user: this user has no name; name users with --allow-user.") from None
