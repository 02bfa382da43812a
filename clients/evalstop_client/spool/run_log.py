"""What a trainer's log says of its run: how it is watched, what is decided of it, and what nobody watches."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from typing import Any

from evalstop_client.latest_answer import LatestAnswer
from evalstop_client.spool.warnings import WarningLog

logger = logging.getLogger("evalstop_client")

DEFAULT_ROLES = {"eval", "proxy", "kl", "loss"}
"""The roles of a run whose trainer declares none; each metric is called as its role."""

ANSWERS_WITHOUT_EVAL = 20
"""After so many answers without an eval it may be among what nobody watches; before, it is seldom due."""


def describe_opening(body: Mapping[str, Any], latest: LatestAnswer, warnings: WarningLog) -> None:
    """Say once how a run that was opened is watched, and what it was not given of what it asked for."""
    logger.info("evalstop: %s: %s, policy %s, %s", latest.name, latest.mode, latest.policy, latest.url)
    limits = body.get("limits")
    for limit in limits if isinstance(limits, list) else []:
        if isinstance(limit, Mapping):
            warnings.warn_once(
                f"limit {limit.get('field')}",
                "%s %s was asked for, and the project allows %s: a key with the scope admin changes its %s",
                *map(limit.get, ("field", "asked", "given", "setting")),
            )


def describe_change(before: LatestAnswer, after: LatestAnswer) -> None:
    """Say when a decision is made, and when it comes to another state."""
    decision = after.decision
    if decision is not None and (before.decision is None or before.decision.state != decision.state):
        logger.info("evalstop: %s: the stop is %s: %s; %s", after.name, decision.state, decision.reason, after.url)


def warn_of_metrics(latest: LatestAnswer, warnings: WarningLog, *, declared: bool) -> None:
    """Warn of metrics that stop nothing: roles that were guessed, names that look mistyped, no role for any of them."""
    if guessed := latest.guessed:
        names = ", ".join(guessed)
        warnings.warn_once(
            f"guessed {names}",
            "role and direction of %s guessed: confirm on the run's page, or by Run(metrics=...), to let it stop",
            names,
        )
    for name in latest.unwatched if latest.missing else ():
        for metric in difflib.get_close_matches(name, latest.missing, n=1):
            warnings.warn_once(
                f"mistyped {name}",
                "%r is not declared; %r (%s) has no value yet. Did you mean %r?",
                name,
                metric,
                latest.missing[metric],
                metric,
            )
    if latest.unwatched and not declared and set(latest.missing) == DEFAULT_ROLES:
        warnings.warn_once(
            "nothing watched",
            "none of %s is watched: say what they mean by Run(metrics=...), or leave it to the service by "
            'metrics="auto"',
            ", ".join(latest.unwatched),
        )
    if latest.unwatched and not latest.missing:
        warnings.warn_late(
            ANSWERS_WITHOUT_EVAL,
            "no eval recognized",
            "no eval has come yet, without which nothing is stopped: none of %s is known as one; if one of them is, "
            "name it by evalstop.init(eval=...)",
            ", ".join(latest.unwatched),
        )


def warn_without_eval(body: Mapping[str, Any], warnings: WarningLog) -> None:
    """Warn that a run ended without an eval: nothing could be decided of it."""
    if "raw_maximum" in body and body["raw_maximum"] is None:
        warnings.warn_once("no eval", "the run ended without a value of its eval: nothing could be decided of it")
