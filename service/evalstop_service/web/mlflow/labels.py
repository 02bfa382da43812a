"""Tags as labels of a run, and params. Pure.

A tag is stored as the label of its name, so that `gpus`, `slurm_job_id` or `evalstop.preset` can be set as tags; a
param is stored separately, so that hundreds of them leave room for labels. Tags that start with `evalstop.` (except
`evalstop.preset` and `evalstop.obeyed`) and tags that the service itself sets are ignored.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from evalstop_service.rules.labels import MOST_LABEL_BYTES, count_bytes
from evalstop_service.rules.labels import MOST_LABELS as MOST_LABELS
from evalstop_service.store.mlflow_runs import RUN_NAME as RUN_NAME
from evalstop_service.store.mlflow_runs import USER as USER

EXPERIMENT = "mlflow.experiment"
FORWARDED_RUN = "mlflow.tee_run_id"
"""The id of the run's copy on the MLflow server that requests are forwarded to."""
PRESET = "evalstop.preset"
OBEYED = "evalstop.obeyed"
"""The decision because of which the trainer ends the run."""
OWN = "evalstop."
CHECKPOINT = "evalstop.checkpoint."
"""A tag `evalstop.checkpoint.STEP` has the URI of the checkpoint of that step."""

MOST_PARAMS = 2000
MOST_PARAM_BYTES = 256 * 1024
LONGEST_NAME, LONGEST_VALUE = 256, 2000


class Item(NamedTuple):
    """A param or a tag."""

    key: str
    value: str


class MergedLabels(NamedTuple):
    """The labels or params, and how many items did not fit."""

    labels: dict[str, str]
    dropped: int


def merge_tags(labels: Mapping[str, str], tags: Iterable[Item]) -> MergedLabels:
    """The labels of a run with these tags added. A tag takes its last value."""
    return merge_items(labels, (item for item in tags if is_client_tag(clean_text(item.key))))


def merge_params(params: Mapping[str, str], new: Iterable[Item]) -> MergedLabels:
    """The params of a run with these added. A param keeps its first value."""
    unknown = (item for item in new if clean_text(item.key) not in params)
    return merge_items(params, unknown, MOST_PARAMS, MOST_PARAM_BYTES)


def merge_items(
    current: Mapping[str, str], new: Iterable[Item], most: int = MOST_LABELS, most_bytes: int = MOST_LABEL_BYTES
) -> MergedLabels:
    """Add items, up to limits on their number, the length of each and the total size."""
    merged, dropped, size = dict(current), 0, count_bytes(current)
    for key, value in new:
        name, text = clean_text(key), clean_text(value)[:LONGEST_VALUE]
        before = count_bytes({name: merged[name]}) if name in merged else 0
        after = size - before + count_bytes({name: text})
        fits = name in merged or len(merged) < most
        if name and len(name) <= LONGEST_NAME and fits and (after <= most_bytes or after <= size):
            merged[name], size = text, after
        else:
            dropped += 1
    return MergedLabels(merged, dropped)


def is_client_tag(name: str) -> bool:
    """Whether clients may set and delete the tag of this name."""
    return name in (PRESET, OBEYED) or not (name in ("", EXPERIMENT, FORWARDED_RUN) or name.startswith(OWN))


def clean_text(text: str) -> str:
    """The text without control characters and lone surrogates, which cannot be stored."""
    if text.isprintable():
        return text
    return "".join(
        character for character in text if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cs")
    )
