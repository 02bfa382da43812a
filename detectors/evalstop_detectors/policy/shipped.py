"""The policies that are shipped with EvalStop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from evalstop_detectors.observation import ROLES, MetricRole
from evalstop_detectors.policy.codec import policy_from_document, policy_to_document
from evalstop_detectors.policy.policy import Policy

_NOT_FINITE: list[dict[str, Any]] = [
    {"detector": "non_finite", "id": f"non_finite-{role}", "params": {"role": role}}
    for role in (MetricRole.EVAL, MetricRole.PROXY, MetricRole.LOSS, MetricRole.KL)
]

# Shares near zero vary by large factors, and gradients spike: fewer truncated answers, and smaller ones, are no hint.
_SENSITIVITY: dict[MetricRole, dict[str, Any]] = {
    MetricRole.TRUNCATED: {"offset": 0.1, "falls": False},
    MetricRole.GRADIENT_NORM: {"blocks": 5, "falls": False},
}

# They raise a suspicion, which asks for an eval, and never stop a run.
_BESIDE_THE_SCORE: list[dict[str, Any]] = [
    {"detector": "sudden_change", "id": f"sudden_change-{role}", "params": {"role": role, **_SENSITIVITY.get(role, {})}}
    for role, traits in ROLES.items()
    if traits.hints
]

_POSTERIOR: dict[str, Any] = {"detector": "posterior", "params": {}}

# Of a run of 12 evals each is a twelfth: waiting until it is as certain as in longer ones wastes most of what is left.
_POSTERIOR_SHORT: dict[str, Any] = {
    "detector": "posterior",
    "id": "posterior-short",
    "params": {"most_evals": 12},
    "suspect_at": None,
    "stop_at": 0.8,
}

# Not in cautious, where its false stops, on runs that are rolled back or graded anew, would outnumber all others.
_COLLAPSE: dict[str, Any] = {"detector": "collapse", "params": {}}

_AT_1_PERCENT: dict[str, Any] = {"observe": True, "suspect_at": None, "stop_at": {"risk": 0.01}}

_OBSERVERS: list[dict[str, Any]] = [
    {"detector": "k_decline", "params": {"k": 3}, "observe": True, "suspect_at": None, "stop_at": 3.0},
    {"detector": "focus", "params": {}} | _AT_1_PERCENT,
    {"detector": "river_drift", "params": {}} | _AT_1_PERCENT,
    {"detector": "divergence", "params": {}} | _AT_1_PERCENT,
    {"detector": "gao_fit", "params": {}} | _AT_1_PERCENT,
]
"""The panel: what others would have done on the same runs."""

DOCUMENTS: dict[str, dict[str, Any]] = {
    "paper": {
        "description": "EvalStop as published (arXiv 2606.04145): stop after 3 consecutive eval declines, whether or"
        " not a checkpoint is registered.",
        "members": [{"detector": "k_decline", "params": {"k": 3}}, _POSTERIOR | _AT_1_PERCENT],
        "stops_despite": ["no_checkpoint"],
    },
    "default": {
        "description": "Stop when the run has turned for good with a probability that 1 % of healthy runs reach, or"
        " when it fell at once, stayed down, and more than the eval shows it. It decides sooner when the planned length"
        " is known, and at 80 % in the second half of a plan of at most 12 evals. Values that are not finite are"
        " suspect.",
        "members": [
            _POSTERIOR | {"suspect_at": {"risk": 0.1}, "stop_at": {"risk": 0.01}},
            _POSTERIOR_SHORT,
            _COLLAPSE,
            *_NOT_FINITE,
            *_BESIDE_THE_SCORE,
            *_OBSERVERS,
        ],
        "evaluate_now": {"at": 0.7},
    },
    "early": {
        "description": "As default, but sooner and more often wrong: it stops 5 % of healthy runs.",
        "members": [
            _POSTERIOR | {"suspect_at": {"risk": 0.2}, "stop_at": {"risk": 0.05}},
            _POSTERIOR_SHORT | {"stop_at": 0.7},
            _COLLAPSE,
            *_NOT_FINITE,
            *_BESIDE_THE_SCORE,
            *_OBSERVERS,
        ],
        "evaluate_now": {"at": 0.3},
    },
    "cautious": {
        "description": "As default, but later and rarely wrong: it stops 0.1 % of healthy runs, and no sudden fall"
        " sooner than others.",
        "members": [
            _POSTERIOR | {"suspect_at": {"risk": 0.05}, "stop_at": {"risk": 0.001}},
            *_NOT_FINITE,
            *_BESIDE_THE_SCORE,
            *_OBSERVERS,
        ],
        "evaluate_now": {"at": 0.7},
    },
    "reversible": {
        "description": "Park a run that may have turned: its job releases its GPUs to waiting jobs, keeps its"
        " checkpoints and returns when the eval recovers, or when a person resumes it. It acts at a level that 20 % of"
        " healthy runs reach, and loses none of them. It needs a receiver that can park jobs.",
        "members": [_POSTERIOR | {"suspect_at": 0.12, "stop_at": {"risk": 0.2}}, *_OBSERVERS],
        "evaluate_now": {"at": 0.3},
        "action": "park",
    },
}


class _Shipped(Mapping[str, Policy]):
    """Read on demand: a threshold may be missing while the calibration that finds it runs."""

    def __init__(self) -> None:
        self._read: dict[str, Policy] = {}

    def __getitem__(self, name: str) -> Policy:
        if name not in self._read:
            self._read[name] = policy_from_document({"name": name} | DOCUMENTS[name])
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in DOCUMENTS

    def __iter__(self) -> Iterator[str]:
        return iter(DOCUMENTS)

    def __len__(self) -> int:
        return len(DOCUMENTS)


POLICIES: Mapping[str, Policy] = _Shipped()


def with_panel(policy: Policy, names: Sequence[str] | None) -> Policy:
    """A shipped policy, observed by the detectors with these names that do not already decide in it.

    Each has the parameters and the threshold with which shipped policies observe it, else its defaults. None: the
    observers that the policy ships with. Raises InvalidPolicy for an unknown name, and for too many members.
    """
    document = policy_to_document(replace(policy, observers=()))
    usual = {item["detector"]: item for item in (*_OBSERVERS, _POSTERIOR | _AT_1_PERCENT)}
    if names is None:
        chosen = [item for item in policy_to_document(POLICIES[policy.name])["members"] if item.get("observe")]
    else:
        deciding = {member.detector.name for member in policy.members}
        chosen = [usual.get(name, {"detector": name, "observe": True}) for name in names if name not in deciding]
    return policy_from_document(document | {"members": [*document["members"], *chosen]})
