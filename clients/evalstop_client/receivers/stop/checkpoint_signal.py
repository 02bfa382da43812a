"""The signal that makes a job save a checkpoint and run on, as the job's own label or the receiver's option names it.

A program that does not expect the signal dies of it, unsaved: so nothing is sent unless somebody asked for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evalstop_client.errors import ConfigurationError, RequestRefused

LABEL = "checkpoint_signal"
NAMES = ("USR1", "USR2", "HUP")
WHERE = ("batch", "steps", "full")


@dataclass(frozen=True)
class CheckpointSignal:
    """`where` matters to Slurm: the batch script alone, the steps that srun started alone, or both."""

    name: str
    where: str = "batch"

    def __str__(self) -> str:
        return f"{self.name}@{self.where}"


def checkpoint_signal(text: str) -> CheckpointSignal:
    """From `USR1` or `USR1@steps`; ConfigurationError when it is neither."""
    name, _, where = text.removeprefix("SIG").partition("@")
    if name not in NAMES or (where or "batch") not in WHERE:
        raise ConfigurationError(
            f"checkpoint signal {text!r}: one of {', '.join(NAMES)}, and behind an @ one of {', '.join(WHERE)}."
        )
    return CheckpointSignal(name, where or "batch")


def choose_signal(labels: Mapping[str, str], default: CheckpointSignal | None) -> CheckpointSignal | None:
    """What the run's label asks for, else the receiver's default; `none` as a label asks for no signal."""
    text = labels.get(LABEL, "")
    if not text:
        return default
    if text == "none":
        return None
    try:
        return checkpoint_signal(text)
    except ConfigurationError as error:
        raise RequestRefused(f"label {error.detail}") from None
