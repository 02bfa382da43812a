"""The labels of a run: their limits, the job that they identify, and its GPUs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

MOST_LABELS = 500
MOST_LABEL_BYTES = 256 * 1024
MOST_GPUS = 1e6


def count_bytes(labels: Mapping[str, str]) -> int:
    """The size of names and values in UTF-8."""
    return sum(len(name.encode()) + len(value.encode()) for name, value in labels.items())


JOB_PREFIXES = ("slurm_", "kubernetes_")
"""Prefixes of labels that identify a job on their own."""

FREE_PREFIX = "mlflow."
"""Prefix of labels that are notes of MLflow clients and identify no job."""


def list_job_changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The labels whose change may identify another job: any that already had a value, since a command can identify its
    job by any of them, and new ones that receivers find a job or a part of it by."""
    return sorted(
        name
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name)
        and (name in before or name in _JOB_LABELS or name.startswith(JOB_PREFIXES))
        and not name.startswith(FREE_PREFIX)
    )


def find_objection(labels: Mapping[str, str]) -> str | None:
    """Why a run may not have these labels; None if it may."""
    if len(labels) > MOST_LABELS:
        return f"the run would have {len(labels)} labels; the limit is {MOST_LABELS}"
    if (size := count_bytes(labels)) > MOST_LABEL_BYTES:
        return f"the labels of the run would take {size} bytes; the limit is {MOST_LABEL_BYTES // 1024} KiB"
    return None


KUBERNETES_JOB = tuple(f"kubernetes_{field}" for field in ("name", "namespace", "kind", "uid", "cluster"))

_JOBS = (("slurm_job_id", "slurm_cluster"), KUBERNETES_JOB, ("receiver",), ("job_id", "scheduler", "cluster"))
"""What a receiver finds a job by: the first label must be set. A job that may contain the others comes first."""

PartKind = Literal["step", "process"]

_PARTS: dict[str, tuple[PartKind, str]] = {
    "slurm_job_id": ("step", "slurm_step_id"),
    "receiver": ("process", "process_id"),
}

_JOB_LABELS = frozenset(name for names in _JOBS for name in names) | {label for _, label in _PARTS.values()}


class JobPart(NamedTuple):
    """Something smaller than the job that a run is in: a `step` of Slurm, or a `process` of a `process` receiver."""

    kind: PartKind
    id: str

    @property
    def can_be_ended(self) -> bool:
        """Whether it can be ended by itself; the end of the batch script is that of the job."""
        return self.id != BATCH


BATCH = "batch"
"""The label `slurm_step_id` of a run in the batch script, which the end of a step does not reach."""


def find_job_key(labels: Mapping[str, str], job: str | None) -> str | None:
    """What all runs of a job have in common: the job that a receiver would end, else the trainer's own name for it.

    None: it is not known where the run runs.
    """
    for names in _JOBS:
        if labels.get(names[0]):
            return "/".join(f"{name}={labels.get(name, '')}" for name in names)
    return job


def find_job_part(labels: Mapping[str, str]) -> JobPart | None:
    """The part of its job that a run names; None: it may be anywhere in the job."""
    name = next((names[0] for names in _JOBS if labels.get(names[0])), "")
    kind, label = _PARTS.get(name, (None, ""))
    return JobPart(kind, labels[label]) if kind is not None and labels.get(label) else None


def read_gpus(labels: Mapping[str, str]) -> float | None:
    """The number of GPUs of a job by the label `gpus` of its run; None where it is missing or invalid."""
    try:
        gpus = float(labels["gpus"])
    except (KeyError, ValueError):
        return None
    return gpus if 0 < gpus <= MOST_GPUS else None
