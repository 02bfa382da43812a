"""The exceptions of the client, as one tree; the docstring of an exception is its message.

EvalStopError
├── ConfigurationError
├── SignatureError
├── EventMalformed
├── ApiError
│   ├── ServiceAway
│   ├── KeyRefused
│   ├── NotFound
│   └── ConfirmationNeeded
├── SchedulerUnavailable
└── RequestRefused
"""

from __future__ import annotations

import inspect


class EvalStopError(Exception):
    """The EvalStop client cannot go on."""

    def __init__(self, detail: str = "") -> None:
        super().__init__(detail)
        self.detail = detail

    def __str__(self) -> str:
        message = inspect.cleandoc(type(self).__doc__ or type(self).__name__)
        return f"{message.removesuffix('.')}: {self.detail}" if self.detail else message


class ConfigurationError(EvalStopError):
    """A setting or an argument is not valid."""


class SignatureError(EvalStopError):
    """The webhook is not proven to come from EvalStop."""


class EventMalformed(EvalStopError):
    """The webhook is signed by EvalStop but does not have the shape of an event."""


class ApiError(EvalStopError):
    """The service did not do what it was asked."""


class ServiceAway(ApiError):
    """The service cannot be reached or cannot answer now."""


class KeyRefused(ApiError):
    """The service does not accept the key for this."""


class NotFound(ApiError):
    """Not found in the project of the key."""


class ConfirmationNeeded(ApiError):
    """Nothing is done yet: another person has to confirm it."""


class SchedulerUnavailable(EvalStopError):
    """The scheduler cannot be reached or cannot answer now."""


class RequestRefused(EvalStopError):
    """This receiver will not carry out the request."""
