"""How a policy combines the evidence of its members: weights, gates, risks, guessed roles and grounds."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import pytest
from evalstop_detectors import (
    Call,
    Detector,
    Evidence,
    Ground,
    InvalidPolicy,
    Kind,
    Member,
    MetricRole,
    Policy,
    Thresholds,
    policy_from_document,
    policy_to_document,
)
from evalstop_detectors.policy.calibration import SHIPPED
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.detectors.strategies import reachable_sums, weight_lists

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


def build_policy(weights: Sequence[float], roles: Sequence[MetricRole] = (), **more: Any) -> Policy:
    """A policy of one fake detector per weight; roles default to eval."""
    all_roles = [*roles, *[MetricRole.EVAL] * len(weights)]
    fakes = [FakeDetector(role) for role in all_roles[: len(weights)]]
    members = tuple(Member(fake, fake.thresholds, weight) for fake, weight in zip(fakes, weights, strict=True))
    return Policy("p", members, **more)


@st.composite
def judgments(draw: st.DrawFn, /, **fixed: Any) -> tuple[Policy, EvidenceList]:
    """A policy of fake detectors, and evidence for its members."""
    size = draw(st.integers(1, 5))
    weights = draw(st.just([1.0] * size) | weight_lists(size))
    policy = build_policy(
        weights,
        draw(
            st.lists(
                st.sampled_from([MetricRole.EVAL, MetricRole.EVAL, MetricRole.PROXY]), min_size=size, max_size=size
            )
        ),
        at_least=draw(reachable_sums(weights)),
        suspect_at_least=draw(reachable_sums(weights)),
        eval_required=draw(st.booleans()),
        min_evals=draw(st.sampled_from([0, 0, 0, 11])),
        warmup_steps=draw(st.sampled_from([0, 0, 0, 101])),
    )
    gate = draw(st.just([]) | st.lists(st.sampled_from(policy.ids), unique=True, max_size=2))
    policy = replace(policy, **({"gate": tuple(gate)} | fixed))
    return policy, draw(st.lists(evidences, min_size=size, max_size=size))


def judge(policy: Policy, evidence: EvidenceList) -> Call:
    """The call of a policy at step 100 after 10 evals."""
    return policy.judge(evidence, step=100, evals=10).verdict


@settings(max_examples=100)
@given(judgment=judgments())
def test_verdict_equals_slow_reading_of_the_keys(judgment: tuple[Policy, EvidenceList]) -> None:
    """The verdict equals that of a slow evaluation of each key, and has the earliest turn of those that call for it."""
    policy, evidence = judgment
    members = list(zip(policy.ids, policy.members, evidence, strict=True))
    calling = [(name, member) for name, member, item in members if item is STOP_EVIDENCE]
    alarmed = [member for _, member, item in members if item is STOP_EVIDENCE or item is SUSPECT_EVIDENCE]
    stop_weight = sum(round(10 * member.weight) for _, member in calling)
    alarm_weight = sum(round(10 * member.weight) for member in alarmed)
    enough = stop_weight > 0 and stop_weight >= round(10 * policy.at_least, 6)
    suspicious = alarm_weight > 0 and alarm_weight >= round(10 * policy.suspect_at_least, 6)
    has_eval = any(member.weight and member.detector.roles == {MetricRole.EVAL} for _, member in calling)
    open_gate = all(name in [called for called, _ in calling] for name in policy.gate)
    is_allowed = (
        open_gate and policy.min_evals <= 10 and policy.warmup_steps <= 100 and (has_eval or not policy.eval_required)
    )
    expected = Call.STOP if enough and is_allowed else Call.SUSPECT if enough or suspicious else Call.CONTINUE
    verdict = policy.judge(evidence, step=100, evals=10)
    assert verdict.verdict is expected
    suspected = [4] * any(member.weight and item is SUSPECT_EVIDENCE for _, member, item in members)
    called = [6] * any(member.weight for _, member in calling)
    turns = {Call.STOP: called, Call.SUSPECT: suspected + called, Call.CONTINUE: []}[expected]
    assert verdict.turn_step == min(turns, default=None)


@given(judgment=judgments(), scale=st.sampled_from([1e-3, 0.1, 0.3, 7.0, 1e4]))
def test_only_ratios_of_weights_matter(judgment: tuple[Policy, EvidenceList], scale: float) -> None:
    """Multiplying all weights and both limits by the same number changes no verdict."""
    policy, evidence = judgment
    scaled = replace(
        policy,
        members=tuple(replace(member, weight=scale * member.weight) for member in policy.members),
        at_least=scale * policy.at_least,
        suspect_at_least=scale * policy.suspect_at_least,
    )
    assert judge(scaled, evidence) is judge(policy, evidence)


@given(judgment=judgments())
def test_closed_gate_withholds_a_stop(judgment: tuple[Policy, EvidenceList]) -> None:
    """A gate allows a stop only if its members call for it; otherwise the reason names one that does not."""
    policy, evidence = judgment
    ungated = replace(policy, gate=())
    if judge(ungated, evidence) is not Call.STOP:
        assert judge(policy, evidence) is judge(ungated, evidence)
        return
    closed = [n for n, item in zip(policy.ids, evidence, strict=True) if n in policy.gate and item is not STOP_EVIDENCE]
    verdict = policy.judge(evidence, step=100, evals=10)
    assert verdict.stops == (not closed)
    assert verdict.stops or f"no stop: {closed[0]} must also call for one, but does not" in verdict.reason


def test_gate_member_has_weight_0_by_default() -> None:
    """A gate member has weight 0, so that it cannot stop by itself, unless the policy gives it a weight."""
    members: list[dict[str, Any]] = [{"detector": "k_decline"}, {"detector": "k_below_best", "params": {"k": 2}}]
    read = policy_from_document({"name": "p", "members": members, "gate": ["k_below_best"]})
    assert [member.weight for member in read.members] == [1.0, 0.0]
    members[1]["weight"] = 3
    weighted = policy_from_document({"name": "p", "members": members, "gate": ["k_below_best"], "at_least": "all"})
    assert ([member.weight for member in weighted.members], weighted.at_least) == ([1.0, 3.0], 4.0)


def test_any_and_all_follow_the_weights() -> None:
    """`any` is the smallest weight above 0, `all` the sum of the weights."""
    members = [{"detector": "k_decline", "weight": weight} for weight in (0.7, 0.1, 0)]
    any_of = policy_from_document({"name": "p", "members": members, "at_least": "any"})
    all_of = policy_from_document({"name": "p", "members": members, "at_least": "all"})
    assert any_of.at_least == 0.1
    assert all_of.at_least == pytest.approx(0.8)
    as_written = policy_from_document({"name": "p", "members": members, "at_least": 0.8})
    assert judge(build_policy([0.7, 0.1], at_least=as_written.at_least), [STOP_EVIDENCE, STOP_EVIDENCE]) is Call.STOP


def test_insufficient_suspicion_is_explained() -> None:
    """If the weights of the alarmed members are too small, the verdict is continue with that reason."""
    policy = build_policy([1, 1], at_least=2, suspect_at_least=2)
    verdict = policy.judge([SUSPECT_EVIDENCE, NO_EVIDENCE], step=1, evals=1)
    assert verdict.verdict is Call.CONTINUE
    assert verdict.reason == "the detectors that are alarmed weigh 1 of the 2 needed to suspect"


def test_call_for_a_stop_is_an_alarm() -> None:
    """A member that calls for a stop counts among those that suspect, also without a threshold to suspect."""
    policy = build_policy([1, 1], at_least=2)
    policy = replace(policy, members=tuple(replace(m, thresholds=Thresholds(None, 2)) for m in policy.members))
    assert judge(policy, [STOP_EVIDENCE, NO_EVIDENCE]) is Call.SUSPECT


def test_member_without_weight_adds_no_turn() -> None:
    """The turn of a stop is not that of a member whose weight is 0."""
    evidence: EvidenceList = [STOP_EVIDENCE, replace(STOP_EVIDENCE, turn_step=1)]
    assert build_policy([1, 0]).judge(evidence, step=100, evals=10).turn_step == STOP_EVIDENCE.turn_step


def test_default_member_ids_are_detector_names() -> None:
    """Members without an id are named after their detector, with numbers that avoid the given ids."""
    members = [{"detector": "k_decline"}, {"detector": "k_decline"}, {"detector": "k_below_best", "id": "k_decline"}]
    policy = policy_from_document({"name": "p", "members": members})
    assert policy.ids == ("k_decline-2", "k_decline-3", "k_decline")
    assert policy_from_document(policy_to_document(policy)).ids == policy.ids


@pytest.mark.parametrize(
    ("other", "gate", "words"),
    [
        ({"detector": "k_below_best", "id": "b"}, ["b", "k_decline"], "no member has a weight"),
        ({"detector": "non_finite"}, ["non_finite"], r"non_finite never calls for a stop.* at `\$\.gate\[0\]`"),
    ],
)
def test_impossible_policy_is_refused(other: dict[str, Any], gate: list[str], words: str) -> None:
    """A policy that could never stop because of its weights or its gate is refused."""
    with pytest.raises(InvalidPolicy, match=words):
        policy_from_document({"name": "p", "members": [{"detector": "k_decline"}, other], "gate": gate})


def build_document_with_risk(risk: float, **more: Any) -> dict[str, Any]:
    """A policy document whose only member has a threshold given as a risk."""
    member = {"detector": "focus", "suspect_at": None, "stop_at": {"risk": risk}}
    return {"name": "p", "members": [member | more]}


def test_risk_is_replaced_by_its_threshold() -> None:
    """A threshold given as a risk becomes the calibrated number, which is what is stored."""
    policy = policy_from_document(build_document_with_risk(0.01))
    (calibrated,) = (thresholds for detector, thresholds in SHIPPED if detector.name == "focus")
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
    assert error.value.path == ("members", 0, "stop_at", "risk")
    for word in words:
        assert word in str(error.value)


def test_document_without_newer_keys_is_read() -> None:
    """A document without weights, gate and suspect_at_least gives the same policy as with their defaults."""
    old = policy_to_document(policy_from_document({"name": "p", "members": [{"detector": "k_decline"}] * 2}))
    older = copy.deepcopy(old)
    for key in ("gate", "suspect_at_least"):
        del older[key]
    for member in older["members"]:
        del member["weight"]
    assert policy_from_document(older | {"at_least": 1}) == policy_from_document(old)


def test_shipped_calibrations_are_consistent() -> None:
    """Shipped thresholds are above 0 and no lower for smaller risks; each detector has one calibration."""
    for detector, thresholds in SHIPPED:
        assert all(threshold > 0 for threshold in thresholds.values())
        assert list(thresholds) == sorted(thresholds)
        assert all(stricter >= laxer for stricter, laxer in pairwise(thresholds.values()))  # counts may coincide
        assert sum(other == detector for other, _ in SHIPPED) == 1


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
    weights = data.draw(st.lists(st.sampled_from([0.5, 1.0]), min_size=size, max_size=size))
    evidence: EvidenceList = data.draw(st.lists(evidences, min_size=size, max_size=size))
    policy = build_policy(weights, roles, at_least=1.0, suspect_at_least=0.5, eval_required=eval_required)
    plain, with_guesses = policy.judge(evidence, 10, 10), policy.with_guessed(guessed).judge(evidence, 10, 10)
    known: EvidenceList = [None if role in guessed else item for role, item in zip(roles, evidence, strict=True)]
    stops = plain.stops and policy.judge(known, 10, 10).stops
    assert with_guesses.verdict == (Call.STOP if stops else min(plain.verdict, Call.SUSPECT, key=CALL_ORDER.index))
    assert ("guessed" in with_guesses.reason) == (plain.stops and not stops)
    if not guessed:
        assert policy.with_guessed(guessed) is policy


def test_gate_on_a_guessed_role_stays_closed() -> None:
    """A gate member with a guessed role does not open the gate, and the reason says so."""
    policy = build_policy([1.0, 1.0], [MetricRole.EVAL, MetricRole.PROXY], gate=("fake-2",))
    evidence: EvidenceList = [STOP_EVIDENCE, STOP_EVIDENCE]
    assert policy.judge(evidence, 10, 10).stops
    guessed = policy.with_guessed([MetricRole.PROXY]).judge(evidence, 10, 10)
    assert "the proxy, or its direction, is guessed" in guessed.reason


LEVELLED_OFF = replace(
    NO_EVIDENCE, outlook=Evidence(Kind.FRACTION, 0.98, None, "0 % to 2 % of the range so far may be gained")
)


@pytest.mark.parametrize(
    ("stop_on", "evidence", "call", "ground"),
    [
        ((Ground.TURNED,), LEVELLED_OFF, Call.CONTINUE, None),
        (tuple(Ground), LEVELLED_OFF, Call.STOP, Ground.LEVELLED_OFF),
        (tuple(Ground), replace(LEVELLED_OFF, value=2.0), Call.STOP, Ground.TURNED),
        ((Ground.LEVELLED_OFF,), STOP_EVIDENCE, Call.SUSPECT, None),
        (tuple(Ground), NO_EVIDENCE, Call.CONTINUE, None),
    ],
)
def test_ground_of_a_stop(stop_on: tuple[Ground, ...], evidence: Evidence, call: Call, ground: Ground | None) -> None:
    """Levelling off stops a run only if `stop_on` has it, and the verdict names the ground."""
    verdict = build_policy([1.0], stop_on=stop_on).judge([evidence], step=3, evals=3)
    assert (verdict.verdict, verdict.ground) == (call, ground)
    outlooks = [(item.value, item.stop_at) for item in verdict.evidence if item.detector == "levelled_off"]
    assert outlooks == ([(0.98, 0.97 if len(stop_on) == 2 else None)] if evidence.outlook else [])
    if ground is Ground.LEVELLED_OFF:
        assert verdict.reason == "levelled off: fake: 0 % to 2 % of the range so far may be gained"


def test_levelled_off_stop_needs_the_other_conditions() -> None:
    """A levelled-off run is only suspect until the other conditions of a stop are met."""
    verdict = build_policy([1.0], stop_on=tuple(Ground), min_evals=9).judge([LEVELLED_OFF], step=3, evals=3)
    assert verdict.verdict is Call.SUSPECT
    assert verdict.reason.startswith("levelled off: fake: ")
    assert verdict.reason.endswith("; no stop: the run has 3 evals of the 9 needed")


def test_stop_on_levelled_off_needs_a_member_that_detects_it() -> None:
    """`levelled_off` is refused without a member that detects it; otherwise it is read back with its threshold."""
    members = [{"detector": "k_decline"}]
    with pytest.raises(InvalidPolicy, match="no member detects whether the eval has levelled off"):
        policy_from_document({"name": "p", "members": members, "stop_on": ["levelled_off"]})
    policy = policy_from_document(
        {"name": "p", "members": [*members, {"detector": "posterior"}], "stop_on": ["levelled_off", "turned"]}
    )
    assert policy_from_document(policy_to_document(policy)) == policy
    assert policy_to_document(policy)["levelled_off_at"] == 0.97
    changed = policy_from_document(policy_to_document(policy) | {"levelled_off_at": 0.9})
    assert changed.levelled_off_at == 0.9
