"""Policies and states as versioned JSON, strictly read: what is not understood is refused, never guessed."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from evalstop_detectors.catalog import DETECTORS
from evalstop_detectors.detector import Evidence, Thresholds
from evalstop_detectors.errors import InvalidPolicy, StaleState
from evalstop_detectors.monitor import MonitorState
from evalstop_detectors.policy import Member, Policy, Verdict

STATE_VERSION = 1


class _MemberDocument(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    detector: str
    params: dict[str, Any] = {}
    suspect_at: float | UnsetType | None = UNSET
    stop_at: float | UnsetType | None = UNSET


class _PolicyDocument(Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    members: Annotated[list[_MemberDocument], Meta(min_length=1, max_length=32)]
    at_least: Annotated[int, Meta(ge=1)] = 1
    gold_required: bool = True
    min_evals: Annotated[int, Meta(ge=0)] = 0
    warmup_steps: Annotated[int, Meta(ge=0)] = 0
    description: Annotated[str, Meta(max_length=2000)] = ""


class _StateDocument(Struct, frozen=True):
    version: int
    detectors: list[str]
    states: list[dict[str, Any]]
    evidence: list[Evidence | None]
    last: tuple[int, int] | None
    evals: int
    verdict: Verdict
    suspect_step: int | None


def policy_from_document(document: object) -> Policy:
    """Read a policy from parsed JSON; raises InvalidPolicy naming the key and what it may hold."""
    try:
        parsed = msgspec.convert(document, _PolicyDocument)
    except msgspec.ValidationError as error:
        raise InvalidPolicy(f"{error}; a policy may hold {_keys(_PolicyDocument)}") from error
    if parsed.at_least > len(parsed.members):
        raise InvalidPolicy(
            f"at_least is {parsed.at_least}, but the policy has {len(parsed.members)} members - at `$.at_least`"
        )
    members = tuple(_member(item, index) for index, item in enumerate(parsed.members))
    return Policy(
        parsed.name,
        members,
        parsed.at_least,
        parsed.gold_required,
        parsed.min_evals,
        parsed.warmup_steps,
        parsed.description,
    )


def policy_to_document(policy: Policy) -> dict[str, Any]:
    """The policy as JSON values with every parameter written out, so that later defaults cannot change it."""
    members = [
        {
            "detector": member.detector.name,
            "params": msgspec.to_builtins(member.detector),
            "suspect_at": member.thresholds.suspect_at,
            "stop_at": member.thresholds.stop_at,
        }
        for member in policy.members
    ]
    return {
        "name": policy.name,
        "description": policy.description,
        "members": members,
        "at_least": policy.at_least,
        "gold_required": policy.gold_required,
        "min_evals": policy.min_evals,
        "warmup_steps": policy.warmup_steps,
    }


def state_to_json(policy: Policy, state: MonitorState) -> bytes:
    """The state as JSON; `state_from_json` with the same policy gives it back."""
    return msgspec.json.encode(
        _StateDocument(
            version=STATE_VERSION,
            detectors=[member.detector.name for member in policy.members],
            states=[msgspec.to_builtins(item) for item in state.states],
            evidence=list(state.evidence),
            last=state.last,
            evals=state.evals,
            verdict=state.verdict,
            suspect_step=state.suspect_step,
        )
    )


def state_from_json(policy: Policy, data: bytes | str) -> MonitorState:
    """Read a state back; raises StaleState if it was written for another policy or by another version."""
    try:
        document = msgspec.json.decode(data, type=_StateDocument)
        if document.version != STATE_VERSION or document.detectors != [m.detector.name for m in policy.members]:
            raise StaleState
        states = tuple(
            msgspec.convert(item, member.detector.state_type)
            for member, item in zip(policy.members, document.states, strict=True)
        )
    except (msgspec.DecodeError, ValueError) as error:
        raise StaleState from error
    return MonitorState(
        states, tuple(document.evidence), document.last, document.evals, document.verdict, document.suspect_step
    )


def verdict_to_document(verdict: Verdict) -> dict[str, Any]:
    """The verdict as JSON values."""
    document: dict[str, Any] = msgspec.to_builtins(verdict)
    return document


def _member(item: _MemberDocument, index: int) -> Member:
    where = f"`$.members[{index}]`"
    detector_type = DETECTORS.get(item.detector)
    if detector_type is None:
        raise InvalidPolicy(f"there is no detector {item.detector!r}; there are {', '.join(DETECTORS)} - at {where}")
    try:
        detector = msgspec.convert(item.params, detector_type)
    except msgspec.ValidationError as error:
        allowed = _keys(detector_type)
        raise InvalidPolicy(f"{error} of the params of {where}; {item.detector} takes {allowed}") from error
    implied = detector.thresholds
    return Member(
        detector,
        Thresholds(
            suspect_at=implied.suspect_at if item.suspect_at is UNSET else item.suspect_at,
            stop_at=implied.stop_at if item.stop_at is UNSET else item.stop_at,
        ),
    )


def _keys(struct: type[Any]) -> str:
    return ", ".join(field.encode_name for field in msgspec.structs.fields(struct)) or "nothing"
