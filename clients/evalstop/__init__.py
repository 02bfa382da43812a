"""EvalStop: `evalstop.init(...)` in a trainer, `evalstop.Api()` to read what became of its runs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Unpack

import evalstop_client
from evalstop_client import *  # noqa: F403  # what a trainer needs is declared there
from evalstop_client import ConfigurationError, MetricRole, Run
from evalstop_client.metric_roles import AUTO, Metrics, Role
from evalstop_client.settings import RunArguments

if TYPE_CHECKING:
    from evalstop_client.reading.api import Api

__all__ = [*evalstop_client.__all__, "Api", "init"]


def __getattr__(name: str) -> object:
    """`Api`, imported when it is asked for: a trainer's start does not wait for what it does not read."""
    if name == "Api":
        from evalstop_client.reading.api import Api

        return Api
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)


ANSWER_SECONDS = 3.0
"""How long to wait for the service before the line is printed."""


def init(
    name: str | None = None,
    *,
    eval: str | None = None,  # noqa: A002  the word of those who call it
    proxy: str | None = None,
    kl: str | None = None,
    loss: str | None = None,
    **arguments: Unpack[RunArguments],
) -> Run:
    """Open a run and print a line with its mode, its policy and its page.

        run = evalstop.init("ppo-7b", eval="eval/gsm8k", proxy="reward", kl="kl", total_steps=10_000, config=cfg)

    `eval`, `proxy`, `kl` and `loss` are names of metrics. KL, losses and errors such as `failure_rate` are
    minimized, others maximized; use `metrics=` instead of the four to declare it differently. Without either the
    service recognizes the roles by the metrics' names. All other arguments are those of `Run`; raises
    ConfigurationError.
    """
    if arguments.get("metrics") is None:
        arguments["metrics"] = _declare_roles({"eval": eval, "proxy": proxy, "kl": kl, "loss": loss})
    elif any((eval, proxy, kl, loss)):
        raise ConfigurationError("metrics: give either eval, proxy, kl and loss, or metrics.")
    run = Run(name, **arguments)
    if run.is_reported:
        run.flush(ANSWER_SECONDS)
        with contextlib.suppress(OSError, ValueError):  # the terminal is closed, or has no letters for the name
            print(f"evalstop: {run.description}", flush=True)
    return run


def _declare_roles(names: dict[Role, str | None]) -> Metrics:
    declared = [(role, name) for role, name in names.items() if name is not None]
    metrics: dict[str, MetricRole] = {}
    for role, name in declared:
        if name in metrics:
            raise ConfigurationError(f"{role} {name!r}: a metric has only one role.")
        metrics[name] = {"role": role}
    return metrics or AUTO
