"""The signal that makes a job save a checkpoint and continue, from the job's label or the receiver's option.

A program that does not handle the signal dies without saving: so none is sent unless it is configured.
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
    """`where`, for Slurm: only the batch script, only the steps that srun started, or both."""

    name: str
    where: str = "batch"

    def __str__(self) -> str:
        return f"{self.name}@{self.where}"


def parse_checkpoint_signal(text: str) -> CheckpointSignal:
    """Parse `USR1` or `USR1@steps`; raises ConfigurationError."""
    name, _, where = text.removeprefix("SIG").partition("@")
    if name not in NAMES or (where or "batch") not in WHERE:
        raise ConfigurationError(
            f"checkpoint signal {text!r}: one of {', '.join(NAMES)}, optionally with @ and one of {', '.join(WHERE)}."
        )
    return CheckpointSignal(name, where or "batch")


def choose_signal(labels: Mapping[str, str], default: CheckpointSignal | None) -> CheckpointSignal | None:
    """The signal of the run's label, else the receiver's default; the label `none` means no signal."""
    text = labels.get(LABEL, "")
    if not text:
        return default
    if text == "none":
        return None
    try:
        return parse_checkpoint_signal(text)
    except ConfigurationError as error:
        raise RequestRefused(f"label {error.detail}") from None
