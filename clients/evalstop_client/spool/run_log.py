"""Log messages for the trainer: how its run is watched, decisions, unwatched metrics, and each kind of problem once."""

from __future__ import annotations

import difflib
import logging
import threading
from collections import Counter

from evalstop_client.latest_answer import find_decision, name_policy
from evalstop_client.service import Json

logger = logging.getLogger("evalstop_client")


class WarningLog:
    """The problems that one run has already logged."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler that logs may interrupt its holder
        self._logged: set[str] = set()
        self._due: Counter[str] = Counter()
        self._dropped = 0

    @property
    def dropped(self) -> int:
        """How many observations, checkpoints and other calls were lost."""
        return self._dropped

    def warn_once(self, kind: str, message: str, *args: object, level: int = logging.WARNING) -> None:
        """Log a warning, unless one of this kind was logged before; an ERROR says that the run is not watched."""
        with self._lock:
            if kind in self._logged:
                return
            self._logged.add(kind)
        logger.log(level, "evalstop: " + message, *args)

    def warn_late(self, times: int, kind: str, message: str, *args: object) -> None:
        """Log a warning once, when it is due for the so-manyth time."""
        with self._lock:
            self._due[kind] += 1
        if self._due[kind] >= times:
            self.warn_once(kind, message, *args)

    def count_dropped(self, kind: str, count: int, message: str, *args: object) -> None:
        """Count `count` items as lost, and warn once for each kind."""
        with self._lock:
            self._dropped += count
        self.warn_once(kind, message + " (logged once; run.dropped counts them)", *args)

    def reset(self, kind: str) -> None:
        """Allow another warning of this kind, since the problem has passed."""
        with self._lock:
            self._logged.discard(kind)

    def after_fork_in_child(self) -> None:
        """Replace the lock, which a thread of the parent may have held."""
        self._lock = threading.RLock()


DEFAULT_ROLES = {"eval", "proxy", "kl", "loss"}
"""The roles of a run whose trainer declares none; each metric has the name of its role."""

MISTYPED = 0.8
"""The similarity above which a name counts as a mistyped one; `train_loss`, logged first, is none of `val_loss`."""

ANSWERS_WITHOUT_EVAL = 20
"""After this many answers without an eval, the eval may be among the unwatched metrics; before, it is rarely due."""


def describe_opening(body: Json, warnings: WarningLog) -> None:
    """Log once how an opened run is watched, and which requested values it did not get."""
    logger.info("evalstop: %s: %s, policy %s, %s", body["name"], body["mode"], name_policy(body), body["url"])
    for limit in body["limits"]:
        warnings.warn_once(f"limit {limit}", "%s", limit)


def describe_change(before: Json, after: Json) -> None:
    """Log when a decision is made and when its state changes: as a warning if it ends the run or waits for somebody."""
    earlier, decision = find_decision(before), find_decision(after)
    if decision is not None and (earlier is None or earlier.state != decision.state):
        ends = bool(after.get("should_stop")) and not before.get("should_stop")
        level = logging.WARNING if ends or decision.state == "on_hold" else logging.INFO
        best = after.get("best_checkpoint") if ends else None
        told = f"; best checkpoint: {best['uri']}" if best else ""
        # At the end of a veto window the decision's reason is the window.
        why = after["verdict"]["reason"] if ends and after["verdict"]["verdict"] == "stop" else decision.reason
        text = "evalstop: %s: the stop is %s: %s; %s%s"
        logger.log(level, text, after["name"], decision.state, why, after["url"], told)

    if (exploit := after.get("exploit")) and exploit != before.get("exploit"):
        source = exploit.get("source_step"), exploit.get("source_name")
        logger.warning("evalstop: %s: is to continue from step %s of %s; %s", after["name"], *source, after["url"])


def warn_of_metrics(latest: Json, warnings: WarningLog, *, declared: bool) -> None:
    """Warn about metrics that cannot stop the run: guessed roles, names that look mistyped, no roles at all."""
    missing, unwatched = latest.get("missing") or {}, latest.get("unwatched") or []
    if guessed := latest.get("guessed"):
        names = ", ".join(guessed)
        warnings.warn_once(
            f"guessed {names}",
            "role and direction of %s guessed: confirm them on the run's page, or set Run(metrics=...), to let it stop",
            names,
        )
    for name in unwatched if missing else ():
        for metric in difflib.get_close_matches(name, missing, n=1, cutoff=MISTYPED):
            warnings.warn_once(
                f"mistyped {name}",
                "%r is not declared; %r (%s) has no value yet. Did you mean %r?",
                name,
                metric,
                missing[metric],
                metric,
            )
    if unwatched and not declared and set(missing) == DEFAULT_ROLES:
        warnings.warn_once(
            "nothing watched",
            "none of %s is watched: declare their roles with Run(metrics=...), or let the service recognize them with "
            'metrics="auto"',
            ", ".join(unwatched),
        )
    if unwatched and not missing:
        warnings.warn_late(
            ANSWERS_WITHOUT_EVAL,
            "no eval recognized",
            "no eval has come yet, without which nothing is stopped: none of %s is known as one; if one of them is, "
            'declare it, by evalstop.init(eval=NAME) or metrics={NAME: {"role": "eval"}}',
            ", ".join(unwatched),
        )


def warn_of_end(body: Json, warnings: WarningLog) -> None:
    """Warn that a run ended without an eval, or long before its plan: the service could decide nothing, or late."""
    planned, last = body.get("total_steps"), body.get("last_step")
    if not body["length_known"] and planned and last and last < planned:
        reason = "the run completed at step %d of total_steps=%d: an early end, or is the plan in another unit?"
        warnings.warn_once("short", reason, last, planned)
    if "raw_maximum" in body and body["raw_maximum"] is None:
        warnings.warn_once("no eval", "the run ended without a value of its eval: the service could decide nothing")
