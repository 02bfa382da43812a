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
    """What all processes of a job say alike, and no other job: its Kubernetes workload, Slurm job, torchrun launch or,
    outside of these, this process and what it forks."""
    identity = _in_kubernetes(environment) or _in_slurm(environment) or _in_torchrun(environment)
    return (identity or f"process:{_PROCESS}")[:LONGEST_IDENTITY]


def _in_kubernetes(environment: Mapping[str, str]) -> str | None:
    uid = environment.get("EVALSTOP_KUBERNETES_UID", "")
    parts = [environment.get(f"EVALSTOP_KUBERNETES_{part}", "") for part in ("CLUSTER", "NAMESPACE", "KIND", "NAME")]
    return ":".join(("kubernetes", *parts, uid)) if parts[-1] else None


def _in_slurm(environment: Mapping[str, str]) -> str | None:
    """The id of a job, of which each task of an array has its own, and which stays when it is requeued."""
    job = environment.get("SLURM_JOB_ID")
    return f"slurm:{environment.get('SLURM_CLUSTER_NAME', '')}:{job}" if job else None


def _in_torchrun(environment: Mapping[str, str]) -> str | None:
    run_id = environment.get("TORCHELASTIC_RUN_ID")
    if run_id == "none":  # what torchrun says without --rdzv-id: the launcher, parent of the ranks, stands for it
        return f"torchrun:{socket.gethostname()}:{os.getppid()}"
    return f"torchrun:{run_id}" if run_id else None
