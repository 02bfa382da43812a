"""Fusion: the look-up of the model, its monotony, the members inside it, and models that are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import msgspec
import pytest
from evalstop_detectors import Kind, MetricRole, Observation
from evalstop_detectors.detectors.fusion import (
    CALMING,
    FEATURES,
    MEMBERS,
    Fusion,
    FusionModel,
    FusionState,
    StepFunction,
    features,
)
from evalstop_detectors.detectors.fusion_model import MODELS
from evalstop_detectors.errors import InvalidPolicy
from evalstop_detectors.policy.codec import policy_from_document, policy_to_document
from evalstop_detectors.policy.shipped import POLICIES
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.strategies import eval_series, fusion_models, series

SHIPPED = msgspec.convert(MODELS["worlds-1"]["model"], FusionModel)

evidence_values = st.sampled_from([0.0, 0.05, 1.0, 3.5, 1e9, 1e300]) | st.floats(0, 1e300)
vectors = st.tuples(*[evidence_values] * len(FEATURES))
models = fusion_models | st.just(SHIPPED)
runs = series({MetricRole.EVAL, MetricRole.PROXY}, st.integers(-9, 9).map(float), max_size=24)


def last_state(observations: Sequence[Observation]) -> FusionState:
    detector = Fusion()
    state = detector.start()
    for observation in observations:
        state, _ = detector.step(state, observation)
    return state


def document(model: object) -> dict[str, object]:
    return {"name": "own", "members": [{"detector": "fusion", "params": {"model": model}}]}


@given(model=models, values=vectors)
def test_the_posterior_is_the_sum_of_all_steps_passed(model: FusionModel, values: tuple[float, ...]) -> None:
    """The slow way, adding up every step that lies below the value, comes to the same probability."""
    log_odds = model.log_odds
    for function in model.functions:
        value = values[FEATURES.index(function.feature)]
        steps = zip(function.at, function.log_odds, function.log_odds[1:], strict=False)
        log_odds += function.log_odds[0] + math.fsum(after - before for at, before, after in steps if value > at)
    expected = 0.0 if log_odds < -700 else 1.0 if log_odds > 700 else 1 / (1 + math.exp(-log_odds))
    assert model.posterior(values) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_a_step_begins_above_its_place() -> None:
    """A value that lies exactly on a step has not passed it."""
    function = StepFunction("cusum", (1.0, 2.0), (0.5, 1.5, 4.0))
    assert [function(value) for value in (0.0, 1.0, 1.5, 2.0, 2.5)] == [0.5, 0.5, 1.5, 1.5, 4.0]


@given(model=models, values=vectors)
def test_a_probability_lies_between_0_and_1(model: FusionModel, values: tuple[float, ...]) -> None:
    """Whatever the members say, however sure."""
    assert 0 <= model.posterior(values) <= 1


@given(model=models, values=vectors, index=st.integers(0, len(FEATURES) - 1), more=evidence_values)
def test_more_evidence_never_lowers_the_posterior(
    model: FusionModel, values: tuple[float, ...], index: int, more: float
) -> None:
    """Raising one feature raises the probability or leaves it; of one that calms it is the other way round."""
    low, high = sorted([values[index], more])
    lower = model.posterior((*values[:index], low, *values[index + 1 :]))
    higher = model.posterior((*values[:index], high, *values[index + 1 :]))
    assert lower >= higher if FEATURES[index] in CALMING else lower <= higher


@given(observations=runs)
def test_members_inside_see_what_they_would_see_alone(observations: list[Observation]) -> None:
    """The state of each member, and its evidence, are those that it has by itself."""
    state = last_state(observations)
    for index, (name, detector) in enumerate(MEMBERS.items()):
        alone, value = detector.start(), 0.0
        for observation in observations:
            if observation.role in detector.roles:
                alone, evidence = detector.step(alone, observation)
                value = evidence.value
        assert getattr(state, name) == alone
        assert state.values[index] == value


@given(observations=series({MetricRole.EVAL}, st.integers(-9, 9).map(float), max_size=24))
def test_without_a_proxy_gold_is_judged_alone(observations: list[Observation]) -> None:
    """Members that would look at the proxy say what they say without one, and there is a probability all the same."""
    state = last_state(observations)
    named = dict(zip(FEATURES, features(state), strict=True))
    assert named["plateau_drop"] == named["gold_drop"]
    assert not observations or state.evidence.kind is Kind.POSTERIOR
    assert not any(item.finite for item in observations) or 0 < state.evidence.value < 1


@given(observations=runs)
def test_the_proxy_alone_moves_nothing(observations: list[Observation]) -> None:
    """Between evals the probability stays, because gold decides."""
    detector = Fusion()
    state = detector.start()
    for observation in observations:
        before = state.evidence
        state, evidence = detector.step(state, observation)
        assert observation.role is MetricRole.EVAL or evidence == before


def test_a_dip_is_healed_by_a_better_gold_alone() -> None:
    """A dip that ends on the level before it is not healed yet; gold above that level heals it."""
    rise, plateau, dip = [n / 10 for n in range(20)], [1.9] * 45, [1.2] * 10
    fallen = last_state(eval_series([*rise, *plateau, *dip]))
    back = last_state(eval_series([*rise, *plateau, *dip, *plateau[:5]]))
    above = last_state(eval_series([*rise, *plateau, *dip, 2.0, 2.1, 2.2]))
    assert (fallen.healed, back.healed) == (0, 0)
    assert above.healed == fallen.largest > 0
    assert above.largest == 0


@given(observations=runs)
def test_a_dip_counts_as_healed_at_the_next_best(observations: list[Observation]) -> None:
    """What was healed never shrinks, and is never more than the largest plateau_drop there was."""
    detector = Fusion()
    state, healed, largest = detector.start(), 0.0, 0.0
    for observation in observations:
        state, _ = detector.step(state, observation)
        assert healed <= state.healed <= largest
        healed, largest = state.healed, max(largest, state.values[0])


def test_a_run_that_fell_far_is_past_its_turn() -> None:
    """A rise and a long fall from it come near certainty, the rise alone does not come near to that."""
    rise = [1 - 0.9**n for n in range(30)]
    fall = [0.95 - 0.03 * n for n in range(25)]
    rising, fallen = last_state(eval_series(rise)), last_state(eval_series([*rise, *fall]))
    assert rising.evidence.value < 0.3
    assert fallen.evidence.value > 0.9
    assert fallen.evidence.turn_step is not None
    assert 20 <= fallen.evidence.turn_step <= 35
    assert "plateau_drop" in fallen.evidence.note


def test_its_state_does_not_grow_with_the_run() -> None:
    """After ten times as many evals the stored state is hardly longer."""
    wave = eval_series([math.sin(n / 7) + math.sin(n * n) / 9 for n in range(4000)])
    short, long = (len(msgspec.json.encode(last_state(wave[:count]))) for count in (400, 4000))
    assert long < 1.5 * short


def test_a_model_of_ones_own_is_part_of_the_policy() -> None:
    """What train-fusion prints goes into a policy, and comes out of it unchanged, through JSON."""
    own = {"log_odds": -1.5, "functions": [{"feature": "cusum", "at": [1.0, 7.5], "log_odds": [0.0, 0.5, 3.0]}]}
    policy = policy_from_document(document(own))
    stored = json.loads(json.dumps(policy_to_document(policy)))
    assert stored["members"][0]["params"]["model"] == own
    assert policy_from_document(stored) == policy


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ({"feature": "cusum", "at": [1.0], "log_odds": [0.0]}, "one number more"),
        ({"feature": "cusum", "at": [1.0, 1.0], "log_odds": [0.0, 1.0, 2.0]}, "`at` rise"),
        ({"feature": "cusum", "at": [1.0], "log_odds": [1.0, 0.0]}, "fall nowhere"),
        ({"feature": "healed", "at": [1.0], "log_odds": [0.0, 1.0]}, "rise nowhere"),
        ({"feature": "moon", "at": [1.0], "log_odds": [0.0, 1.0]}, "moon"),
    ],
)
def test_a_model_that_makes_no_sense_is_refused(function: dict[str, object], words: str) -> None:
    """The message says what is wrong with the model, and the policy says where."""
    with pytest.raises(InvalidPolicy, match=words):
        policy_from_document(document({"log_odds": 0.0, "functions": [function]}))


def test_a_model_counts_no_feature_twice() -> None:
    """A feature that is named twice is a mistake."""
    function = {"feature": "cusum", "at": [1.0], "log_odds": [0.0, 1.0]}
    with pytest.raises(InvalidPolicy, match="once"):
        policy_from_document(document({"log_odds": 0.0, "functions": [function, function]}))


def test_no_shipped_policy_has_it() -> None:
    """Fusion is off unless a policy names it."""
    assert all(member.detector.name != "fusion" for policy in POLICIES.values() for member in policy.members)
