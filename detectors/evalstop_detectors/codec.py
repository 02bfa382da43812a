"""Policies and states as versioned JSON, strictly read: what is not understood is refused, never guessed."""

from __future__ import annotations

import hashlib
import sys
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, inspect

from evalstop_detectors.catalog import DETECTORS
from evalstop_detectors.detector import CountOrZero, Evidence, Thresholds
from evalstop_detectors.errors import InvalidPolicy, StaleState
from evalstop_detectors.monitor import MonitorState
from evalstop_detectors.policy import Member, Policy, Verdict

STATE_VERSION = 1

_Threshold = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
_Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}\Z")]
# Databases refuse the character NUL, and UTF-8 half a surrogate pair.
_Text = Annotated[str, Meta(max_length=2000, pattern=r"^[^\x00\ud800-\udfff]*\Z")]


class _MemberDocument(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    detector: str
    params: dict[str, Any] = {}
    suspect_at: _Threshold | UnsetType | None = UNSET
    stop_at: _Threshold | UnsetType | None = UNSET


class _PolicyDocument(Struct, frozen=True, forbid_unknown_fields=True):
    name: _Name
    members: Annotated[list[_MemberDocument], Meta(min_length=1, max_length=32)]
    at_least: Annotated[int, Meta(ge=1, le=32)] = 1
    gold_required: bool = True
    min_evals: CountOrZero = 0
    warmup_steps: Annotated[int, Meta(ge=0, le=2**53)] = 0
    description: _Text = ""


class _StateDocument(Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    policy: str
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
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise InvalidPolicy(f"{error}; a policy may hold {_allowed(_PolicyDocument)}") from error
    if parsed.at_least > len(parsed.members):
        raise InvalidPolicy(
            f"at_least is {parsed.at_least}, but may be 1 to {len(parsed.members)}, the number of members"
            " - at `$.at_least`"
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
            policy=_fingerprint(policy),
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
        if document.version != STATE_VERSION or document.policy != _fingerprint(policy):
            raise StaleState
        if len(document.evidence) != len(policy.members):
            raise StaleState
        states = tuple(
            msgspec.convert(item, member.detector.state_type)
            for member, item in zip(policy.members, document.states, strict=True)
        )
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise StaleState from error
    return MonitorState(
        states, tuple(document.evidence), document.last, document.evals, document.verdict, document.suspect_step
    )


def verdict_to_document(verdict: Verdict) -> dict[str, Any]:
    """The verdict as JSON values, equal to what is read back after it was stored (lists, not tuples)."""
    document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(verdict))
    return document


def _member(item: _MemberDocument, index: int) -> Member:
    where = f"$.members[{index}]"
    detector_type = DETECTORS.get(item.detector)
    if detector_type is None:
        raise InvalidPolicy(
            f"there is no detector {item.detector!r}; there are {', '.join(DETECTORS)} - at `{where}.detector`"
        )
    try:
        detector = msgspec.convert(item.params, detector_type)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        allowed = _allowed(detector_type)
        raise InvalidPolicy(f"{error} of `{where}.params`; {item.detector} takes {allowed}") from error
    implied = detector.thresholds
    return Member(
        detector,
        Thresholds(
            suspect_at=implied.suspect_at if item.suspect_at is UNSET else item.suspect_at,
            stop_at=implied.stop_at if item.stop_at is UNSET else item.stop_at,
        ),
    )


def _fingerprint(policy: Policy) -> str:
    """The same for equal policies only: a state goes with the parameters that it was folded under."""
    return hashlib.sha256(msgspec.json.encode(policy_to_document(policy))).hexdigest()[:16]


def _allowed(struct: type[Any]) -> str:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return ", ".join(f"{field.encode_name} ({_words(field.type)})" for field in info.fields)


def _words(kind: inspect.Type) -> str:
    match kind:
        case inspect.IntType(ge=ge, le=le):
            return f"whole number from {ge} to {le}"
        case inspect.FloatType(gt=gt, ge=ge, le=le):
            low = f"number > {gt:g}" if gt is not None else f"number >= {ge:g}"
            return low if le is None or le == sys.float_info.max else f"{low} and <= {le:g}"
        case inspect.EnumType(cls=cls):
            return "one of " + ", ".join(cls)
        case inspect.UnionType(types=types):
            return " or ".join(_words(item) for item in types)
        case inspect.ListType(item_type=inspect.StructType(cls=cls)):
            return f"list of objects of {_allowed(cls)}"
        case inspect.StrType(pattern=str(pattern)):
            return f"text that matches {pattern}"
        case inspect.BoolType():
            return "true or false"
        case inspect.NoneType():
            return "null"
        case inspect.DictType():
            return "object"
        case _:
            return "text"
