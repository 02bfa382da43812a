"""Random assignment of decisions: shares are met, draws are independent and reproducible."""

from __future__ import annotations

from itertools import product
from uuid import UUID

import pytest
from evalstop_service.domain.confidence_sequences import (
    CARRIED_OUT,
    HELD_OUT,
    StageNumbers,
    draw_number,
    observed_probability,
)
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.domain.statuses import Stage
from evalstop_service.store import rollout_stages, tables
from evalstop_service.store.database import Database
from evalstop_service.store.rollout_stages import RolloutStage
from hypothesis import given
from hypothesis import strategies as st

from tests.service.project_fixture import (
    ONE_HOUR_LATER,
    ProjectFixture,
    lift_stop_limits,
    load_stop_delivery_states,
    set_up_project,
)

IDS = [UUID(int=number << 64) for number in range(5_000)]


@given(st.text(max_size=64), st.uuids(), st.text(max_size=32))
def test_draw_is_reproducible(seed: str, decision_id: UUID, question: str) -> None:
    """The number depends on seed, id and question alone, so anyone can verify it."""
    number = draw_number(seed, decision_id, question)
    assert 0 <= number < 1
    assert draw_number(seed, UUID(str(decision_id)), question) == number


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("seed", ["", "a", "b"])
def test_held_out_share_is_met(seed: str, share: float) -> None:
    """Of 5,000 consecutive ids the requested share is held out, within four standard errors."""
    count = sum(draw_number(seed, decision_id, HELD_OUT) < share for decision_id in IDS)
    assert abs(count / len(IDS) - share) <= 4 * (share * (1 - share) / len(IDS)) ** 0.5


def test_draws_are_independent_across_questions_and_seeds() -> None:
    """Draws for another question, or with another seed, agree no more often than by chance."""
    questions = list(product(("a", "b"), (CARRIED_OUT, HELD_OUT)))
    drawn = [[draw_number(seed, decision_id, question) < 0.5 for decision_id in IDS] for seed, question in questions]
    for index, first in enumerate(drawn):
        for second in drawn[index + 1 :]:
            agree = sum(left == right for left, right in zip(first, second, strict=True))
            assert abs(agree / len(IDS) - 0.5) < 4 * 0.5 / len(IDS) ** 0.5


@given(st.floats(0, 1), st.floats(0, 1))
def test_observed_probability_adds_both_paths(enforced: float, held_out: float) -> None:
    """A run goes on when its policy does not enforce the stop, or enforces it and the stop is held out."""
    expected = (1 - enforced) + enforced * held_out
    assert observed_probability(enforced, held_out) == pytest.approx(expected)


def set_held_out_share(project: ProjectFixture, share: float) -> None:
    with project.database.transaction() as tx:
        tx.execute(tables.projects.update().values(held_out_share=share, seed="a seed"))


def test_held_out_stop_is_not_announced(veto_project: ProjectFixture) -> None:
    """A held-out run goes on; the draw is recorded, and the decision has no guards and no deadline."""
    set_held_out_share(veto_project, 1.0)
    run, decision = veto_project.open_declining_run()
    assert (decision.state, decision.observed_probability, decision.deadline_at) == (DecisionState.HELD_OUT, 1.0, None)
    assert not decision.stops
    assert load_stop_delivery_states(veto_project) == []
    assert veto_project.load_events(run, "run.stop_requested") == []
    (change,) = veto_project.load_rows(tables.decision_changes, run)
    number = draw_number("a seed", decision.id, HELD_OUT)
    assert change["details"] == {"held_out_share": 1.0, "drawn": number}


def test_every_decision_records_its_probability(database: Database) -> None:
    """The draw from its id tells whether a stop is held out; all record the same probability."""
    project = set_up_project(database)
    lift_stop_limits(database)
    set_held_out_share(project, 0.3)
    for _ in range(12):
        _, decision = project.open_declining_run()
        held_out = draw_number("a seed", decision.id, HELD_OUT) < 0.3
        assert (decision.state == DecisionState.HELD_OUT) == held_out
        assert decision.observed_probability == pytest.approx(0.3)


def test_shadow_decision_is_always_observed(database: Database) -> None:
    """A shadow decision has the observed probability 1: nothing is drawn."""
    project = set_up_project(database, "shadow")
    set_held_out_share(project, 0.5)
    _, decision = project.open_declining_run()
    assert (decision.state, decision.observed_probability) == (DecisionState.SHADOW, 1.0)


def test_canary_enforces_a_random_share(database: Database) -> None:
    """A canary's stops are enforced at random by its share, and of these a share is held out."""
    project = set_up_project(database)
    lift_stop_limits(database)
    set_held_out_share(project, 0.5)
    with database.transaction() as tx:
        canary = RolloutStage(project.id, "paper", Stage.CANARY, 0.9, 0.4, ONE_HOUR_LATER, StageNumbers(), 1)
        rollout_stages.save_stage(tx, canary)
    for _ in range(12):
        run, decision = project.open_declining_run()
        enforce_draw, hold_out_draw = (
            draw_number("a seed", decision.id, question) for question in (CARRIED_OUT, HELD_OUT)
        )
        enforced_state = DecisionState.HELD_OUT if hold_out_draw < 0.5 else DecisionState.REQUESTED
        assert decision.state in (
            {enforced_state, DecisionState.ON_HOLD} if enforce_draw < 0.4 else {DecisionState.SHADOW}
        )
        assert decision.observed_probability == pytest.approx(0.6 + 0.4 * 0.5)
        if enforce_draw >= 0.4:
            (change,) = project.load_rows(tables.decision_changes, run)
            assert change["details"] == {"enforced_share": 0.4, "drawn": enforce_draw}
