"""The service's latest answer about a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

ENDED = ("completed", "failed", "stopped")
"""Statuses of a run that continues only if it is resumed; a lost run continues when it reports again."""


@dataclass(frozen=True)
class Verdict:
    """The service's verdict on a run: `continue`, `suspect` or `stop`, with its reason and the numbers behind it."""

    verdict: str
    step: int | None
    turn_step: int | None
    reason: str
    evidence: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return self.verdict

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Verdict:
        """Parse the verdict from the service's JSON; unknown fields of a newer service are ignored."""
        evidence = fields.get("evidence")
        return cls(
            verdict=str(fields.get("verdict", "continue")),
            step=fields.get("step"),
            turn_step=fields.get("turn_step"),
            reason=str(fields.get("reason") or ""),
            evidence=tuple(evidence) if isinstance(evidence, list) else (),
        )


@dataclass(frozen=True)
class Decision:
    """The service's decision to stop a run: its state, the reason, and the guards that put it on hold."""

    id: str
    state: str
    reason: str
    guards: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.state

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Decision:
        guards = fields.get("guard_kinds")
        return cls(
            id=str(fields.get("id", "")),
            state=str(fields.get("state", "")),
            reason=str(fields.get("state_reason") or ""),
            guards=tuple(map(str, guards)) if isinstance(guards, list) else (),
        )


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


def find_eval(metrics: Mapping[str, Any]) -> str | None:
    """The metric with the role eval; of several the mean that the service computes."""
    evals = [name for name, role in metrics.items() if role.get("role") == "eval"]
    return "evalstop/score" if len(evals) > 1 else next(iter(evals), None)


def describe_run(
    name: str, mode: str | None, policy: str | None, verdict: Verdict | None, decision: object, url: str | None
) -> str:
    """The run as one line; fields that are None, as before the service's first answer, are left out.

    >>> describe_run("ppo-7b", "shadow", "default@1", None, None, "http://localhost:8787/runs/1")
    'ppo-7b: shadow, policy default@1, http://localhost:8787/runs/1'
    """
    named = {"policy": policy, "verdict": verdict, "decision": decision}
    facts = [mode, *(f"{fact} {value}" for fact, value in named.items() if value is not None), url]
    return f"{name}: {', '.join(filter(None, facts)) or 'no answer yet'}"


_COPIED = {"name": str, "status": str, "url": str, "mode": str, "should_stop": bool, "length_known": bool}
"""Fields of an answer that are taken as they are, if they have this type."""


@dataclass(frozen=True)
class LatestAnswer:
    """A run as reported by the service; before the first answer `should_stop` is False.

    `name`: its name at the service, which differs from the requested one if that was taken. `guessed`: the metrics
    whose role or direction the service guessed from their names, so that they cannot stop the run. `missing`: the roles
    of watched metrics without a value; `unwatched`: metrics without a role, listed while any is missing or none is the
    eval. `eval_request`: the open request for a paired evaluation. `exploit`: the copy to make. `policy`: as
    NAME@VERSION. `length_known`: whether the service knows the planned length of the run.
    """

    run_id: str | None = None
    name: str | None = None
    url: str | None = None
    status: str | None = None
    should_stop: bool = False
    verdict: Verdict | None = None
    decision: Decision | None = None
    best_checkpoint: Mapping[str, Any] | None = None
    guessed: tuple[str, ...] = ()
    length_known: bool | None = None
    eval_request: Mapping[str, Any] | None = None
    exploit: Mapping[str, Any] | None = None
    mode: str | None = None
    policy: str | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
    unwatched: tuple[str, ...] = ()

    def after(self, answer: Mapping[str, Any]) -> LatestAnswer:
        """Update with the fields of `answer`; fields that it omits keep their values."""
        changes: dict[str, Any] = {
            name: answer[name] for name, kind in _COPIED.items() if isinstance(answer.get(name), kind)
        }
        if isinstance(answer.get("id"), str):
            changes["run_id"] = answer["id"]
        if isinstance(policy := answer.get("policy"), Mapping):
            changes["policy"] = f"{policy.get('name')}@{policy.get('version')}"
        if isinstance(answer.get("verdict"), Mapping):
            changes["verdict"] = Verdict.from_json(answer["verdict"])
        if "decision" in answer:
            decision = answer["decision"]
            changes["decision"] = Decision.from_json(decision) if isinstance(decision, Mapping) else None
        if isinstance(answer.get("missing"), Mapping):
            changes["missing"] = {str(metric): str(role) for metric, role in answer["missing"].items()}
        for request in ("eval_request", "exploit"):
            if request in answer:
                changes[request] = answer[request] if isinstance(answer[request], Mapping) else None
        if "best_checkpoint" in answer:
            changes["best_checkpoint"] = answer["best_checkpoint"]
        for names in ("guessed", "unwatched"):
            if isinstance(answer.get(names), list):
                changes[names] = tuple(map(str, answer[names]))
        return replace(self, **changes)
