"""Limits on the number and total size of a run's labels. Pure."""

from __future__ import annotations

from collections.abc import Mapping

MOST_LABELS = 500

MOST_LABEL_BYTES = 256 * 1024


def count_bytes(labels: Mapping[str, str]) -> int:
    """The size of names and values in UTF-8."""
    return sum(len(name.encode()) + len(value.encode()) for name, value in labels.items())


JOB_PREFIXES = ("slurm_", "kubernetes_")
"""Prefixes of labels that identify a job on their own."""

FREE_PREFIX = "mlflow."
"""Prefix of labels that are notes of MLflow clients and identify no job."""


def list_job_changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The labels whose change may identify another job: any that already had a value, since a command can identify its
    job by any of them, and new ones with a scheduler's prefix."""
    return sorted(
        name
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name)
        and (name in before or name.startswith(JOB_PREFIXES))
        and not name.startswith(FREE_PREFIX)
    )


def find_objection(labels: Mapping[str, str]) -> str | None:
    """Why a run may not have these labels; None if it may."""
    if len(labels) > MOST_LABELS:
        return f"the run would have {len(labels)} labels; the limit is {MOST_LABELS}"
    if (size := count_bytes(labels)) > MOST_LABEL_BYTES:
        return f"the labels of the run would take {size} bytes; the limit is {MOST_LABEL_BYTES // 1024} KiB"
    return None
