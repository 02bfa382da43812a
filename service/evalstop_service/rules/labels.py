"""How many labels a run may have, and how large they may be together. Pure."""

from __future__ import annotations

from collections.abc import Mapping

MOST_LABELS = 500

MOST_LABEL_BYTES = 256 * 1024


def count_bytes(labels: Mapping[str, str]) -> int:
    """The size of names and values as UTF-8."""
    return sum(len(name.encode()) + len(value.encode()) for name, value in labels.items())


JOB_PREFIXES = ("slurm_", "kubernetes_")
"""Of labels that name a job by themselves."""

FREE_PREFIX = "mlflow."
"""Of labels that are notes of MLflow's clients and name no job."""


def list_job_changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The labels whose change may name another job: any that had a value, as a command can name its job by any of
    them, and those of schedulers that come in."""
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
        return f"the run would have {len(labels)} labels, and may have {MOST_LABELS}"
    if (size := count_bytes(labels)) > MOST_LABEL_BYTES:
        return f"the labels of the run would hold {size} bytes, and may hold {MOST_LABEL_BYTES // 1024} KiB"
    return None
