"""What can go wrong in this package, for whoever asked for it.

ServiceError
├── NotFound
├── Conflict
├── Invalid
├── InvalidSetting
├── TooOften
├── QuotaReached
├── Overloaded
├── Behind
└── Closed
"""

from __future__ import annotations


class ServiceError(Exception):
    """The base of all errors of evalstop_service."""

    def __init__(self, detail: str = "") -> None:
        super().__init__(detail or (self.__doc__ or "").strip())


class NotFound(ServiceError):
    """There is no such thing in this project."""


class Conflict(ServiceError):
    """What was asked for contradicts what is on record; the message names both."""


class Invalid(ServiceError):
    """What was sent cannot be used; the message names the field and what it may hold."""


class InvalidSetting(ServiceError):
    """A setting cannot be used; the message names it."""


class TooOften(ServiceError):
    """This was asked for too often. Nothing was done: ask again after `seconds`."""

    def __init__(self, detail: str, seconds: float) -> None:
        super().__init__(detail)
        self.seconds = seconds


class QuotaReached(ServiceError):
    """The project has all that it may have of this. Nothing was done: ask again after `seconds`, unless None."""

    def __init__(self, quota: str, most: int, seconds: float | None = None) -> None:
        super().__init__(
            f"the project has reached its quota of {most} for {quota}; whoever runs the installation can raise it"
        )
        self.quota, self.seconds = quota, seconds


class Overloaded(ServiceError):
    """More waits to be stored than may wait. Nothing of this was stored: send the same again in a second."""


class Behind(ServiceError):
    """A later release stored this run's policy, which this one cannot read. Nothing was stored: send it again later."""


class Closed(ServiceError):
    """The service is going down. Nothing of this was stored: send the same again."""
