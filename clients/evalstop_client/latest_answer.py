"""The service's latest answer about a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

ENDED = ("completed", "failed", "stopped")
"""Statuses of a run that continues only when it is resumed; a lost one does when it reports again."""


@dataclass(frozen=True)
class Verdict:
    """The service's verdict on a run: `continue`, `suspect` or `stop`, with its reason and the numbers behind it."""

    verdict: str
    step: int | None
    turn_step: int | None
    reason: str
    evidence: tuple[Mapping[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.verdict

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Verdict:
        """The verdict in the service's JSON; what a newer service adds is passed over."""
        evidence = fields.get("evidence")
        return cls(
            verdict=str(fields.get("verdict", "continue")),
            step=fields.get("step"),
            turn_step=fields.get("turn_step"),
            reason=str(fields.get("reason") or ""),
            evidence=tuple(evidence) if isinstance(evidence, list) else (),
        )


@dataclass(frozen=True)
class LatestAnswer:
    """A run as the service sees it; before the first answer `should_stop` is False.

    `name`: what the service calls it, which is another than the one asked for where that was taken.

    `guessed`: the metrics whose role or direction the service guessed from their names, so that they stop nothing.
    """

    run_id: str | None = None
    name: str | None = None
    status: str | None = None
    should_stop: bool = False
    verdict: Verdict | None = None
    best_checkpoint: Mapping[str, Any] | None = None
    guessed: tuple[str, ...] = ()

    def after(self, answer: Mapping[str, Any]) -> LatestAnswer:
        """This with the fields of `answer`; what the answer leaves out stays as it was."""
        changes: dict[str, Any] = {}
        if isinstance(answer.get("id"), str):
            changes["run_id"] = answer["id"]
        for field in ("name", "status"):
            if isinstance(answer.get(field), str):
                changes[field] = answer[field]
        if isinstance(answer.get("should_stop"), bool):
            changes["should_stop"] = answer["should_stop"]
        if isinstance(answer.get("verdict"), Mapping):
            changes["verdict"] = Verdict.from_json(answer["verdict"])
        if "best_checkpoint" in answer:
            changes["best_checkpoint"] = answer["best_checkpoint"]
        if isinstance(answer.get("guessed"), list):
            changes["guessed"] = tuple(map(str, answer["guessed"]))
        return replace(self, **changes)
