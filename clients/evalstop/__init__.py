"""EvalStop: `evalstop.init(...)` in a trainer, `evalstop.Api()` to read what became of its runs."""

from typing import TYPE_CHECKING

from evalstop_client import (
    ApiError,
    ConfigurationError,
    Decision,
    EvalRequest,
    EvalStopError,
    Limits,
    MetricRole,
    Run,
    Summary,
    Verdict,
    __version__,
)
from evalstop_client.opening import init

if TYPE_CHECKING:
    from evalstop_client.reading.api import Api

__all__ = [
    "Api",
    "ApiError",
    "ConfigurationError",
    "Decision",
    "EvalRequest",
    "EvalStopError",
    "Limits",
    "MetricRole",
    "Run",
    "Summary",
    "Verdict",
    "__version__",
    "init",
]


def __getattr__(name: str) -> object:
    """`Api`, imported when it is asked for: a trainer's start does not wait for what it does not read."""
    if name == "Api":
        from evalstop_client.reading.api import Api

        return Api
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
