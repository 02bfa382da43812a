"""EvalStop: `evalstop.init(...)` in a trainer, `evalstop.Api()` to read what became of its runs."""

from evalstop_client import (
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

__all__ = [
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
