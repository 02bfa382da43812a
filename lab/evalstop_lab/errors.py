"""What can go wrong in the lab, drawn as one tree; the docstring of an exception is its message.

LabError
├── CheckpointUnreadable
├── DemoFailed
├── ServiceUnavailable
├── UnreadableInput
└── UnusableArguments
    └── CannotHasten
"""

from __future__ import annotations

import inspect
from pathlib import Path


class LabError(Exception):
    """The lab cannot go on."""

    def __init__(self, detail: str = "") -> None:
        super().__init__(detail)
        self.detail = detail

    def __str__(self) -> str:
        message = inspect.cleandoc(type(self).__doc__ or type(self).__name__)
        return f"{message} {self.detail}" if self.detail else message


class CheckpointUnreadable(LabError):
    """This is no checkpoint of the example trainer; resume from a step-*.npz that `evalstop-lab train` wrote."""


class UnusableArguments(LabError):
    """The command cannot work with its arguments."""


class CannotHasten(UnusableArguments):
    """A run can only be hastened by a factor that divides the steps between two evals."""


class UnreadableInput(LabError):
    """The log of a run cannot be read."""

    def __init__(self, path: Path | str, words: str, line: int | None = None) -> None:
        place = "standard input" if path == Path("-") else str(path)
        super().__init__(f"{place}{'' if line is None else f', line {line}'}: {words}.")


class ServiceUnavailable(LabError):
    """The EvalStop service could not be started."""


class DemoFailed(LabError):
    """The demo could not be brought to its end."""
