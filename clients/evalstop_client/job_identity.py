"""The job that a process belongs to: the service lets the processes of one job report to one run."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping

LONGEST_IDENTITY = 500

_PROCESS = uuid.uuid4().hex
"""Kept by forked children, which belong to the job of their parent."""


def identify_job(environment: Mapping[str, str]) -> str:
    """An id that all processes of a job share and no other job has: that of its Kubernetes workload, Slurm job or
    torchrun launch, else of this process and its forks."""
    identity = _in_kubernetes(environment) or _in_slurm(environment) or _in_torchrun(environment)
    return (identity or f"process:{_PROCESS}")[:LONGEST_IDENTITY]


def _in_kubernetes(environment: Mapping[str, str]) -> str | None:
    uid = environment.get("EVALSTOP_KUBERNETES_UID", "")
    parts = [environment.get(f"EVALSTOP_KUBERNETES_{part}", "") for part in ("CLUSTER", "NAMESPACE", "KIND", "NAME")]
    return ":".join(("kubernetes", *parts, uid)) if parts[-1] else None


def _in_slurm(environment: Mapping[str, str]) -> str | None:
    """The id of a Slurm job: each task of an array has its own, and it stays the same when the job is requeued."""
    job = environment.get("SLURM_JOB_ID")
    return f"slurm:{environment.get('SLURM_CLUSTER_NAME', '')}:{job}" if job else None


def _in_torchrun(environment: Mapping[str, str]) -> str | None:
    run_id = environment.get("TORCHELASTIC_RUN_ID")
    if run_id == "none":  # torchrun's value without --rdzv-id: use the launcher, the parent of the ranks
        return f"torchrun:{socket.gethostname()}:{os.getppid()}"
    return f"torchrun:{run_id}" if run_id else None
