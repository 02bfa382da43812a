"""What is left to chance is left to nothing else, and can be drawn again."""

from __future__ import annotations

import uuid
from itertools import product
from uuid import UUID

import pytest
from evalstop_service.rules import random_assignment
from evalstop_service.rules.confidence_sequences import StageNumbers
from evalstop_service.rules.decision_lifecycle import DecisionState
from evalstop_service.rules.statuses import Stage
from evalstop_service.store import rollout_stages, tables
from evalstop_service.store.database import Database
from evalstop_service.store.rollout_stages import RolloutStage
from hypothesis import given
from hypothesis import strategies as st

from tests.service.project_fixture import (
    DECLINING_EVALS,
    ONE_HOUR_LATER,
    ProjectFixture,
    lift_stop_limits,
    load_stop_delivery_states,
    set_up_project,
)

IDS = [UUID(int=number << 64) for number in range(20_000)]


@given(st.text(max_size=64), st.uuids(), st.text(max_size=32))
def test_drawn_again_it_is_the_same(seed: str, decision_id: UUID, question: str) -> None:
    """The id and the seed decide, and whoever has them can see that nobody chose."""
    number = random_assignment.draw_number(seed, decision_id, question)
    assert 0 <= number < 1
    assert random_assignment.draw_number(seed, UUID(str(decision_id)), question) == number


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("seed", ["", "a", "b"])
def test_the_share_that_is_held_out_is_the_share_that_was_asked_for(seed: str, share: float) -> None:
    """Of 20,000 ids in a row so many are below it, up to four standard errors."""
    count = sum(
        random_assignment.draw_number(seed, decision_id, random_assignment.HELD_OUT) < share for decision_id in IDS
    )
    assert abs(count / len(IDS) - share) <= 4 * (share * (1 - share) / len(IDS)) ** 0.5


def test_questions_and_seeds_draw_apart() -> None:
    """What chance says to one question, or with one seed, tells nothing of another."""
    questions = list(product(("a", "b"), (random_assignment.CARRIED_OUT, random_assignment.HELD_OUT)))
    drawn = [[random_assignment.draw_number(seed, one, question) < 0.5 for one in IDS] for seed, question in questions]
    for index, one in enumerate(drawn):
        for other in drawn[index + 1 :]:
            agree = sum(left == right for left, right in zip(one, other, strict=True))
            assert abs(agree / len(IDS) - 0.5) < 4 * 0.5 / len(IDS) ** 0.5


@given(st.floats(0, 1), st.floats(0, 1))
def test_each_road_to_the_truth_is_counted(enforced: float, held_out: float) -> None:
    """A run goes on when its policy has not earned the stop, or has and the stop is held out."""
    expected = (1 - enforced) + enforced * held_out
    assert random_assignment.observed_probability(enforced, held_out) == pytest.approx(expected)


def hold_out(project: ProjectFixture, share: float) -> None:
    with project.database.transaction() as tx:
        tx.execute(tables.projects.update().values(held_out_share=share, seed="a seed"))


def test_a_held_out_stop_is_told_to_nobody(veto_project: ProjectFixture) -> None:
    """Its run goes on; the numbers of the chance are on record, and no guard and no deadline looks after it."""
    hold_out(veto_project, 1.0)
    run = veto_project.open_run()
    receipt = veto_project.post_observations(run, DECLINING_EVALS)
    decision = receipt.decision
    assert decision is not None
    assert (decision.state, decision.observed_probability, decision.deadline_at) == (DecisionState.HELD_OUT, 1.0, None)
    assert not decision.stops(ONE_HOUR_LATER)
    assert load_stop_delivery_states(veto_project) == []
    assert veto_project.load_events(run, "run.stop_requested") == []
    (change,) = veto_project.load_rows(tables.decision_changes, run)
    number = random_assignment.draw_number("a seed", decision.id, random_assignment.HELD_OUT)
    assert change["details"] == {"held_out_share": 1.0, "drawn": number}


def test_some_are_held_out_and_all_say_how_likely_it_was(database: Database) -> None:
    """Whether a stop is held out can be told from its id; those carried out say the same probability."""
    project = set_up_project(database)
    lift_stop_limits(database)
    hold_out(project, 0.3)
    for _ in range(30):
        run = project.open_run(uuid.uuid4().hex)
        decision = project.post_observations(run, DECLINING_EVALS).decision
        assert decision is not None
        held_out = random_assignment.draw_number("a seed", decision.id, random_assignment.HELD_OUT) < 0.3
        assert (decision.state == DecisionState.HELD_OUT) == held_out
        assert decision.observed_probability == pytest.approx(0.3)


def test_a_shadow_is_always_observed(database: Database) -> None:
    """Nothing is left to chance where nothing is carried out."""
    project = set_up_project(database, "shadow")
    hold_out(project, 0.5)
    run = project.open_run()
    decision = project.post_observations(run, DECLINING_EVALS).decision
    assert decision is not None
    assert (decision.state, decision.observed_probability) == (DecisionState.SHADOW, 1.0)


def test_what_a_policy_has_not_earned_is_not_carried_out(database: Database) -> None:
    """Of a canary's stops a share is carried out, by a chance of its own, and of these a share is held out."""
    project = set_up_project(database)
    lift_stop_limits(database)
    hold_out(project, 0.5)
    with database.transaction() as tx:
        canary = RolloutStage(project.id, "paper", Stage.CANARY, 0.9, 0.4, ONE_HOUR_LATER, StageNumbers(), 1)
        rollout_stages.save_stage(tx, canary)
    for _ in range(30):
        run = project.open_run(uuid.uuid4().hex)
        decision = project.post_observations(run, DECLINING_EVALS).decision
        assert decision is not None
        earned, kept = (
            random_assignment.draw_number("a seed", decision.id, of)
            for of in (random_assignment.CARRIED_OUT, random_assignment.HELD_OUT)
        )
        earned_state = DecisionState.HELD_OUT if kept < 0.5 else DecisionState.REQUESTED
        assert decision.state in ({earned_state, DecisionState.ON_HOLD} if earned < 0.4 else {DecisionState.SHADOW})
        assert decision.observed_probability == pytest.approx(0.6 + 0.4 * 0.5)
        if earned >= 0.4:
            (change,) = project.load_rows(tables.decision_changes, run)
            assert change["details"] == {"enforced_share": 0.4, "drawn": earned}
