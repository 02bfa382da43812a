"""The errors of this package that callers may see.

ServiceError
├── NotFound
├── Conflict
├── OtherProject
├── Invalid
├── TooOften
├── QuotaReached
└── Overloaded
"""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


class ServiceError(Exception):
    """The base of all errors of evalstop_service."""

    def __init__(self, detail: str = "") -> None:
        super().__init__(detail or (self.__doc__ or "").strip())


class NotFound(ServiceError):
    """The project has no such object."""


def require(found: T | None, description: str) -> T:
    """What was found; raises NotFound, saying that there is no `description`, if nothing was."""
    if found is None:
        raise NotFound(f"there is no {description}")
    return found


class Conflict(ServiceError):
    """The request contradicts stored data; the message names both."""


class OtherProject(ServiceError):
    """The data was recorded with a key of another project. Nothing was stored: send it with a key of that project."""


class Invalid(ServiceError):
    """The request is invalid; the message names the field and its valid values.

    `field`: the field of a form that is wrong, if it is one; `fault`: what is wrong with it.
    """

    def __init__(self, detail: str = "", field: str | None = None, fault: str = "") -> None:
        super().__init__(detail)
        self.field, self.fault = field, fault


class TooOften(ServiceError):
    """Too many requests of this kind. Nothing was done: retry after `seconds`."""

    def __init__(self, detail: str, seconds: float) -> None:
        super().__init__(detail)
        self.seconds = seconds


class QuotaReached(ServiceError):
    """A quota of the project is used up. Nothing was done: retry after `seconds`, unless None."""

    def __init__(self, quota: str, most: int, seconds: float | None = None) -> None:
        super().__init__(
            f"the project has reached its quota of {most} for {quota}; an operator of the installation can raise it"
        )
        self.quota, self.seconds = quota, seconds


class Overloaded(ServiceError):
    """Too much waits to be stored, or the service shuts down. Nothing was stored: send this again in a second."""
