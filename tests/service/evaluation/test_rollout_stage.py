"""Policies move up a rollout stage by their measured precision, and back when it no longer holds."""

from __future__ import annotations

import json
import random
from datetime import timedelta
from functools import cache
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from evalstop_service.decisions import second_person
from evalstop_service.domain.confidence_sequences import ALPHA, Estimate, StageNumbers, Stratum, estimate_precision
from evalstop_service.domain.event_types import EventType
from evalstop_service.domain.statuses import Stage
from evalstop_service.errors import Conflict
from evalstop_service.evaluation import rollout_stage
from evalstop_service.evaluation.rollout_stage import StageCases, StageTerms, choose_move, get_enforced_share
from evalstop_service.store import audit, proposals, rollout_stages
from evalstop_service.store.audit import Author
from evalstop_service.store.proposals import Proposal
from evalstop_service.store.rollout_stages import RolloutStage
from evalstop_service.store.tables import events

from tests.service.case_rows import insert_cases
from tests.service.project_fixture import ALL_ROLES_POLICY, NOW, ProjectFixture

MIN_PRECISION = 0.8
LATER = NOW + timedelta(hours=1)


@cache
def estimate(right: int, wrong: int, unknown: int = 0) -> Estimate:
    return estimate_precision([Stratum(right, wrong, unknown)])


@pytest.mark.parametrize(
    ("before", "required", "missing"),
    [
        ((0, 0, 0), 0.9, None),  # nothing says how often its stops are right
        ((9, 0, 0), 0.9, 60),  # 69 cases in all
        ((8, 1, 0), 0.9, None),
        ((9, 0, 9), 0.7, None),  # undecided cases count as wrong
        ((19, 1, 0), 0.8, 40),  # 57 of 60
        ((69, 0, 0), 0.9, 0),
    ],
)
def test_forecast_of_the_missing_cases(before: tuple[int, int, int], required: float, missing: int | None) -> None:
    """So many more cases with the precision so far, and no fewer, take the lower bound to the required precision."""
    known = estimate(*before)
    assert StageCases(known, known, sum(before), 0).count_missing(required) == missing


@pytest.mark.nightly
@pytest.mark.slow
def test_false_promotions_stay_below_alpha() -> None:
    """Checked after each case, a policy just below the required precision moves up in at most 5 % of histories."""
    random_source = random.Random(6)
    histories, promoted = 400, 0
    for _ in range(histories):
        right, stage_start = 0, (0, 0)
        stage, ever_promoted = Stage.SHADOW, False
        for case in range(1, 301):
            right += random_source.random() < MIN_PRECISION - 0.001
            wrong = case - right
            move = choose_move(
                stage,
                MIN_PRECISION,
                estimate(right, wrong),
                estimate(right - stage_start[0], wrong - stage_start[1]),
            )
            if move is not None:
                ever_promoted |= move.stage is not Stage.SHADOW
                stage, stage_start = move.stage, (right, wrong)
        promoted += ever_promoted
    assert promoted / histories <= ALPHA


def test_each_stage_needs_its_own_cases() -> None:
    """A lower bound above the required precision moves a policy up by one stage; the next needs new cases."""
    enough, nothing = estimate(60, 0), estimate(0, 0)
    assert enough.low > MIN_PRECISION > estimate(20, 0).low
    assert choose_move(Stage.SHADOW, MIN_PRECISION, estimate(20, 0), estimate(20, 0)) is None
    assert find_target(choose_move(Stage.SHADOW, MIN_PRECISION, enough, enough)) is Stage.CANARY
    assert choose_move(Stage.CANARY, MIN_PRECISION, enough, nothing) is None
    assert choose_move(Stage.SHADOW, MIN_PRECISION, estimate(90, 20), enough) is None  # good cases after many bad ones
    assert find_target(choose_move(Stage.CANARY, MIN_PRECISION, estimate(120, 0), enough)) is Stage.ENFORCE
    assert choose_move(Stage.ENFORCE, MIN_PRECISION, estimate(200, 0), enough) is None


def test_undecided_cases_prevent_moves() -> None:
    """Undecided cases count as wrong for a move up, and as right for a move back."""
    assert choose_move(Stage.SHADOW, MIN_PRECISION, estimate(60, 0, 20), estimate(60, 0, 20)) is None
    assert choose_move(Stage.CANARY, MIN_PRECISION, estimate(60, 2, 20), estimate(0, 2, 20)) is None


def test_policy_moves_back_below_the_required_precision() -> None:
    """A policy moves back by its cases at the stage alone, or when its value is below; a low bound is not enough."""
    assert find_target(choose_move(Stage.ENFORCE, MIN_PRECISION, estimate(300, 7), estimate(0, 7))) is Stage.SHADOW
    assert find_target(choose_move(Stage.CANARY, MIN_PRECISION, estimate(79, 21), estimate(30, 15))) is Stage.SHADOW
    assert estimate(50, 5).low < MIN_PRECISION
    assert choose_move(Stage.CANARY, MIN_PRECISION, estimate(50, 5), estimate(5, 1)) is None


def test_enforced_share_follows_stage_and_version() -> None:
    """Without a rollout stage the share is 1; a version without cases has 0."""
    loaded_stage = RolloutStage(UUID(int=1), "paper", Stage.CANARY, MIN_PRECISION, 0.25, NOW, StageNumbers(), 2)
    assert get_enforced_share(None, 1) == 1
    assert get_enforced_share(loaded_stage, 2) == 0.25
    assert get_enforced_share(loaded_stage, 1) == get_enforced_share(loaded_stage, 3) == 0


def find_target(move: rollout_stage.Move | None) -> Stage | None:
    return move.stage if move else None


def set_stage(project: ProjectFixture, name: str = "watch-all-roles") -> None:
    with project.database.transaction() as tx:
        rollout_stage.set_rollout_stage(tx, project.id, name, 1, StageTerms(MIN_PRECISION, 0.25), NOW)
    project.add_endpoint()


def load_stage_events(
    project: ProjectFixture, event_type: EventType = EventType.ROLLOUT_STAGE_CHANGED
) -> list[dict[str, Any]]:
    query = sa.select(events.c.body).where(events.c.project_id == project.id, events.c.type == event_type)
    with project.database.reading() as tx:
        return [json.loads(body)["data"]["rollout_stage"] for body in tx.execute(query.order_by(events.c.id)).scalars()]


def review_stage(project: ProjectFixture) -> str:
    loaded_stage = rollout_stage.review_rollout_stage(project.database, project.id, "watch-all-roles", LATER)
    assert loaded_stage is not None
    return loaded_stage.stage


def list_proposals(project: ProjectFixture) -> list[Proposal]:
    with project.database.reading() as tx:
        return proposals.list_open(tx, project.id, LATER, ["watch-all-roles"])


def confirm_proposal(project: ProjectFixture, actor: str = "dana") -> str:
    """Confirm the only open proposal as an admin; return its state."""
    (proposal,) = list_proposals(project)
    return second_person.confirm_proposal(project.database, Author(project.id, actor, LATER), proposal.id).state


def test_promotion_needs_an_admin(project: ProjectFixture) -> None:
    """However good its figures, a policy moves up only when an admin confirms its single proposal."""
    set_stage(project)
    insert_cases(project.database, project.open_run(policy="watch-all-roles"), 60)
    assert review_stage(project) == review_stage(project) == "shadow"
    (proposal,) = list_proposals(project)
    assert proposal.summary == "Move policy watch-all-roles version 1 from shadow to canary"
    assert "at least" in proposal.reason
    (event,) = load_stage_events(project, EventType.ROLLOUT_STAGE_PROPOSED)
    assert (event["to"], event["precision"]["decided"]) == ("canary", 60)
    assert load_stage_events(project) == []
    assert confirm_proposal(project) == "confirmed"
    assert (review_stage(project), list_proposals(project)) == ("canary", [])
    with project.database.reading() as tx:
        (moved,) = audit.list_entries(tx, project.id, action="rollout_stage")
    assert moved.actor == "dana"


def test_proposal_is_withdrawn_with_its_numbers(project: ProjectFixture) -> None:
    """Once the cases no longer allow the move, the proposal cannot be confirmed and is withdrawn."""
    set_stage(project)
    run = project.open_run(policy="watch-all-roles")
    insert_cases(project.database, run, 60)
    review_stage(project)
    insert_cases(project.database, run, 30, LATER, outcome="wrong")
    with pytest.raises(Conflict, match="no longer allow"):
        confirm_proposal(project)
    assert (review_stage(project), list_proposals(project)) == ("shadow", [])
    insert_cases(project.database, run, 400, LATER)
    assert (review_stage(project), len(list_proposals(project))) == ("shadow", 1), (
        "proposed again, as nobody refused it"
    )


def test_proposal_of_an_earlier_version_is_withdrawn(project: ProjectFixture) -> None:
    """What an admin would confirm is about the version with the cases."""
    set_stage(project)
    insert_cases(project.database, project.open_run(policy="watch-all-roles"), 60)
    review_stage(project)
    project.add_policy(ALL_ROLES_POLICY | {"at_least": 2}, LATER)
    assert (review_stage(project), list_proposals(project)) == ("shadow", [])


def test_cases_of_another_policy_move_none_up(project: ProjectFixture) -> None:
    """Each policy earns its own stage, although its version has the same number."""
    set_stage(project)
    insert_cases(project.database, project.open_run(policy="paper"), 60)
    assert (review_stage(project), list_proposals(project)) == ("shadow", [])


def test_refused_proposal_is_repeated_after_a_week(project: ProjectFixture) -> None:
    """A refused move is proposed again after a week if the numbers still allow it."""
    set_stage(project)
    insert_cases(project.database, project.open_run(policy="watch-all-roles"), 60)
    review_stage(project)
    (proposal,) = list_proposals(project)
    second_person.refuse_proposal(project.database, Author(project.id, "dana", LATER), proposal.id)
    assert (review_stage(project), list_proposals(project)) == ("shadow", [])
    rollout_stage.review_rollout_stage(project.database, project.id, "watch-all-roles", LATER + timedelta(days=8))
    assert len(list_proposals(project)) == 1


def test_admin_can_move_a_policy_back(project: ProjectFixture) -> None:
    """An admin can move a policy back to shadow with a reason; it then needs new cases."""
    set_stage(project)
    run = project.open_run(policy="watch-all-roles")
    insert_cases(project.database, run, 60)
    review_stage(project)
    confirm_proposal(project)
    with project.database.transaction() as tx:
        rollout_stage.lower_stage(tx, Author(project.id, "dana", LATER), "watch-all-roles", "a new eval set")
    assert (review_stage(project), list_proposals(project)) == ("shadow", [])
    assert [(move["to"], move["reason"]) for move in load_stage_events(project)][1:] == [("shadow", "a new eval set")]
    with pytest.raises(Conflict, match="no stage above"), project.database.transaction() as tx:
        rollout_stage.lower_stage(tx, Author(project.id, "dana", LATER), "watch-all-roles", "again")


def test_each_move_is_announced_and_audited_once(project: ProjectFixture) -> None:
    """Each move sends one event with its numbers and is audited; repeated reviews change nothing."""
    set_stage(project)
    run = project.open_run(policy="watch-all-roles")
    assert review_stage(project) == "shadow"
    insert_cases(project.database, run, 60)
    review_stage(project)
    confirm_proposal(project)
    assert review_stage(project) == review_stage(project) == "canary"
    insert_cases(project.database, run, 7, LATER, outcome="wrong")
    assert review_stage(project) == review_stage(project) == "shadow"
    up, back = load_stage_events(project)
    assert (up["from"], up["to"], back["from"], back["to"]) == ("shadow", "canary", "canary", "shadow")
    assert up["precision"]["bounds"]["low"] > MIN_PRECISION
    assert back["precision_since"]["decided"] == 7
    with project.database.reading() as tx:
        moves = audit.list_entries(tx, project.id, action="rollout_stage")
        assert [entry.action for entry in moves] == ["rollout_stage.moved"] * 2


def test_new_policy_version_starts_in_shadow(project: ProjectFixture) -> None:
    """A new version has no cases and starts in shadow; changed settings keep the stage."""
    set_stage(project)
    insert_cases(project.database, project.open_run(policy="watch-all-roles"), 60)
    review_stage(project)
    confirm_proposal(project)
    assert review_stage(project) == "canary"
    with project.database.transaction() as tx:
        terms = StageTerms(0.85, 0.5)
        assert rollout_stage.set_rollout_stage(tx, project.id, "watch-all-roles", 1, terms, LATER).stage == "canary"
    project.add_policy(ALL_ROLES_POLICY | {"at_least": 2}, LATER)
    assert review_stage(project) == "shadow"
    assert load_stage_events(project)[-1]["reason"] == "version 2 has no cases yet"
    with project.database.reading() as tx:
        loaded_stage = rollout_stages.find_stage(tx, project.id, "watch-all-roles")
    assert loaded_stage is not None
    assert (loaded_stage.version, loaded_stage.canary_share) == (2, 0.5)


def test_labels_of_enforced_stops_do_not_count(project: ProjectFixture) -> None:
    """Outcomes that people give to enforced stops move no policy up."""
    set_stage(project)
    insert_cases(project.database, project.open_run(policy="watch-all-roles"), 90, treatment="stopped", derived=False)
    assert review_stage(project) == "shadow"


def test_policy_that_cannot_be_reviewed_does_not_delay_others(project: ProjectFixture) -> None:
    """The job reviews the policies after it, and fails at the end."""
    project.add_policy(ALL_ROLES_POLICY | {"name": "a-broken"})
    set_stage(project, "a-broken")
    set_stage(project)
    for name in ("a-broken", "watch-all-roles"):
        insert_cases(project.database, project.open_run(policy=name), 60)
    rollout_stage.review_rollout_stage(project.database, project.id, "a-broken", LATER)
    with project.database.transaction() as tx:
        tx.execute(sa.text("UPDATE proposals SET state = 'unheard-of' WHERE subject = 'a-broken'"))
    job = rollout_stage.create_job(project.database, lambda: LATER)
    with pytest.raises(ValueError, match="unheard-of"):
        job.do(lambda _seconds: False)
    assert list_proposals(project)
    with project.database.transaction() as tx:
        tx.execute(sa.text("DELETE FROM proposals WHERE subject = 'a-broken'"))
