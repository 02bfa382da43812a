"""The job that a process belongs to: a text that its processes share, and the labels that lead a receiver to it.

Both are read from the environment variables of schedulers and launchers.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path

LONGEST_IDENTITY = 500
RANKS = ("RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "TORCHELASTIC_RUN_ID")
"""Variables of launchers that start several processes for one run."""

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


def name_process(environment: Mapping[str, str]) -> str:
    """This process as `PID:START`, which a `process` receiver can end by itself; "" if it is one of several of its run.

    START is its start time as Linux counts it: another process may get the same PID later.
    """
    is_worker = multiprocessing.parent_process() is not None or any(environment.get(name) for name in RANKS)
    started = None if is_worker else read_start(os.getpid())
    return "" if started is None else f"{os.getpid()}:{started}"


def read_start(pid: int) -> str | None:
    """The start time of a process in clock ticks since the machine's start; None without /proc, or if it has ended."""
    try:
        # "pid (command) state ...": the command may hold spaces and parentheses itself
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


SLURM_LABELS = {
    "slurm_job_id": "SLURM_JOB_ID",
    "slurm_cluster": "SLURM_CLUSTER_NAME",
    "slurm_user": "SLURM_JOB_USER",
    "slurm_partition": "SLURM_JOB_PARTITION",
    "slurm_array_job_id": "SLURM_ARRAY_JOB_ID",
    "slurm_array_task_id": "SLURM_ARRAY_TASK_ID",
    "slurm_restart_count": "SLURM_RESTART_COUNT",
    "slurm_step_id": "SLURM_STEP_ID",
}

FIRST_OWN_STEP = 0xFFFFFFF0

KUBERNETES_LABELS = {
    "kubernetes_namespace": "EVALSTOP_KUBERNETES_NAMESPACE",
    "kubernetes_kind": "EVALSTOP_KUBERNETES_KIND",
    "kubernetes_name": "EVALSTOP_KUBERNETES_NAME",
    "kubernetes_uid": "EVALSTOP_KUBERNETES_UID",
    "kubernetes_cluster": "EVALSTOP_KUBERNETES_CLUSTER",
}
"""Kubernetes itself sets no suitable variables: the pod template sets these through the downward API."""


def scheduler_labels(environment: Mapping[str, str]) -> dict[str, str]:
    """The labels of a process in a Slurm job or a Kubernetes workload; none elsewhere.

    All of a scheduler's labels are set, even empty ones: a run that continues in another job must not keep the old
    ones.
    """
    return {**_label_slurm(environment), **_label_kubernetes(environment)}


def _label_kubernetes(environment: Mapping[str, str]) -> dict[str, str]:
    if not environment.get("EVALSTOP_KUBERNETES_NAME"):
        return {}
    return {label: environment.get(variable, "") for label, variable in KUBERNETES_LABELS.items()}


def _label_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    if not environment.get("SLURM_JOB_ID"):
        return {}
    labels = {label: environment.get(variable, "") for label, variable in SLURM_LABELS.items()}
    return {
        **labels,
        "slurm_restart_count": labels["slurm_restart_count"] or "0",  # Slurm sets it only from 1 on
        "slurm_step_id": _name_step(labels["slurm_step_id"]),
    }


def _name_step(step: str) -> str:
    """The step that srun started; `batch` without one. "" for the steps that Slurm itself numbers from 2**32 - 6 on."""
    if not step:
        return "batch"
    return step if step.isdecimal() and int(step) < FIRST_OWN_STEP else ""
