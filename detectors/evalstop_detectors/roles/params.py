"""What the params, tags and labels of a trainer tell: its planned number of steps, and the metric that counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Direction = Literal["maximize", "minimize"]

EVAL_TAG = "evalstop.eval"
"""The metric by which the trainer chooses its best checkpoint, as `eval_wer` or `eval_wer:minimize`."""

BEST_METRIC, GREATER_IS_BETTER = "metric_for_best_model", "greater_is_better"
"""Params of transformers."""


def find_declared_eval(texts: Mapping[str, str]) -> tuple[str, Direction | None]:
    """The metric that the trainer declared as the eval in these tags or params, and its direction; "" without one.

    >>> find_declared_eval({"evalstop.eval": "val_loss:minimize"}), find_declared_eval({"metric_for_best_model": "wer"})
    (('val_loss', 'minimize'), ('eval_wer', None))
    """
    if tag := texts.get(EVAL_TAG, ""):
        metric, _, direction = tag.rpartition(":")
        if metric and direction in ("maximize", "minimize"):
            return metric, "minimize" if direction == "minimize" else "maximize"
        return tag, None
    metric = texts.get(BEST_METRIC, "")
    if metric in ("", "None"):
        return "", None
    greater = texts.get(GREATER_IS_BETTER, "").lower()
    better: Direction | None = "maximize" if greater == "true" else "minimize" if greater == "false" else None
    return metric if metric.startswith("eval_") else f"eval_{metric}", better


LENGTH_NAMES = (
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
    return next((steps for name in LENGTH_NAMES if (steps := _read_steps(texts.get(name, "")))), None)


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
