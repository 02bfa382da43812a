"""The labels by which a receiver finds a run's job, from the scheduler's environment variables. Pure."""

from __future__ import annotations

from collections.abc import Mapping

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
    return {**_in_slurm(environment), **_in_kubernetes(environment)}


def _in_kubernetes(environment: Mapping[str, str]) -> dict[str, str]:
    if not environment.get("EVALSTOP_KUBERNETES_NAME"):
        return {}
    return {label: environment.get(variable, "") for label, variable in KUBERNETES_LABELS.items()}


def _in_slurm(environment: Mapping[str, str]) -> dict[str, str]:
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
