"""The seam between the action and a Slurm cluster: a few verbs, by commands or through slurmrestd."""

from __future__ import annotations

from typing import Protocol

from evalstop_client.receivers.slurm.job_record import Record


class Cluster(Protocol):
    """A Slurm cluster. Every method may raise SchedulerUnavailable, or RequestRefused for what no retry will change."""

    def name(self) -> str:
        """What it calls itself, as in SLURM_CLUSTER_NAME."""
        ...

    def hides_jobs(self) -> bool:
        """Whether a job that is not listed may exist nevertheless (PrivateData), or that is unknown."""
        ...

    def jobs(self, job_id: str) -> list[Record]:
        """What the controller has of this id, and of what belongs together with it; empty when it knows no such id."""
        ...

    def past(self, job_id: str) -> list[Record]:
        """What the accounting has of a job that the controller has forgotten; empty when there is none."""
        ...

    def signal(self, job: str, user: str, name: str, where: str) -> bool:
        """Send a signal to the batch script, the steps or both; False when that cannot be done this way."""
        ...

    def cancel(self, job: str, user: str) -> None:
        """SIGTERM, and SIGKILL after the cluster's KillWait."""
        ...

    def kill(self, job: str, user: str) -> None:
        """SIGKILL to all of it."""
        ...

    def is_requeuable(self, job: str) -> bool:
        """Whether its owner lets it be requeued."""
        ...

    def requeue_held(self, job: str) -> None:
        """End it and put it back into the queue, held."""
        ...

    def move(self, job: str, partition: str) -> None:
        """Put a job that waits into another partition."""
        ...

    def hold(self, job: str) -> None:
        """Keep a job that waits in the queue until it is released."""
        ...

    def release(self, job: str) -> None:
        """Let a job that is held go on."""
        ...

    def comment(self, job: str, text: str) -> None:
        """Leave a comment on the job."""
        ...
