"""Params and tags as labels of a run, and back. Pure.

A tag is stored as the label of its name, so that `gpus`, `slurm_job_id` or `evalstop.preset` can be set as tags; a
param as the label `params.NAME`. Tags that start with `evalstop.` (except `evalstop.preset`), tags that look like a
param, and tags that the service itself sets are ignored.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from typing import NamedTuple

EXPERIMENT = "mlflow.experiment"
RUN_NAME = "mlflow.runName"
USER = "mlflow.user"
LIFECYCLE = "mlflow.lifecycleStage"
FORWARDED_RUN = "mlflow.tee_run_id"
"""The id of the run's copy on the MLflow server that requests are forwarded to."""
PRESET = "evalstop.preset"
OWN = "evalstop."
PARAM = "params."

MOST_LABELS = 500
LONGEST_NAME, LONGEST_VALUE = 256, 2000


class Item(NamedTuple):
    """A param or a tag."""

    key: str
    value: str


class MergedLabels(NamedTuple):
    """The labels, and how many items did not fit."""

    labels: dict[str, str]
    dropped: int


def merge_labels(labels: Mapping[str, str], params: Iterable[Item] = (), tags: Iterable[Item] = ()) -> MergedLabels:
    """The labels with these params and tags added. A param keeps its first value, a tag takes its last."""
    new = {name: clean_text(value)[:LONGEST_VALUE] for key, value in tags if is_client_tag(name := clean_text(key))}
    for key, value in params:
        name = PARAM + clean_text(key)
        new[name] = labels.get(name, new.get(name, clean_text(value)[:LONGEST_VALUE]))
    merged, dropped = dict(labels), 0
    for name, value in new.items():
        if len(name) <= LONGEST_NAME and (name in merged or len(merged) < MOST_LABELS):
            merged[name] = value
        else:
            dropped += 1
    return MergedLabels(merged, dropped)


def is_client_tag(name: str) -> bool:
    """Whether clients may set and delete the tag of this name."""
    if name in ("", EXPERIMENT, LIFECYCLE, FORWARDED_RUN) or name.startswith(PARAM):
        return False
    return name == PRESET or not name.startswith(OWN)


def read_params(labels: Mapping[str, str]) -> list[Item]:
    """The params among a run's labels."""
    return [Item(name.removeprefix(PARAM), value) for name, value in labels.items() if name.startswith(PARAM)]


def read_tags(labels: Mapping[str, str]) -> list[Item]:
    """The tags among a run's labels."""
    return [Item(name, value) for name, value in labels.items() if not name.startswith(PARAM)]


def clean_text(text: str) -> str:
    """The text without control characters and lone surrogates, which cannot be stored."""
    if text.isprintable():
        return text
    return "".join(
        character for character in text if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cs")
    )
