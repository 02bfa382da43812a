"""Starts jobs on a real Slurm, and connects to it by its commands or through slurmrestd."""

from __future__ import annotations

import getpass
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from evalstop_client.job_identity import scheduler_labels
from evalstop_client.receivers.slurm.commands import Programs
from evalstop_client.receivers.slurm.control import Cluster, SlurmJobControl
from evalstop_client.receivers.slurm.rest import Rest
from evalstop_client.receivers.stop.job_control import CheckpointSignal

from tests.clients.programs import wait_until
from tests.clients.receivers.conformance import StartedJob
from tests.fixtures.slurm import SlurmCluster

USER = getpass.getuser()
FULL_SIGNAL = CheckpointSignal("USR1", "full")
JOB = """
trap 'echo saved >> {saves_file}' USR1
{trap_term}
touch {saves_file}
while :; do sleep 0.1 & wait; done
"""


@dataclass
class SlurmLauncher:
    """Starts jobs of a real cluster."""

    cluster: SlurmCluster
    folder: Path
    connect: Callable[[], Cluster]
    jobs: list[str] = field(default_factory=list)
    users: frozenset[str] | None = frozenset({USER})
    partitions: frozenset[str] | None = None
    park_partition: str | None = None

    @property
    def saves_file(self) -> Path:
        return self.folder / f"saves-{len(self.jobs)}"

    def job_control(self) -> SlurmJobControl:
        return SlurmJobControl(
            self.connect(),
            users=self.users,
            partitions=self.partitions,
            default_signal=FULL_SIGNAL,
            park_partition=self.park_partition,
        )

    def start(self, ignores_sigterm: bool = False) -> StartedJob:
        return self.start_script("trap '' TERM" if ignores_sigterm else "", "--gres=gpu:1")

    def start_script(self, trap_term: str, *options: str) -> StartedJob:
        """Start a job that counts how often it saves; `trap_term` is its trap for SIGTERM."""
        saves_file = self.folder / f"saves-{len(self.jobs) + 1}"
        job = self.cluster.submit_job(
            JOB.format(saves_file=saves_file, trap_term=trap_term), "--output=/dev/null", *options
        )
        self.jobs.append(job)
        wait_until(saves_file.exists)
        return StartedJob(self.job_control(), self.make_labels(job))

    def make_labels(self, job: str, **variables: str) -> dict[str, str]:
        """The labels that a run's client sends from inside the job."""
        inside = {"SLURM_JOB_ID": job, "SLURM_CLUSTER_NAME": self.cluster.name, "SLURM_JOB_USER": USER, **variables}
        return scheduler_labels(inside)

    def count_saves(self) -> int:
        return len(self.saves_file.read_text().split())


def connect_by_commands(cluster: SlurmCluster) -> Cluster:
    """Slurm by its commands."""
    return Programs(cluster.environment)


def connect_by_rest(cluster: SlurmCluster) -> Cluster:
    """Slurm through slurmrestd."""
    token = cluster.create_token()
    open_connections.append(Rest(cluster.rest_url, cluster.name, None, lambda: token))
    return open_connections[-1]


open_connections: list[Rest] = []
"""Closed after each test."""
