"""The state of a run: what its future verdicts depend on, and its JSON, which is read strictly."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from evalstop_detectors.detectors.detector import EvalRequest, Evidence
from evalstop_detectors.errors import StaleState
from evalstop_detectors.observation import Observation
from evalstop_detectors.policy.catalog import NOTHING_SEEN, Verdict
from evalstop_detectors.policy.codec import policy_to_document
from evalstop_detectors.policy.opening import Opening
from evalstop_detectors.policy.policy import Policy

STATE_VERSION = 9


class MonitorState(Struct, frozen=True):
    """The state of a run on which its future verdicts depend.

    `states` and `evidence` hold one entry for each member of the policy, and behind these for each observer, on which
    no verdict depends; a state of None: the observer has failed, and sees nothing more. `calls`: for each of them the
    first step at which its evidence called for a stop. `last` is the `order` of the latest observation. `evals` counts
    finite evals. `suspect_step` is the first step at which the verdict was more than `continue`. Once the verdict is
    `stop` it stays as it was reached, while the detectors continue to add evidence: for good or, with a policy that
    parks, until the policy judges that the run may continue. `eval_version` is that of the latest observation. At the
    first of another version, the detectors that see the eval restart, and so does `evals`: levels are compared only
    within a version. `guarded`: for a policy with critical evals, the states of the watched score and of each critical
    eval; the other fields but the verdict copy the first. `opening`: the first finite evals and learning rates, see
    `policy.opening`.
    """

    states: tuple[Any, ...]
    evidence: tuple[Evidence | None, ...]
    calls: tuple[int | None, ...]
    last: tuple[int, int] | None = None
    evals: int = 0
    verdict: Verdict = NOTHING_SEEN
    suspect_step: int | None = None
    eval_version: int = 0
    guarded: tuple[MonitorState, ...] = ()
    opening: Opening = Opening()


def start(policy: Policy) -> MonitorState:
    """The initial state of a run."""
    if policy.critical:
        first = start(policy.unguarded)
        return replace(first, guarded=(first, *(start(policy.guarding) for _ in policy.critical)))
    nothing = (None,) * len(policy.panel)
    return MonitorState(tuple(member.detector.start() for member in policy.panel.values()), nothing, nothing)


def is_late(state: MonitorState, observation: Observation) -> bool:
    """Whether the observation belongs at or before the last one that the monitor has seen."""
    return state.last is not None and observation.order <= state.last


def name_calls(policy: Policy, state: MonitorState) -> dict[str, int | None]:
    """The first step at which each member of the panel called for a stop, by name; None: it has not."""
    return dict(zip(policy.panel, state.calls, strict=True))


def find_request(policy: Policy, state: MonitorState) -> EvalRequest | None:
    """The paired evaluation that is awaited, the latest if several detectors ask; none for a run to be stopped."""
    if not policy.asking or state.verdict.stops:
        return None
    open_requests = [policy.members[index].detector.find_open_request(state.states[index]) for index in policy.asking]
    requests = [request for request in open_requests if request is not None]
    return max(requests, key=lambda request: request.step, default=None)


class _Document(Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    policy: str
    state: MonitorState


def state_to_json(policy: Policy, state: MonitorState) -> bytes:
    """The state as JSON, to be read by `state_from_json` with the same policy."""
    return msgspec.json.encode(_Document(STATE_VERSION, _fingerprint(policy), state))


def state_from_json(policy: Policy, data: bytes | str) -> MonitorState:
    """Read a state; raises StaleState if it was written for another policy or by another version."""
    try:
        document = msgspec.json.decode(data, type=_Document)
        if document.version != STATE_VERSION or document.policy != _fingerprint(policy):
            raise StaleState
        return _read_state(policy, document.state)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise StaleState from error


def _read_state(policy: Policy, state: MonitorState) -> MonitorState:
    """The state with those of detectors read as their own types; raises ValueError if it does not fit the policy."""
    if not len(state.evidence) == len(state.calls) == len(policy.panel):
        raise ValueError
    if len(state.guarded) != (len(policy.critical) + 1 if policy.critical else 0):
        raise ValueError
    return replace(
        state,
        states=tuple(
            msgspec.convert(item, member.detector.state_type | None)
            for member, item in zip(policy.panel.values(), state.states, strict=True)
        ),
        guarded=tuple(
            _read_state(policy.guarding if index else policy.unguarded, item)
            for index, item in enumerate(state.guarded)
        ),
    )


def _fingerprint(policy: Policy) -> str:
    """Equal only for policies that judge alike: a state is valid only for the parameters with which it was computed."""
    cached: str | None = policy.__dict__.get("fingerprint")
    if cached is None:
        judging = replace(policy, stops_despite=(), evaluate_now=None)
        cached = hashlib.sha256(msgspec.json.encode(policy_to_document(judging))).hexdigest()[:16]
        policy.__dict__["fingerprint"] = cached
    return cached
