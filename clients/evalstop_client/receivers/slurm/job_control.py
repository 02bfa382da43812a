"""Ends jobs of a Slurm cluster: checkpoint signal, cancel, then polling until the job has left COMPLETING.

A run names its job by the labels that the client sends by itself: slurm_job_id, slurm_cluster and the others of LABELS.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

from evalstop_client.errors import RequestRefused, SchedulerUnavailable
from evalstop_client.receivers.slurm.job_record import ENDED, Record, details, of_job
from evalstop_client.receivers.slurm.protocol import Cluster
from evalstop_client.receivers.stop.checkpoint_signal import CheckpointSignal, checkpoint_signal, choose_signal
from evalstop_client.receivers.stop.job_control import ForeignJob, Gone, Job, Present, StopRequest

logger = logging.getLogger("evalstop_client.receivers")

JOB_ID = re.compile(r"[1-9]\d{0,17}", re.ASCII)
STOP_METHODS = ("cancel", "requeuehold")


class SlurmJobControl:
    """`users`: whose jobs may be stopped, None for anybody's. `partitions`: in which, None for any."""

    name = "evalstop-receiver slurm"

    def __init__(
        self,
        cluster: Cluster,
        *,
        users: frozenset[str] | None,
        partitions: frozenset[str] | None = None,
        default_signal: CheckpointSignal | None = None,
        stop_by: str = "cancel",
    ) -> None:
        self._cluster = cluster
        self._users = users
        self._partitions = partitions
        self._default_signal = default_signal
        self._requeues = stop_by == "requeuehold"

    def find_job(self, request: StopRequest) -> Job | ForeignJob:
        """The job that the run's labels name, if it is one of this cluster and on the allow-list."""
        labels = request.labels
        job_id, cluster = labels.get("slurm_job_id", ""), labels.get("slurm_cluster", "")
        if not job_id or cluster != self._cluster.name():
            return ForeignJob()
        if not JOB_ID.fullmatch(job_id):
            raise RequestRefused(f"label slurm_job_id is {job_id[:40]!r}, which is no job id")
        facts = {"cluster": cluster, "job_id": job_id}
        signal = choose_signal(labels, self._default_signal)
        if signal is not None:
            facts["checkpoint_signal"] = str(signal)
        records = of_job(self._cluster.jobs(job_id), job_id) or self._cluster.past(job_id)
        if not records:
            if self._cluster.hides_jobs():
                raise RequestRefused(
                    f"Slurm shows no job {job_id}: it ended more than MinJobAge ago, or this receiver may not see it; "
                    "that it is gone cannot be proved"
                )
            return Job(job_id, facts)
        record = records[0]
        self._check(record, labels)
        facts |= {"user": record.user, "partition": record.partition}
        facts["restarts"] = labels.get("slurm_restart_count") or str(record.restarts)
        return Job(record.name, facts)

    def request_checkpoint(self, job: Job, request: StopRequest) -> bool:
        """Send the checkpoint signal that the run's label, or else the receiver, names."""
        if "checkpoint_signal" not in job.facts or "user" not in job.facts:
            return False
        signal = checkpoint_signal(job.facts["checkpoint_signal"])
        logger.info("SIG%s to %s of job %s", signal.name, signal.where, job.id)
        return self._cluster.signal(job.id, job.facts["user"], signal.name, signal.where)

    def cancel_job(self, job: Job, request: StopRequest) -> None:
        """Leave a comment, because a job that exits 0 on SIGTERM looks like one that ended by itself; then cancel."""
        try:
            self._cluster.comment(job.id, request.explanation)
        except (RequestRefused, SchedulerUnavailable) as error:
            logger.warning("job %s gets no comment: %s", job.id, error)
        logger.info("cancelling job %s", job.id)
        if self._requeues:
            self._cluster.requeue_held(job.id)
        else:
            self._cluster.cancel(job.id, job.facts["user"])

    def kill_job(self, job: Job) -> None:
        """SIGKILL, which Slurm itself should have sent after KillWait."""
        logger.info("killing job %s", job.id)
        self._cluster.kill(job.id, job.facts["user"])

    def check_job(self, job: Job) -> Present | Gone:
        """What slurmctld reports, or the accounting once slurmctld has dropped the job."""
        records = of_job(self._cluster.jobs(job.facts["job_id"]), job.facts["job_id"])
        if not records:
            records = self._cluster.past(job.facts["job_id"])
        if not records:  # it was seen by this receiver, or nothing is hidden from it: it was forgotten
            return Gone("UNKNOWN", {"scheduler_state": "UNKNOWN", "note": "Slurm knows no such job any more"})
        if all(one.state in ENDED for one in records):
            return Gone(records[0].state, details(records))
        if self._requeues and all(one.is_held for one in records):
            return Gone("REQUEUE_HOLD", {**details(records), "scheduler_state": "REQUEUE_HOLD"})
        if not self._requeues and _was_started_again(records, job.facts):
            return Gone("REQUEUED", {"scheduler_state": records[0].state, "note": "the job was requeued since"})
        return Present(next(one.state for one in records if one.state not in ENDED))

    def resume_job(self, job: Job) -> None:
        """Release a job that was stopped by being requeued and held."""
        if not self._requeues:
            raise RequestRefused("a job that was cancelled cannot be brought back; use --stop-by requeuehold for that")
        self._cluster.release(job.id)

    def _check(self, record: Record, labels: Mapping[str, str]) -> None:
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


def _was_started_again(records: list[Record], facts: Mapping[str, str]) -> bool:
    """Whether this is another life of the job than the one that was to end, which is over then."""
    before = facts.get("restarts", "")
    alive = [one for one in records if one.state not in ENDED and one.state != "COMPLETING"]
    return before.isdecimal() and bool(alive) and all(one.restarts > int(before) for one in alive)
