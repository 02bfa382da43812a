"""The exceptions of the lab; the docstring of an exception is its message.

LabError
├── ServiceUnavailable
├── UnreadableInput
└── UnusableArguments
"""

from __future__ import annotations

import inspect
from pathlib import Path


class LabError(Exception):
    """The command failed."""

    def __init__(self, detail: str = "") -> None:
        super().__init__(detail)
        self.detail = detail

    def __str__(self) -> str:
        message = inspect.cleandoc(type(self).__doc__ or type(self).__name__)
        return f"{message} {self.detail}" if self.detail else message


class UnusableArguments(LabError):
    """The arguments are not valid."""


class UnreadableInput(LabError):
    """The log of a run cannot be read."""

    def __init__(self, path: Path | str, problem: str, line: int | None = None) -> None:
        self.problem = problem
        super().__init__(f"{path}{'' if line is None else f', line {line}'}: {problem}.")


class ServiceUnavailable(LabError):
    """The EvalStop service could not be started."""
