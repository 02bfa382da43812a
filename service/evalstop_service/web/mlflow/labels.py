"""Params and tags as labels of a run, and back. Pure.

A tag is the label of its name, so that `gpus`, `slurm_job_id` or `evalstop.preset` may be set as tags; a param is the
label `params.NAME`. What begins with `evalstop.` is the service's to say, and what a client sets there is passed over,
except for `evalstop.preset`; so are tags that would be taken for a param, or for what the service keeps of a run.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from typing import NamedTuple

EXPERIMENT = "mlflow.experiment"
RUN_NAME = "mlflow.runName"
USER = "mlflow.user"
LIFECYCLE = "mlflow.lifecycleStage"
TWIN = "mlflow.tee_run_id"
"""Which run at the MLflow server behind this one is the twin of the run."""
PRESET = "evalstop.preset"
OWN = "evalstop."
PARAM = "params."

MOST_LABELS = 500
LONGEST_NAME, LONGEST_VALUE = 256, 2000


class Item(NamedTuple):
    """A param or a tag."""

    key: str
    value: str


class Labelled(NamedTuple):
    """The labels, and how many items were left out for want of room."""

    labels: dict[str, str]
    left_out: int


def labelled(labels: Mapping[str, str], params: Iterable[Item] = (), tags: Iterable[Item] = ()) -> Labelled:
    """The labels with these params and tags. A param keeps its first value, a tag takes its last."""
    new = {name: clean(value)[:LONGEST_VALUE] for key, value in tags if is_for_clients(name := clean(key))}
    for key, value in params:
        name = PARAM + clean(key)
        new[name] = labels.get(name, new.get(name, clean(value)[:LONGEST_VALUE]))
    found, left_out = dict(labels), 0
    for name, value in new.items():
        if len(name) <= LONGEST_NAME and (name in found or len(found) < MOST_LABELS):
            found[name] = value
        else:
            left_out += 1
    return Labelled(found, left_out)


def is_for_clients(name: str) -> bool:
    """Whether a client may set, and delete, the tag of this name."""
    if name in ("", EXPERIMENT, LIFECYCLE, TWIN) or name.startswith(PARAM):
        return False
    return name == PRESET or not name.startswith(OWN)


def params_of(labels: Mapping[str, str]) -> list[Item]:
    """The params among a run's labels."""
    return [Item(name.removeprefix(PARAM), value) for name, value in labels.items() if name.startswith(PARAM)]


def tags_of(labels: Mapping[str, str]) -> list[Item]:
    """The tags among a run's labels."""
    return [Item(name, value) for name, value in labels.items() if not name.startswith(PARAM)]


def clean(text: str) -> str:
    """The text without what cannot be shown or stored: control characters, and halves of surrogate pairs."""
    if text.isprintable():
        return text
    return "".join(
        character for character in text if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cs")
    )
