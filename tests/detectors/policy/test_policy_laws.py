"""What holds of every policy, whatever its detectors find."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import pytest
from evalstop_detectors import (
    Call,
    Evidence,
    Ground,
    InvalidPolicy,
    Kind,
    Member,
    MetricRole,
    Observation,
    Policy,
    Thresholds,
    policy_from_document,
    policy_to_document,
)
from evalstop_detectors.policy.calibration import SHIPPED
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from tests.detectors.strategies import reachable, weightings

ORDER = [Call.CONTINUE, Call.SUSPECT, Call.STOP]
CALIBRATED: dict[str, Any] = {
    "detector": "k_decline",
    "params": {"min_delta": 0.5},
    "kind": "count",
    "thresholds": [
        {"rate": 0.01, "threshold": 7, "interval": [6, 8], "stopped": {"hits": 3}},
        {"rate": 0.001, "threshold": None},
    ],
    "command": "evalstop-lab calibrate k_decline --history ours.jsonl",
}


class FakeDetector(Struct, frozen=True):
    """Only tells which role it would look at; the evidence is given by the test."""

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

    def start(self) -> None:
        """There is no state."""

    def step(self, state: None, observation: Observation) -> tuple[None, Evidence]:
        raise NotImplementedError


Found = list[Evidence | None]

SILENT, SUSPICIOUS, CALLING = (Evidence(Kind.COUNT, value, None, f"{value:g} found") for value in (0.0, 1.0, 2.0))
evidences = st.sampled_from([None, SILENT, SUSPICIOUS, CALLING, CALLING])


def policy_of(weights: Sequence[float], roles: Sequence[MetricRole] = (), **more: Any) -> Policy:
    sees = [*roles, *[MetricRole.EVAL] * len(weights)]
    fakes = [FakeDetector(role) for role in sees[: len(weights)]]
    members = tuple(Member(fake, fake.thresholds, weight) for fake, weight in zip(fakes, weights, strict=True))
    return Policy("p", members, **more)


@st.composite
def judgments(draw: st.DrawFn, /, **fixed: Any) -> tuple[Policy, Found]:
    """A policy of fake detectors and what they found."""
    size = draw(st.integers(1, 5))
    weights = draw(st.just([1.0] * size) | weightings(size))
    policy = policy_of(
        weights,
        draw(
            st.lists(
                st.sampled_from([MetricRole.EVAL, MetricRole.EVAL, MetricRole.PROXY]), min_size=size, max_size=size
            )
        ),
        at_least=draw(reachable(weights)),
        suspect_at_least=draw(reachable(weights)),
        eval_required=draw(st.booleans()),
        min_evals=draw(st.sampled_from([0, 0, 0, 11])),
        warmup_steps=draw(st.sampled_from([0, 0, 0, 101])),
    )
    gate = draw(st.just([]) | st.lists(st.sampled_from(policy.ids), unique=True, max_size=2))
    policy = replace(policy, **({"gate": tuple(gate)} | fixed))
    return policy, draw(st.lists(evidences, min_size=size, max_size=size))


def call(policy: Policy, found: Found) -> Call:
    return policy.judge(found, step=100, evals=10).verdict


@given(judgment=judgments())
def test_a_verdict_follows_from_the_words(judgment: tuple[Policy, Found]) -> None:
    """A slow reading of each key in turn comes to the same verdict."""
    policy, found = judgment
    members = list(zip(policy.ids, policy.members, found, strict=True))
    calling = [(name, member) for name, member, item in members if item is CALLING]
    alarmed = [member for _, member, item in members if item is CALLING or item is SUSPICIOUS]
    stop_weight = sum(round(10 * member.weight) for _, member in calling)
    alarm_weight = sum(round(10 * member.weight) for member in alarmed)
    enough = stop_weight > 0 and stop_weight >= round(10 * policy.at_least, 6)
    suspicious = alarm_weight > 0 and alarm_weight >= round(10 * policy.suspect_at_least, 6)
    eval_scores = any(member.weight and member.detector.roles == {MetricRole.EVAL} for _, member in calling)
    open_gate = all(name in [called for called, _ in calling] for name in policy.gate)
    free = (
        open_gate
        and policy.min_evals <= 10
        and policy.warmup_steps <= 100
        and (eval_scores or not policy.eval_required)
    )
    wanted = Call.STOP if enough and free else Call.SUSPECT if enough or suspicious else Call.CONTINUE
    assert call(policy, found) is wanted


@given(found=st.lists(evidences, min_size=1, max_size=5))
def test_any_all_and_at_least_n(found: Found) -> None:
    """With equal weights, any is one member, all is every member, and n is n of them."""
    names = [{"detector": "k_decline"}] * len(found)
    calls = sum(item is CALLING for item in found)
    for at_least, wanted in {"any": 1, "all": len(found), (len(found) + 1) // 2: (len(found) + 1) // 2}.items():
        read = policy_from_document({"name": "p", "members": names, "at_least": at_least})
        policy = replace(policy_of([1.0] * len(found)), at_least=read.at_least)
        assert (call(policy, found) is Call.STOP) == (calls >= wanted)


@given(judgment=judgments(), scale=st.sampled_from([1e-3, 0.1, 0.3, 7.0, 1e4]))
def test_only_the_proportions_of_weights_matter(judgment: tuple[Policy, Found], scale: float) -> None:
    """All weights and what is asked of them times the same number is the same policy."""
    policy, found = judgment
    scaled = replace(
        policy,
        members=tuple(replace(member, weight=scale * member.weight) for member in policy.members),
        at_least=scale * policy.at_least,
        suspect_at_least=scale * policy.suspect_at_least,
    )
    assert call(scaled, found) is call(policy, found)


@given(judgment=judgments(), index=st.integers(0, 4))
def test_more_alarm_never_means_less(judgment: tuple[Policy, Found], index: int) -> None:
    """A member that becomes more alarmed never takes a verdict back."""
    policy, found = judgment
    index %= len(found)
    verdicts = [call(policy, [*found[:index], item, *found[index + 1 :]]) for item in (SILENT, SUSPICIOUS, CALLING)]
    assert all(ORDER.index(calmer) <= ORDER.index(worse) for calmer, worse in pairwise(verdicts))


@given(judgment=judgments(eval_required=True))
def test_the_eval_score_decides(judgment: tuple[Policy, Found]) -> None:
    """Without a call of a member that sees the eval score and has a weight nothing stops, however heavy the others
    are."""
    policy, found = judgment
    blind: Found = [
        None if member.weight and member.sees_eval else item for member, item in zip(policy.members, found, strict=True)
    ]
    assert call(policy, blind) is not Call.STOP


@given(judgment=judgments())
def test_a_closed_gate_holds_a_stop_back(judgment: tuple[Policy, Found]) -> None:
    """With a gate a stop is still a stop when its members call, and else a suspicion that names one that does not."""
    policy, found = judgment
    free = replace(policy, gate=())
    if call(free, found) is not Call.STOP:
        assert call(policy, found) is call(free, found)
        return
    silent = [n for n, item in zip(policy.ids, found, strict=True) if n in policy.gate and item is not CALLING]
    verdict = policy.judge(found, step=100, evals=10)
    assert verdict.stops == (not silent)
    assert verdict.stops or f"no stop: {silent[0]} must also call for one, but does not" in verdict.reason


def test_a_member_of_the_gate_weighs_nothing_unless_told() -> None:
    """A gate only holds back; it stops nothing by itself, unless the policy gives it a weight."""
    members: list[dict[str, Any]] = [{"detector": "k_decline"}, {"detector": "k_below_best", "params": {"k": 2}}]
    read = policy_from_document({"name": "p", "members": members, "gate": ["k_below_best"]})
    assert [member.weight for member in read.members] == [1.0, 0.0]
    members[1]["weight"] = 3
    told = policy_from_document({"name": "p", "members": members, "gate": ["k_below_best"], "at_least": "all"})
    assert ([member.weight for member in told.members], told.at_least) == ([1.0, 3.0], 4.0)


def test_any_means_any_member_whatever_the_weights() -> None:
    """`any` is the smallest weight there is, `all` the sum of them."""
    members = [{"detector": "k_decline", "weight": weight} for weight in (0.7, 0.1, 0)]
    any_of = policy_from_document({"name": "p", "members": members, "at_least": "any"})
    all_of = policy_from_document({"name": "p", "members": members, "at_least": "all"})
    assert any_of.at_least == 0.1
    assert all_of.at_least == pytest.approx(0.8)
    as_written = policy_from_document({"name": "p", "members": members, "at_least": 0.8})
    assert call(policy_of([0.7, 0.1], at_least=as_written.at_least), [CALLING, CALLING]) is Call.STOP


def test_suspicions_too_light_are_told() -> None:
    """When the members that are alarmed weigh too little the verdict is continue, and its reason says so."""
    verdict = policy_of([1, 1], at_least=2, suspect_at_least=2).judge([SUSPICIOUS, SILENT], step=1, evals=1)
    assert (verdict.verdict, verdict.reason) == (
        Call.CONTINUE,
        "the detectors that are alarmed weigh 1 of the 2 needed to suspect",
    )


def test_members_are_called_by_their_detector() -> None:
    """Without ids members are called by their detectors, numbered from the second on, around the ids that are given."""
    members = [{"detector": "k_decline"}, {"detector": "k_decline"}, {"detector": "k_below_best", "id": "k_decline"}]
    policy = policy_from_document({"name": "p", "members": members})
    assert policy.ids == ("k_decline-2", "k_decline-3", "k_decline")
    assert policy_from_document(policy_to_document(policy)).ids == policy.ids


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"gate": ["k_declin"]}, "there is no member 'k_declin'; a gate may name k_decline, b - at `$.gate[0]`"),
        ({"gate": ["b", "k_decline"]}, "no member has a weight"),
        ({"gate": ["b"], "at_least": 1.5}, "at_least is 1.5, but must be above 0 and at most 1"),
    ],
)
def test_what_no_policy_can_do_is_refused(more: dict[str, Any], words: str) -> None:
    """A policy that could never stop for its weights or its gate is refused."""
    members = [{"detector": "k_decline"}, {"detector": "k_below_best", "id": "b"}]
    with pytest.raises(InvalidPolicy) as refusal:
        policy_from_document({"name": "p", "members": members} | more)
    assert words in str(refusal.value)


def test_a_gate_that_never_opens_is_refused() -> None:
    """A member of the gate needs a threshold to stop at."""
    members = [{"detector": "k_decline"}, {"detector": "non_finite"}]
    with pytest.raises(InvalidPolicy, match=r"non_finite never calls for a stop.* at `\$\.gate\[0\]`"):
        policy_from_document({"name": "p", "members": members, "gate": ["non_finite"]})


def test_two_members_of_one_id_are_refused() -> None:
    """An id names one member."""
    members = [{"detector": "k_decline", "id": "a"}, {"detector": "k_below_best", "id": "a"}]
    with pytest.raises(InvalidPolicy, match=r"two members have the id a.* at `\$\.members\[1\]\.id`"):
        policy_from_document({"name": "p", "members": members})


def risky(risk: float, **more: Any) -> dict[str, Any]:
    member = {"detector": "k_decline", "params": {"min_delta": 0.5}, "suspect_at": None, "stop_at": {"risk": risk}}
    return {"name": "p", "members": [member | more], "calibration": [CALIBRATED]}


def test_a_risk_becomes_its_threshold() -> None:
    """A threshold by its risk is the calibrated number, and the number is what is stored."""
    policy = policy_from_document(risky(0.01))
    assert policy.members[0].thresholds == Thresholds(None, 7.0)
    document = policy_to_document(policy)
    assert document["members"][0]["stop_at"] == 7.0
    assert "calibration" not in document
    assert policy_from_document(document) == policy


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (risky(0.001), ["no threshold of k_decline is strict enough for a risk of 0.001", "larger risk"]),
        (risky(0.05), ["a risk of 0.05", "there are risks of 0.001, 0.01", "--rates 0.05"]),
        (risky(0.01, params={"k": 4}), ['{"k": 4, ', "there are none with these parameters", "evalstop-lab calibrate"]),
    ],
)
def test_a_risk_that_nobody_calibrated_is_refused(document: dict[str, Any], words: list[str]) -> None:
    """A calibration holds for exactly its parameters; the message says which there are and how to make one."""
    with pytest.raises(InvalidPolicy) as refusal:
        policy_from_document(document)
    assert refusal.value.path == ("members", 0, "stop_at", "risk")
    for word in words:
        assert word in str(refusal.value)


def test_an_older_document_is_still_read() -> None:
    """A document from before weights, gates and risks is read as it was meant."""
    old = policy_to_document(policy_from_document({"name": "p", "members": [{"detector": "k_decline"}] * 2}))
    older = copy.deepcopy(old)
    for key in ("gate", "suspect_at_least"):
        del older[key]
    for member in older["members"]:
        del member["weight"]
    assert policy_from_document(older | {"at_least": 1}) == policy_from_document(old)


def test_what_is_shipped_was_calibrated() -> None:
    """Every shipped calibration is of a detector as it is now, and stricter at smaller risks."""
    for item in SHIPPED:
        found = sorted((level.rate, level.threshold) for level in item.levels if level.threshold is not None)
        assert all(threshold > 0 for _, threshold in found)
        assert sum(other.detector == item.detector for other in SHIPPED) == 1


@given(
    st.lists(st.sampled_from(MetricRole), min_size=1, max_size=5),
    st.data(),
    st.frozensets(st.sampled_from(MetricRole)),
    st.booleans(),
)
def test_no_policy_stops_on_a_guess(
    roles: list[MetricRole], data: st.DataObject, guessed: frozenset[MetricRole], eval_required: bool
) -> None:
    """It stops as it would without the members that see a guessed role, and what that takes away is a suspicion."""
    size = len(roles)
    weights = data.draw(st.lists(st.sampled_from([0.5, 1.0]), min_size=size, max_size=size))
    found: Found = data.draw(st.lists(evidences, min_size=size, max_size=size))
    policy = policy_of(weights, roles, at_least=1.0, suspect_at_least=0.5, eval_required=eval_required)
    plain, careful = policy.judge(found, 10, 10), policy.with_guessed(guessed).judge(found, 10, 10)
    known: Found = [None if role in guessed else item for role, item in zip(roles, found, strict=True)]
    stops = plain.stops and policy.judge(known, 10, 10).stops
    assert careful.verdict == (Call.STOP if stops else min(plain.verdict, Call.SUSPECT, key=ORDER.index))
    assert ("guessed" in careful.reason) == (plain.stops and not stops)
    if not guessed:
        assert policy.with_guessed(guessed) is policy


def test_a_gate_that_sees_a_guess_stays_closed() -> None:
    """Without whose call there is no stop, its call has to be known."""
    policy = policy_of([1.0, 1.0], [MetricRole.EVAL, MetricRole.PROXY], gate=("fake-2",))
    found: Found = [CALLING, CALLING]
    assert policy.judge(found, 10, 10).stops
    assert (
        "the proxy, or its direction, is guessed" in policy.with_guessed([MetricRole.PROXY]).judge(found, 10, 10).reason
    )


LEVELLED = replace(SILENT, outlook=Evidence(Kind.FRACTION, 0.98, None, "0 % to 2 % of the range so far may be gained"))


@pytest.mark.parametrize(
    ("stop_on", "evidence", "call", "ground"),
    [
        ((Ground.TURNED,), LEVELLED, Call.CONTINUE, None),
        (tuple(Ground), LEVELLED, Call.STOP, Ground.LEVELLED_OFF),
        (tuple(Ground), replace(LEVELLED, value=2.0), Call.STOP, Ground.TURNED),
        ((Ground.LEVELLED_OFF,), CALLING, Call.SUSPECT, None),
        (tuple(Ground), SILENT, Call.CONTINUE, None),
    ],
)
def test_the_ground_of_a_stop(
    stop_on: tuple[Ground, ...], evidence: Evidence, call: Call, ground: Ground | None
) -> None:
    """That a run has levelled off stops it only where the policy says so, and the verdict says on which ground."""
    verdict = policy_of([1.0], stop_on=stop_on).judge([evidence], step=3, evals=3)
    assert (verdict.verdict, verdict.ground) == (call, ground)
    outlooks = [(item.value, item.stop_at) for item in verdict.evidence if item.detector == "levelled_off"]
    assert outlooks == ([(0.98, 0.97 if len(stop_on) == 2 else None)] if evidence.outlook else [])
    if ground is Ground.LEVELLED_OFF:
        assert verdict.reason == "levelled off: fake: 0 % to 2 % of the range so far may be gained"


def test_a_levelled_off_run_is_held_back_as_any() -> None:
    """All other conditions of a stop hold for it, too; meanwhile it is a suspicion."""
    verdict = policy_of([1.0], stop_on=tuple(Ground), min_evals=9).judge([LEVELLED], step=3, evals=3)
    assert verdict.verdict is Call.SUSPECT
    assert verdict.reason.startswith("levelled off: fake: ")
    assert verdict.reason.endswith("; no stop: the run has 3 evals of the 9 needed")


def test_who_can_tell_that_it_has_levelled_off() -> None:
    """A policy cannot stop on what none of its members tells; one that can is read back with its threshold."""
    members = [{"detector": "k_decline"}]
    with pytest.raises(InvalidPolicy, match="no member detects whether the eval has levelled off"):
        policy_from_document({"name": "p", "members": members, "stop_on": ["levelled_off"]})
    policy = policy_from_document(
        {"name": "p", "members": [*members, {"detector": "posterior"}], "stop_on": ["levelled_off", "turned"]}
    )
    assert policy_from_document(policy_to_document(policy)) == policy
    assert policy_to_document(policy)["levelled_off_at"] == 0.97
