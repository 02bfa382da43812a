"""The planned number of steps of a run, from the labels, tags and params that trainers write. Pure."""

from __future__ import annotations

from collections.abc import Mapping

NAMES = (
    *("total_steps", "evalstop.total_steps", "max_steps"),
    *("trainer/total_training_steps", "trainer/max_steps", "trainer.max_steps"),
)
"""Names of the planned length; the first that is a positive whole number counts: EvalStop's, and the tag that it adds
to runs of MLflow, transformers', verl's, NeMo's."""

EPOCHS, EPOCH = "num_train_epochs", "epoch"
"""The param of transformers, and the metric that it logs with all others."""

MOST_STEPS = 2**53 - 1
SOONEST_EPOCH = 0.1
"""Some trainers round epochs to two decimals: from here on the length is accurate to 5 %."""


def find_total_steps(texts: Mapping[str, str]) -> int | None:
    """The planned length in these labels or params; None if there is none.

    >>> find_total_steps({"max_steps": "-1", "total_steps": "5000"})
    5000
    """
    return next((steps for name in NAMES if (steps := _read_steps(texts.get(name, "")))), None)


def derive_total_steps(params: Mapping[str, str], epoch: float, step: int) -> int | None:
    """The planned length of a run that is at this step in this epoch; None if the params have no number of epochs.

    >>> derive_total_steps({"num_train_epochs": "3"}, epoch=0.5, step=100)
    600
    """
    try:
        epochs = float(params.get(EPOCHS, ""))
    except ValueError:
        return None
    steps = epochs * step / epoch if epoch >= SOONEST_EPOCH and 0 < epochs < MOST_STEPS else 0.0
    return round(steps) if 1 <= steps <= MOST_STEPS else None


def _read_steps(text: str) -> int | None:
    digits = text.strip().removesuffix(".0")
    steps = int(digits) if digits.isascii() and digits.isdecimal() and len(digits) <= 16 else 0
    return steps if 1 <= steps <= MOST_STEPS else None
