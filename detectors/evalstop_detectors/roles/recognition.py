"""Which of a run's metrics are the eval score, proxy, KL and loss, told from their names.

Names are all that is looked at: what cannot be told from them is said as a warning, and a person can correct it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Literal

from msgspec import Struct

from evalstop_detectors.observation import MetricRole
from evalstop_detectors.roles.trainers import ANYONE, TRAINERS, Meaning, Trainer

PRESET_TAG = "evalstop.preset"
"""The tag by which a run names its trainer, where that is not to be told from its metrics."""

NO_EVAL = (
    "No metric is the eval score: from proxy, KL and loss alone a run can only be suspect, and no shipped policy stops"
    " it. Log a score on held-out data that is not what is optimized, and give it the role eval."
)

_HELD_OUT = ("eval/", "eval_", "val/", "val_", "valid/", "valid_", "validation/", "validation_")


class Role(Struct, frozen=True):
    """The part that a metric plays for a run, and whether higher or lower is better."""

    role: MetricRole
    direction: Literal["maximize", "minimize"]


class RecognizedRoles(Struct, frozen=True):
    """What a run's metrics look like.

    `preset` is the trainer whose names they are, None when no trainer's marks were seen. `roles` holds at most one
    metric a role. `reasons` says of each metric with a role, and of each that was refused one, why; metrics that mean
    nothing to anyone are not in it. `warnings` are for a person to read.
    """

    preset: str | None
    roles: dict[str, Role]
    reasons: dict[str, str]
    warnings: list[str]


class _Candidate(Struct, frozen=True):
    metric: str
    meaning: Meaning
    place: int

    @property
    def order(self) -> tuple[int, int, str]:
        return self.meaning.rank, self.place, self.metric


def recognize_roles(metrics: Iterable[str], tags: Mapping[str, str] = MappingProxyType({})) -> RecognizedRoles:
    """Tell the roles of `metrics` from their names; the tag `evalstop.preset` names the trainer outright."""
    names = sorted(set(metrics))
    trainers, warnings = _trainers(names, tags)
    reasons: dict[str, str] = {}
    candidates: dict[MetricRole, list[_Candidate]] = {}
    for name in names:
        candidate = _understood(name, trainers)
        if candidate is not None and candidate.meaning.role is not None:
            candidates.setdefault(candidate.meaning.role, []).append(candidate)
        elif candidate is not None:
            reasons[name] = f"no role: {candidate.meaning.reason}"
    roles: dict[str, Role] = {}
    for role, rivals in candidates.items():
        best, *others = sorted(rivals, key=lambda candidate: candidate.order)
        roles[best.metric] = _role(role, best.meaning.minimize)
        reasons[best.metric] = f"{role}: {best.meaning.reason}"
        if best.meaning.caution:
            warnings.append(best.meaning.caution.format(metric=best.metric))
        for other in others:
            reasons[other.metric] = f"no role: {best.metric} is the better {role} ({other.meaning.reason})"
    if MetricRole.EVAL not in candidates:
        warnings.append(NO_EVAL)
    return RecognizedRoles(trainers[0].name if trainers else None, roles, reasons, warnings)


def match_role(patterns: Sequence[Mapping[str, str]], name: str) -> Role | None:
    """The role that the first fitting pattern gives to a metric, None when none fits.

    A pattern is `{"pattern": "val-core/*/mean@*", "role": "eval", "direction": "maximize"}`, fnmatch-style and
    sensitive to case; the direction may be left out. MLflow's `_at_` is read as `@`.

    Raises:
        KeyError, ValueError: the pattern that fits lacks a key or names an unknown role.
    """
    for pattern in patterns:
        if fnmatchcase(_with_at(name), _with_at(pattern["pattern"])):
            direction = pattern.get("direction")
            return _role(MetricRole(pattern["role"]), None if direction is None else direction == "minimize")
    return None


def _role(role: MetricRole, minimize: bool | None) -> Role:
    if minimize is None:
        minimize = role in (MetricRole.KL, MetricRole.LOSS)
    return Role(role, "minimize" if minimize else "maximize")


def _trainers(names: Sequence[str], tags: Mapping[str, str]) -> tuple[list[Trainer], list[str]]:
    """The trainers whose marks are on these names, and what is wrong with the tag."""
    said = tags.get(PRESET_TAG)
    if said is None:
        plain = [_plain(name) for name in names]
        return [trainer for trainer in TRAINERS if _any_fits(trainer.marks, plain)], []
    named = [trainer for trainer in TRAINERS if trainer.name == said]
    if named:
        return named, []
    known = ", ".join(trainer.name for trainer in TRAINERS)
    warning = f"The tag {PRESET_TAG} names {said!r:.80}, which is none of {known}: it is told from the metrics instead."
    return _trainers(names, {})[0], [warning]


def _understood(name: str, trainers: Sequence[Trainer]) -> _Candidate | None:
    """What the first of the trainers, or else anyone, means by this name."""
    plain = _plain(name)
    meanings = [meaning for trainer in trainers for meaning in trainer.meanings]
    for place, meaning in enumerate(meanings):
        if fnmatchcase(plain, meaning.pattern):
            return _Candidate(name, meaning, place)
    held_out = next((f"eval_{plain.removeprefix(prefix)}" for prefix in _HELD_OUT if plain.startswith(prefix)), plain)
    for place, meaning in enumerate(ANYONE, len(meanings)):
        if fnmatchcase(held_out, meaning.pattern):
            return _Candidate(name, meaning, place)
    return None


def _plain(name: str) -> str:
    """The name as the trainer has it, without what its logger made of it."""
    plain = _with_at(name).lower().removeprefix("train/")
    return f"eval_{plain.removeprefix('eval/')}" if plain.startswith("eval/") else plain


def _with_at(name: str) -> str:
    """MLflow takes no `@` in names, so trainers write `_at_`."""
    return name.replace("_at_", "@")


def _any_fits(patterns: Iterable[str], names: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)
