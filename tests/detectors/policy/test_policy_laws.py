"""How a policy combines the evidence of its members: counts, risks, stated and not, and guessed roles."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import pytest
from evalstop_detectors import (
    POLICIES,
    Call,
    Detector,
    Evidence,
    InvalidPolicy,
    Kind,
    Member,
    MetricRole,
    Policy,
    Thresholds,
    policy_from_document,
    policy_to_document,
)
from evalstop_detectors.policy.calibration import SHIPPED, SHIPPED_FILE, compute_stated_risk
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

CALL_ORDER = [Call.CONTINUE, Call.SUSPECT, Call.STOP]


class FakeDetector(Detector[None], frozen=True):
    """A detector with a role and no evidence of its own; tests pass the evidence to the policy."""

    name: ClassVar[str] = "fake"
    kind: ClassVar[Kind] = Kind.COUNT
    state_type: ClassVar[type[None]] = type(None)

    role: MetricRole = MetricRole.EVAL

    @property
    def roles(self) -> frozenset[MetricRole]:
        return frozenset({self.role})

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(1, 2)


EvidenceList = list[Evidence | None]

NO_EVIDENCE, SUSPECT_EVIDENCE, STOP_EVIDENCE = (
    Evidence(Kind.COUNT, value, turn_step, f"{value:g} found") for value, turn_step in ((0.0, None), (1.0, 4), (2.0, 6))
)
evidences = st.sampled_from([None, NO_EVIDENCE, SUSPECT_EVIDENCE, STOP_EVIDENCE, STOP_EVIDENCE])


def build_policy(roles: Sequence[MetricRole], **more: Any) -> Policy:
    """A policy of one fake detector for each of these roles."""
    fakes = [FakeDetector(role) for role in roles]
    return Policy("p", tuple(Member(fake, fake.thresholds) for fake in fakes), **more)


@st.composite
def judgments(draw: st.DrawFn) -> tuple[Policy, EvidenceList]:
    """A policy of fake detectors, and evidence for its members."""
    some_roles = st.sampled_from([MetricRole.EVAL, MetricRole.EVAL, MetricRole.PROXY])
    roles = draw(st.lists(some_roles, min_size=1, max_size=5))
    policy = build_policy(
        roles,
        at_least=draw(st.integers(1, len(roles))),
        eval_required=draw(st.booleans()),
        min_evals=draw(st.sampled_from([0, 0, 0, 11])),
    )
    return policy, draw(st.lists(evidences, min_size=len(roles), max_size=len(roles)))


def judge(policy: Policy, evidence: EvidenceList) -> Call:
    """The call of a policy at step 100 after 10 evals."""
    return policy.judge(evidence, step=100, evals=10).verdict


@settings(max_examples=100)
@given(judgment=judgments())
def test_verdict_equals_slow_reading_of_the_keys(judgment: tuple[Policy, EvidenceList]) -> None:
    """The verdict equals that of a slow evaluation of each key, and has the earliest turn of those that call for it."""
    policy, evidence = judgment
    members = list(zip(policy.members, evidence, strict=True))
    calling = [member for member, item in members if item is STOP_EVIDENCE]
    turns = [6 if item is STOP_EVIDENCE else 4 for _, item in members if item in (STOP_EVIDENCE, SUSPECT_EVIDENCE)]
    has_eval = any(member.detector.roles == {MetricRole.EVAL} for member in calling)
    is_allowed = policy.min_evals <= 10 and (has_eval or not policy.eval_required)
    stops = len(calling) >= policy.at_least and is_allowed
    expected = Call.STOP if stops else Call.SUSPECT if turns else Call.CONTINUE
    verdict = policy.judge(evidence, step=100, evals=10)
    assert verdict.verdict is expected
    assert verdict.turn_step == (6 if expected is Call.STOP else min(turns, default=None))


def test_missing_votes_are_explained() -> None:
    """If too few members call for a stop, the verdict is suspect with that reason."""
    verdict = build_policy([MetricRole.EVAL] * 2, at_least=2).judge([STOP_EVIDENCE, NO_EVIDENCE], step=1, evals=1)
    assert verdict.verdict is Call.SUSPECT
    assert verdict.reason == "fake: 2 found; no stop: 1 of the 2 detectors needed call for one"


def test_call_for_a_stop_is_an_alarm() -> None:
    """A member that calls for a stop counts among those that suspect, also without a threshold to suspect."""
    policy = build_policy([MetricRole.EVAL] * 2, at_least=2)
    policy = replace(policy, members=tuple(replace(m, thresholds=Thresholds(None, 2)) for m in policy.members))
    assert judge(policy, [STOP_EVIDENCE, NO_EVIDENCE]) is Call.SUSPECT


def test_default_member_ids_are_detector_names() -> None:
    """Members without an id are named after their detector, with numbers that avoid the given ids."""
    members = [{"detector": "k_decline"}, {"detector": "k_decline"}, {"detector": "focus", "id": "k_decline"}]
    policy = policy_from_document({"name": "p", "members": members})
    assert policy.ids == ("k_decline-2", "k_decline-3", "k_decline")
    assert policy_from_document(policy_to_document(policy)).ids == policy.ids


def build_document_with_risk(risk: float, **more: Any) -> dict[str, Any]:
    """A policy document whose only member has a threshold given as a risk."""
    member = {"detector": "focus", "suspect_at": None, "stop_at": {"risk": risk}}
    return {"name": "p", "members": [member | more]}


def test_risk_is_replaced_by_its_threshold() -> None:
    """A threshold given as a risk becomes the calibrated number, which is what is stored."""
    policy = policy_from_document(build_document_with_risk(0.01))
    (calibrated,) = (thresholds for detector, thresholds in SHIPPED.items() if detector.name == "focus")
    assert policy.members[0].thresholds == Thresholds(None, calibrated[0.01])
    document = policy_to_document(policy)
    assert document["members"][0]["stop_at"] == calibrated[0.01]
    assert policy_from_document(document) == policy


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (build_document_with_risk(0.02), ["a risk of 0.02", "risks of 0.001, 0.01, 0.05, 0.1", "--rates 0.02"]),
        (
            build_document_with_risk(0.01, params={"candidates": 16}),
            ['{"candidates": 16}', "there are none with these parameters", "evalstop-lab calibrate"],
        ),
    ],
)
def test_uncalibrated_risk_is_refused(document: dict[str, Any], words: list[str]) -> None:
    """A risk without a calibration for these parameters is refused with the known risks and the command to run."""
    with pytest.raises(InvalidPolicy) as error:
        policy_from_document(document)
    for word in words:
        assert word in str(error.value)


def test_shipped_calibrations_are_consistent() -> None:
    """Shipped thresholds are above 0 and no lower for smaller risks; each detector has one calibration."""
    assert len(SHIPPED) == len(json.loads(SHIPPED_FILE.read_bytes()))
    for thresholds in SHIPPED.values():
        assert all(threshold > 0 for threshold in thresholds.values())
        assert list(thresholds) == sorted(thresholds)
        assert all(stricter >= laxer for stricter, laxer in pairwise(thresholds.values()))  # counts may coincide


@given(
    st.lists(st.sampled_from(MetricRole), min_size=1, max_size=5),
    st.data(),
    st.frozensets(st.sampled_from(MetricRole)),
    st.booleans(),
)
def test_guessed_role_never_causes_a_stop(
    roles: list[MetricRole], data: st.DataObject, guessed: frozenset[MetricRole], eval_required: bool
) -> None:
    """A policy stops only if it would without members of guessed roles; otherwise a stop becomes suspect."""
    size = len(roles)
    evidence: EvidenceList = data.draw(st.lists(evidences, min_size=size, max_size=size))
    policy = build_policy(roles, at_least=data.draw(st.integers(1, size)), eval_required=eval_required)
    plain, with_guesses = policy.judge(evidence, 10, 10), policy.with_guessed(guessed).judge(evidence, 10, 10)
    known: EvidenceList = [None if role in guessed else item for role, item in zip(roles, evidence, strict=True)]
    stops = plain.stops and policy.judge(known, 10, 10).stops
    assert with_guesses.verdict == (Call.STOP if stops else min(plain.verdict, Call.SUSPECT, key=CALL_ORDER.index))
    assert ("guessed" in with_guesses.reason) == (plain.stops and not stops)
    if not guessed:
        assert policy.with_guessed(guessed) is policy


def test_levelling_off_is_shown_and_calls_for_nothing() -> None:
    """An outlook is among the findings of a verdict, after the evidence, and changes no call."""
    outlook = Evidence(Kind.FRACTION, 0.98, None, "0 % to 2 % of the range so far may be gained")
    verdict = build_policy([MetricRole.EVAL]).judge([replace(NO_EVIDENCE, outlook=outlook)], step=3, evals=3)
    assert verdict.verdict is Call.CONTINUE
    assert [(item.detector, item.value) for item in verdict.evidence] == [("fake", 0.0), ("levelled_off", 0.98)]


FOCUS: dict[str, Any] = {"detector": "focus", "stop_at": {"risk": 0.01}}
COLLAPSE: dict[str, Any] = {"detector": "collapse"}
COUNT: dict[str, Any] = {"detector": "k_decline", "params": {"k": 3}}
THRESHOLDS = next(thresholds for detector, thresholds in SHIPPED.items() if detector.name == "focus")


@pytest.mark.parametrize(("name", "risk"), [("default", 0.016), ("early", 0.071), ("cautious", 0.001), ("paper", None)])
def test_shipped_policies_state_their_risk(name: str, risk: float | None) -> None:
    """A shipped policy, also when read from its document, has the risk of its description."""
    assert compute_stated_risk(policy_from_document(policy_to_document(POLICIES[name]))) == pytest.approx(risk)


@pytest.mark.parametrize(
    ("members", "terms", "risk"),
    [
        ([FOCUS, COLLAPSE], {}, 0.011),
        ([FOCUS, COUNT], {}, None),
        ([FOCUS, COLLAPSE], {"at_least": 2}, 0.0055),
        ([FOCUS | {"stop_at": 0.2}], {}, None),
        ([COLLAPSE | {"stop_at": 20.0}], {}, None),
        ([FOCUS | {"params": {"candidates": 16}, "stop_at": THRESHOLDS[0.01]}], {}, None),
    ],
    ids=["any", "one without a risk", "both", "custom threshold", "custom evidence", "custom parameters"],
)
def test_risks_of_members_add_up(members: list[dict[str, Any]], terms: dict[str, Any], risk: float | None) -> None:
    """Risks of members that can each stop add up; the result is None if a member without a risk can stop."""
    stated = compute_stated_risk(policy_from_document({"name": "mine", "members": members} | terms))
    assert stated == pytest.approx(risk)
