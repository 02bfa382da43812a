"""The service's latest answer about a run."""

from __future__ import annotations

from collections.abc import Mapping
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
    eval. `eval_request`: the open request for a paired evaluation. `policy`: as NAME@VERSION.
    `length_known`: whether the service knows the planned length of the run.
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
        if "eval_request" in answer:
            request = answer["eval_request"]
            changes["eval_request"] = request if isinstance(request, Mapping) else None
        if "best_checkpoint" in answer:
            changes["best_checkpoint"] = answer["best_checkpoint"]
        for names in ("guessed", "unwatched"):
            if isinstance(answer.get(names), list):
                changes[names] = tuple(map(str, answer[names]))
        return replace(self, **changes)
