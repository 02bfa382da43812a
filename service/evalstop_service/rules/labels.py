"""How many labels a run may have, and how large they may be together. Pure."""

from __future__ import annotations

from collections.abc import Mapping

MOST_LABELS = 500

MOST_LABEL_BYTES = 256 * 1024


def count_bytes(labels: Mapping[str, str]) -> int:
    """The size of names and values as UTF-8."""
    return sum(len(name.encode()) + len(value.encode()) for name, value in labels.items())


def find_objection(labels: Mapping[str, str]) -> str | None:
    """Why a run may not have these labels; None if it may."""
    if len(labels) > MOST_LABELS:
        return f"the run would have {len(labels)} labels, and may have {MOST_LABELS}"
    if (size := count_bytes(labels)) > MOST_LABEL_BYTES:
        return f"the labels of the run would hold {size} bytes, and may hold {MOST_LABEL_BYTES // 1024} KiB"
    return None
