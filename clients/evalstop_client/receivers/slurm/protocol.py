"""The interface to a Slurm cluster, implemented with commands and with slurmrestd."""

from __future__ import annotations

from typing import Protocol

from evalstop_client.receivers.slurm.job_record import Record


class Cluster(Protocol):
    """A Slurm cluster. Every method may raise SchedulerUnavailable, or RequestRefused if a retry cannot succeed."""

    def name(self) -> str:
        """The cluster's name, as in SLURM_CLUSTER_NAME."""
        ...

    def hides_jobs(self) -> bool:
        """Whether an unlisted job may still exist (PrivateData); true if unknown."""
        ...

    def jobs(self, job_id: str) -> list[Record]:
        """The controller's records of this id and of its other components; empty if the id is unknown."""
        ...

    def past(self, job_id: str) -> list[Record]:
        """The accounting's records of this id and of its other components or tasks; empty if there are none."""
        ...

    def signal(self, job: str, user: str, name: str, where: str) -> bool:
        """Send a signal to the batch script, the steps or both; False if that is not possible."""
        ...

    def cancel(self, job: str, user: str) -> None:
        """Cancel: SIGTERM, and SIGKILL after the cluster's KillWait."""
        ...

    def kill(self, job: str, user: str) -> None:
        """Send SIGKILL to the whole job."""
        ...

    def is_requeuable(self, job: str) -> bool:
        """Whether it was submitted as requeuable."""
        ...

    def requeue_held(self, job: str) -> None:
        """End it and requeue it, held."""
        ...

    def move(self, job: str, partition: str) -> None:
        """Move a waiting job to another partition."""
        ...

    def hold(self, job: str) -> None:
        """Hold a waiting job until it is released."""
        ...

    def release(self, job: str) -> None:
        """Release a held job."""
        ...

    def comment(self, job: str, text: str) -> None:
        """Set a comment on the job."""
        ...
