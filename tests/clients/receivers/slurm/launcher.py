"""Jobs on a real Slurm, and the two ways to it: its commands and slurmrestd."""

from __future__ import annotations

import getpass
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from evalstop_client.receivers.slurm.commands import Programs
from evalstop_client.receivers.slurm.job_control import SlurmJobControl
from evalstop_client.receivers.slurm.protocol import Cluster
from evalstop_client.receivers.slurm.rest import Rest
from evalstop_client.receivers.stop.checkpoint_signal import CheckpointSignal
from evalstop_client.scheduler_labels import scheduler_labels

from tests.clients.programs import wait_until
from tests.clients.receivers.conformance import StartedJob
from tests.fixtures.slurm import SlurmCluster

ME = getpass.getuser()
BOTH = CheckpointSignal("USR1", "full")
JOB = """
trap 'echo saved >> {file}' USR1
{trap_term}
touch {file}
while :; do sleep 0.1 & wait; done
"""


@dataclass
class SlurmLauncher:
    """Jobs of a real cluster, each with a GPU."""

    cluster: SlurmCluster
    folder: Path
    connect: Callable[[], Cluster]
    jobs: list[str] = field(default_factory=list)
    users: frozenset[str] | None = frozenset({ME})
    partitions: frozenset[str] | None = None
    park_partition: str | None = None

    @property
    def file(self) -> Path:
        return self.folder / f"saves-{len(self.jobs)}"

    def job_control(self) -> SlurmJobControl:
        return SlurmJobControl(
            self.connect(),
            users=self.users,
            partitions=self.partitions,
            default_signal=BOTH,
            park_partition=self.park_partition,
        )

    def start(self, ignores_sigterm: bool = False) -> StartedJob:
        return self.run("trap '' TERM" if ignores_sigterm else "", "--gres=gpu:1")

    def run(self, trap_term: str, *options: str) -> StartedJob:
        file = self.folder / f"saves-{len(self.jobs) + 1}"
        job = self.cluster.submit_job(JOB.format(file=file, trap_term=trap_term), "--output=/dev/null", *options)
        self.jobs.append(job)
        wait_until(file.exists)
        return StartedJob(self.job_control(), self.labels(job))

    def labels(self, job: str, **variables: str) -> dict[str, str]:
        """The labels that a run's client would send from inside the job."""
        inside = {"SLURM_JOB_ID": job, "SLURM_CLUSTER_NAME": self.cluster.name, "SLURM_JOB_USER": ME, **variables}
        return scheduler_labels(inside)

    def count_saves(self) -> int:
        return len(self.file.read_text().split())


def connect_by_commands(cluster: SlurmCluster) -> Cluster:
    return Programs(cluster.environment)


def connect_by_rest(cluster: SlurmCluster) -> Cluster:
    token = cluster.create_token()
    opened.append(Rest(cluster.rest_url, cluster.name, None, lambda: token))
    return opened[-1]


opened: list[Rest] = []
"""Connections to close after a test."""
