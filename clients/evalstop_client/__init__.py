"""Report a training run to EvalStop, and obey its stop decisions beside a scheduler."""

from evalstop_client.errors import ApiError, ConfigurationError, EvalStopError, EventMalformed, SignatureError
from evalstop_client.eval_request import EvalRequest, Summary
from evalstop_client.latest_answer import Decision, Exploit, Verdict
from evalstop_client.metric_roles import MetricRole
from evalstop_client.run import Run
from evalstop_client.settings import Limits
from evalstop_client.version import __version__

__all__ = [
    "ApiError",
    "ConfigurationError",
    "Decision",
    "EvalRequest",
    "EvalStopError",
    "EventMalformed",
    "Exploit",
    "Limits",
    "MetricRole",
    "Run",
    "SignatureError",
    "Summary",
    "Verdict",
    "__version__",
]
