"""The errors of this package.

DetectorError
├── InvalidPolicy
├── InvalidRule
├── StaleState
└── OutOfOrder
"""

from __future__ import annotations


class DetectorError(Exception):
    """The base of all errors of evalstop_detectors."""

    def __init__(self, detail: str = "") -> None:
        super().__init__(detail or (self.__doc__ or "").strip())


class InvalidPolicy(DetectorError):
    """The policy is not valid; the message names the key and its valid values."""


class InvalidRule(DetectorError):
    """The rule of a group is not valid; the message names the key and its valid values."""


class StaleState(DetectorError):
    """The stored state belongs to another policy or format; rebuild it by replaying the observations."""


class OutOfOrder(DetectorError):
    """An observation belongs before one that the monitor has already seen; replay the run in step order."""
