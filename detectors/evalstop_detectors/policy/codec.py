"""Policies as JSON, read strictly: unknown content is refused, never guessed."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from evalstop_detectors.detectors.detector import CountOrZero, Detector, EvalRequests, Thresholds
from evalstop_detectors.errors import InvalidPolicy
from evalstop_detectors.policy.calibration import Risk, find_threshold
from evalstop_detectors.policy.catalog import DETECTORS, Action, GuardKind, list_allowed
from evalstop_detectors.policy.policy import Member, Policy, member_ids

_Threshold = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
_Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}\Z")]
# Databases refuse the character NUL, and UTF-8 cannot encode unpaired surrogates.
_Text = Annotated[str, Meta(max_length=2000, pattern=r"^[^\x00\ud800-\udfff]*\Z")]


_PLACE = re.compile(r"(.*) - at `\$(.*)`", re.DOTALL)
_STEP = re.compile(r"\[\d+\]|\.[A-Za-z_]\w*")

Path = tuple[str | int, ...]


class MemberDocument(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A detector of a policy. The valid `params` depend on the detector."""

    detector: Annotated[str, Meta(description="its name in the reference of detectors")]
    params: Annotated[dict[str, Any], Meta(description="omitted ones have the detector's defaults")] = {}
    suspect_at: Annotated[
        _Threshold | Risk | UnsetType | None,
        Meta(description="where it calls for suspicion, as a number or a risk; null: never; by default the detector's"),
    ] = UNSET
    stop_at: Annotated[
        _Threshold | Risk | UnsetType | None,
        Meta(description="where it calls for a stop, as a number or a risk; null: never; by default the detector's"),
    ] = UNSET
    id: Annotated[_Name | None, Meta(description="its name; null: its detector's, numbered if that occurs twice")] = (
        None
    )
    observe: Annotated[bool, Meta(description="true: it sees the run and is measured, but has no say")] = False


class PolicyDocument(Struct, frozen=True, forbid_unknown_fields=True):
    """A policy document as users write it."""

    name: Annotated[_Name, Meta(description="shared by all its versions")]
    members: Annotated[list[MemberDocument], Meta(min_length=1, max_length=32, description="the detectors that vote")]
    at_least: Annotated[int, Meta(ge=1, le=32, description="it stops when so many members call for a stop")] = 1
    eval_required: Annotated[
        bool, Meta(description="true: members that do not see the eval can suspect, but not stop by themselves")
    ] = True
    min_evals: Annotated[CountOrZero, Meta(description="no stop before this many finite evals")] = 0
    description: Annotated[_Text, Meta(description="for people")] = ""
    stops_despite: Annotated[
        list[GuardKind], Meta(max_length=len(GuardKind), description="guards that do not put its stops on hold")
    ] = []
    evaluate_now: Annotated[
        EvalRequests | None, Meta(description="when to ask for paired evaluations; null: never")
    ] = None
    action: Annotated[
        Action, Meta(description="stop: its jobs are ended; park: they are parked, and return once they recover")
    ] = Action.STOP


def policy_from_document(document: object) -> Policy:
    """Read a policy from parsed JSON or YAML; raises InvalidPolicy, which names the key and its valid values."""
    try:
        parsed = msgspec.convert(document, PolicyDocument)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise _describe_refusal(error, (), PolicyDocument) from error
    deciding = [(index, item) for index, item in enumerate(parsed.members) if not item.observe]
    observing = [(index, item) for index, item in enumerate(parsed.members) if item.observe]
    if parsed.at_least > len(deciding):
        message = f"at_least is {parsed.at_least}, but only {len(deciding)} of the members decide"
        raise _invalid(("at_least",) if deciding else ("members",), message)
    _check_ids(deciding, observing)
    members, observers = (
        tuple(_build_member(item, ("members", index)) for index, item in placed) for placed in (deciding, observing)
    )
    _check_reachable((*deciding, *observing), (*members, *observers))
    return Policy(
        name=parsed.name,
        members=members,
        at_least=parsed.at_least,
        eval_required=parsed.eval_required,
        min_evals=parsed.min_evals,
        description=parsed.description,
        stops_despite=tuple(parsed.stops_despite),
        evaluate_now=parsed.evaluate_now,
        action=parsed.action,
        observers=observers,
    )


def describe_document(ref_template: str) -> dict[str, Any]:
    """JSON Schemas of a policy document and of its parts, by name. They omit constraints between parts."""
    (_, parts) = msgspec.json.schema_components([PolicyDocument], ref_template=ref_template)
    parts["MemberDocument"]["properties"]["detector"]["enum"] = list(DETECTORS)
    for schema in parts.values():
        for field in schema.get("properties", {}).values():
            for part in (field, *field.get("anyOf", ())):
                if "pattern" in part:  # in Python's syntax: JSON Schema has no \Z, and no unpaired surrogates
                    part["pattern"] = part["pattern"].replace(r"\Z", "$").replace(r"\ud800-\udfff", "")
    described: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(parts))
    return described


def policy_to_document(policy: Policy) -> dict[str, Any]:
    """The policy as JSON values with every number written out, so that later defaults cannot change it.

    `stops_despite` and `evaluate_now` are omitted when empty, `action` when it is to stop.
    """
    members = [
        {
            "detector": member.detector.name,
            "params": msgspec.to_builtins(member.detector),
            **({"observe": True} if index >= len(policy.members) else {}),
            "suspect_at": member.thresholds.suspect_at,
            "stop_at": member.thresholds.stop_at,
        }
        | ({} if member.id is None else {"id": member.id})
        for index, member in enumerate(policy.panel.values())
    ]
    return (
        {
            "name": policy.name,
            "description": policy.description,
            "members": members,
            "at_least": policy.at_least,
            "eval_required": policy.eval_required,
            "min_evals": policy.min_evals,
        }
        | ({"stops_despite": [str(item) for item in policy.stops_despite]} if policy.stops_despite else {})
        | ({"evaluate_now": msgspec.to_builtins(policy.evaluate_now)} if policy.evaluate_now is not None else {})
        | ({"action": str(policy.action)} if policy.action is not Action.STOP else {})
    )


_Placed = Sequence[tuple[int, MemberDocument]]
"""Members with their place in the document."""


def _check_ids(deciding: _Placed, observing: _Placed) -> None:
    ids = [*member_ids([(item.id, item.detector) for _, item in deciding]), *(item.id for _, item in observing)]
    for place, ((index, _), name) in enumerate(zip((*deciding, *observing), ids, strict=True)):
        if name is not None and name in ids[:place]:
            raise _invalid(("members", index, "id"), f"two members have the id {name}; ids must be unique")


def _check_reachable(placed: _Placed, members: Sequence[Member]) -> None:
    for (index, _), member in zip(placed, members, strict=True):
        most = member.detector.kind.upper_bound
        for key, value in msgspec.structs.asdict(member.thresholds).items():
            if value is not None and value > most:
                message = f"{key} is {value}, but the evidence of {member.detector.name} is from 0 to {most:g}"
                raise _invalid(
                    ("members", index, key), f"{message}; give a number above 0 and at most {most:g}, or null"
                )


def _build_member(item: MemberDocument, where: Path) -> Member:
    detector_type = DETECTORS.get(item.detector)
    if detector_type is None:
        message = f"there is no detector {item.detector!r}; there are {', '.join(DETECTORS)}"
        raise _invalid((*where, "detector"), message)
    try:
        detector = msgspec.convert(item.params, detector_type)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise _describe_refusal(error, (*where, "params"), detector_type) from error
    implied = detector.thresholds
    return Member(
        detector,
        Thresholds(
            suspect_at=_resolve_threshold(item.suspect_at, implied.suspect_at, detector, (*where, "suspect_at")),
            stop_at=_resolve_threshold(item.stop_at, implied.stop_at, detector, (*where, "stop_at")),
        ),
        item.id,
    )


def _resolve_threshold(
    value: float | Risk | UnsetType | None, implied: float | None, detector: Detector[Any], where: Path
) -> float | None:
    if value is UNSET:
        return implied
    if not isinstance(value, Risk):
        return value
    try:
        return find_threshold(detector, value.risk)
    except InvalidPolicy as error:
        raise _invalid((*where, "risk"), str(error)) from error


def _invalid(path: Path, message: str) -> InvalidPolicy:
    written = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return InvalidPolicy(f"{message} - at `${written}`")


def _describe_refusal(error: Exception, where: Path, struct: type[Any]) -> InvalidPolicy:
    """The msgspec error for a document of `struct` at the path `where`, with the allowed values."""
    match = _PLACE.fullmatch(str(error))
    message, steps = (match[1], match[2]) if match else (str(error), "")
    inner: Path = tuple(int(step[1:-1]) if step[0] == "[" else step[1:] for step in _STEP.findall(steps))
    refusal, allowed = _invalid((*where, *inner), message), list_allowed(struct, inner)
    return InvalidPolicy(f"{refusal}; allowed: {', '.join(allowed)}") if allowed else refusal
