"""Starts jobs on a real Slurm."""

from __future__ import annotations

import getpass
from dataclasses import dataclass, field
from pathlib import Path

from evalstop_client.job_identity import scheduler_labels
from evalstop_client.receivers.slurm.commands import Programs
from evalstop_client.receivers.slurm.control import SlurmJobControl
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
    jobs: list[str] = field(default_factory=list)
    users: frozenset[str] | None = frozenset({USER})
    partitions: frozenset[str] | None = None

    @property
    def saves_file(self) -> Path:
        return self.folder / f"saves-{len(self.jobs)}"

    def connect(self) -> Programs:
        return Programs(self.cluster.environment)

    def job_control(self) -> SlurmJobControl:
        return SlurmJobControl(
            self.connect(),
            users=self.users,
            partitions=self.partitions,
            default_signal=FULL_SIGNAL,
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
