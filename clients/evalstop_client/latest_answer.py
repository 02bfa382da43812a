"""The service's latest answer about a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evalstop_client.service import Json

ENDED = ("completed", "failed", "stopped")
"""Statuses of a run that continues only if it is resumed; a lost run continues when it reports again."""


@dataclass(frozen=True)
class Verdict:
    """The service's verdict on a run: `continue`, `suspect` or `stop`, with its reason and the numbers behind it."""

    verdict: str
    step: int | None
    turn_step: int | None
    reason: str
    evidence: Sequence[Mapping[str, Any]] = field(repr=False)

    def __str__(self) -> str:
        return self.verdict

    @classmethod
    def from_json(cls, fields: Json) -> Verdict:
        return cls(*(fields[name] for name in ("verdict", "step", "turn_step", "reason", "evidence")))


@dataclass(frozen=True)
class Decision:
    """The service's decision to stop a run: its state, the reason, and the guards that put it on hold."""

    id: str
    state: str
    reason: str
    guards: tuple[str, ...]

    def __str__(self) -> str:
        return self.state


EXPLOIT_DECISION = "EVALSTOP_EXPLOIT_DECISION"
"""The variable with the id of the decision for which a receiver has started a trainer again."""


@dataclass(frozen=True)
class Exploit:
    """The rule of the run's group has the run continue from the checkpoint of another one, with these hyperparameters.

    Load `source_checkpoint`, set `hyperparameters`, call `confirm()`, and go on with the step after `source_step`.
    """

    decision_id: str
    source_run: str
    source_name: str
    source_step: int
    source_checkpoint: str
    hyperparameters: Mapping[str, float | str]
    _confirm: Callable[[str], object] = field(repr=False, compare=False)

    def confirm(self) -> None:
        """Report that the checkpoint is loaded: what is logged from now on belongs to the copy. Does not wait."""
        self._confirm(self.decision_id)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], confirm: Callable[[str], object]) -> Exploit | None:
        """Parse the request from the service's JSON; None if it is malformed."""
        try:
            step, values = int(fields["source_step"]), dict(fields["hyperparameters"])
            decision_id, run, name = (str(fields[key]) for key in ("decision_id", "source_run", "source_name"))
            return cls(decision_id, run, name, step, str(fields["source_checkpoint"]), values, confirm)
        except (KeyError, TypeError, ValueError):
            return None


def describe_run(latest: Json, verdict: object, decision: object) -> str:
    """The run as one line; fields that are missing, as before the service's first answer, are left out.

    >>> fields = {"name": "ppo-7b", "mode": "shadow", "policy": {"name": "default", "version": 1}, "url": "http://a/b"}
    >>> describe_run(fields, None, None)
    'ppo-7b: shadow, policy default@1, http://a/b'
    """
    named = {"policy": name_policy(latest), "verdict": verdict, "decision": decision}
    facts = [latest.get("mode"), *(f"{fact} {value}" for fact, value in named.items() if value), latest.get("url")]
    return f"{latest['name']}: {', '.join(filter(None, facts)) or 'no answer yet'}"


def name_policy(latest: Json) -> str | None:
    """The policy that judges a run, as NAME@VERSION; None until the service has answered."""
    policy = latest.get("policy")
    return f"{policy['name']}@{policy['version']}" if policy else None


def find_verdict(latest: Json) -> Verdict | None:
    """The verdict in the service's answers about a run; None until it has answered."""
    fields = latest.get("verdict")
    return Verdict.from_json(fields) if fields else None


def find_decision(latest: Json) -> Decision | None:
    """The decision in the service's answers about a run; None without one."""
    if not (fields := latest.get("decision")):
        return None
    return Decision(fields["id"], fields["state"], fields["state_reason"], tuple(fields["guard_kinds"]))
