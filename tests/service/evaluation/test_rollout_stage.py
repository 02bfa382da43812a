"""Policies earn their rollout stage by what they have shown, and lose it when that no longer holds."""

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
from evalstop_service.errors import Conflict
from evalstop_service.evaluation import rollout_stage
from evalstop_service.evaluation.rollout_stage import choose_move, share_enforced
from evalstop_service.rules.confidence_sequences import ALPHA, Estimate, StageNumbers, Stratum, estimate_precision
from evalstop_service.rules.event_types import EventType
from evalstop_service.rules.statuses import Stage
from evalstop_service.store import audit, endpoints, policies, projects, proposals, rollout_stages
from evalstop_service.store.audit import Author
from evalstop_service.store.proposals import Proposal
from evalstop_service.store.rollout_stages import RolloutStage
from evalstop_service.store.tables import events
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.subscriptions import EVERY_EVENT
from tests.service.case_rows import insert_cases
from tests.service.project_fixture import ALL_ROLES_POLICY, NOW, ProjectFixture

LINE = 0.8
LATER = NOW + timedelta(hours=1)


@cache
def shown(right: int, wrong: int, unknown: int = 0) -> Estimate:
    return estimate_precision([Stratum(right, wrong, unknown)])


def test_a_policy_below_the_line_is_let_up_in_few_histories() -> None:
    """Looked at after each case, with all its returns to shadow, a policy just below the line ever rises in alpha of
    all histories at most."""
    chance = random.Random(6)
    histories, risen = 400, 0
    for _ in range(histories):
        right, begun = 0, (0, 0)
        stage, ever = Stage.SHADOW, False
        for case in range(1, 301):
            right += chance.random() < LINE - 0.001
            wrong = case - right
            move = choose_move(stage, LINE, shown(right, wrong), shown(right - begun[0], wrong - begun[1]))
            if move is not None:
                ever |= move.stage is not Stage.SHADOW
                stage, begun = move.stage, (right, wrong)
        risen += ever
    assert risen / histories <= ALPHA


def test_each_stage_is_earned_by_its_own_cases() -> None:
    """A bound above the line lets a policy up by one stage; the next takes as much again, seen there."""
    enough, nothing = shown(60, 0), shown(0, 0)
    assert enough.low > LINE > shown(20, 0).low
    assert choose_move(Stage.SHADOW, LINE, shown(20, 0), shown(20, 0)) is None
    assert to(choose_move(Stage.SHADOW, LINE, enough, enough)) is Stage.CANARY
    assert choose_move(Stage.CANARY, LINE, enough, nothing) is None
    assert choose_move(Stage.SHADOW, LINE, shown(90, 20), enough) is None  # a good stretch after a bad one
    assert to(choose_move(Stage.CANARY, LINE, shown(120, 0), enough)) is Stage.ENFORCE
    assert choose_move(Stage.ENFORCE, LINE, shown(200, 0), enough) is None


def test_in_doubt_it_stays() -> None:
    """Undecided cases count against a rise, and in favor of a policy that has risen."""
    assert choose_move(Stage.SHADOW, LINE, shown(60, 0, 20), shown(60, 0, 20)) is None
    assert choose_move(Stage.CANARY, LINE, shown(60, 2, 20), shown(0, 2, 20)) is None


def test_it_falls_back_when_the_line_no_longer_holds() -> None:
    """By what was seen at its stage alone, or when the value comes below the line; a bound below it is not enough."""
    assert to(choose_move(Stage.ENFORCE, LINE, shown(300, 7), shown(0, 7))) is Stage.SHADOW
    assert to(choose_move(Stage.CANARY, LINE, shown(79, 21), shown(30, 15))) is Stage.SHADOW
    assert shown(50, 5).low < LINE
    assert choose_move(Stage.CANARY, LINE, shown(50, 5), shown(5, 1)) is None


def test_how_many_cases_the_next_step_takes() -> None:
    """As many as bring the lower bound to the line if the share stays; undecided ones count as wrong."""
    for seen in (shown(0, 0), shown(7, 0), shown(39, 0)):
        assert rollout_stage.estimate_cases_needed(seen, 0.9) == 69
    assert shown(68, 0).low < 0.9 <= shown(69, 0).low
    needed = rollout_stage.estimate_cases_needed(shown(18, 1, 1), LINE)
    assert needed is not None
    assert shown(round(0.9 * needed), needed - round(0.9 * needed)).low == pytest.approx(LINE, abs=0.005)
    assert rollout_stage.estimate_cases_needed(shown(79, 21), LINE) is None
    assert rollout_stage.estimate_cases_needed(shown(9, 0, 3), LINE) is None


@given(
    st.lists(
        st.builds(
            Stratum,
            right=st.integers(0, 60),
            wrong=st.integers(0, 6),
            unknown=st.integers(0, 6),
            probability=st.sampled_from((0.1, 0.5, 1.0)),
        ),
        max_size=3,
    )
)
def test_more_cases_are_needed_until_there_are_enough(strata: list[Stratum]) -> None:
    """Whatever the weights, it takes more cases than there are exactly as long as the bound is below the line."""
    seen = estimate_precision(strata)
    needed = rollout_stage.estimate_cases_needed(seen, LINE)
    assert (needed is not None and needed <= seen.decided + seen.undecided) == (seen.bounds.low >= LINE)


def test_how_much_is_carried_out() -> None:
    """Without a rollout stage the mode of a run alone counts; a version that has shown nothing stays in shadow."""
    held = RolloutStage(UUID(int=1), "paper", Stage.CANARY, LINE, 0.25, NOW, StageNumbers(), 2)
    assert share_enforced(None, 1) == 1
    assert share_enforced(held, 2) == 0.25
    assert share_enforced(held, 1) == share_enforced(held, 3) == 0


def to(move: rollout_stage.Move | None) -> Stage | None:
    return move.stage if move else None


def granted(project: ProjectFixture, name: str = "watch-all-roles") -> None:
    with project.database.transaction() as tx:
        rollout_stage.set_rollout_stage(tx, project.id, name, 1, LINE, 0.25, NOW)
        endpoints.add_endpoint(tx, project.id, url="http://127.0.0.1:9/", event_types=EVERY_EVENT, now=NOW)


def told(project: ProjectFixture, event_type: EventType = EventType.ROLLOUT_STAGE_CHANGED) -> list[dict[str, Any]]:
    query = sa.select(events.c.body).where(events.c.project_id == project.id, events.c.type == event_type)
    with project.database.reading() as tx:
        return [json.loads(body)["data"]["rollout_stage"] for body in tx.execute(query.order_by(events.c.id)).scalars()]


def stage(project: ProjectFixture) -> str:
    held = rollout_stage.review_rollout_stage(project.database, project.id, "watch-all-roles", LATER)
    assert held is not None
    return held.stage


def proposed(project: ProjectFixture) -> list[Proposal]:
    with project.database.reading() as tx:
        return proposals.list_open(tx, project.id, LATER)


def confirm(project: ProjectFixture, actor: str = "dana") -> str:
    """An admin confirms the one step that is proposed; the state of the proposal then."""
    (one,) = proposed(project)
    return second_person.confirm_proposal(project.database, Author(project.id, actor, LATER), one.id).state


def test_a_step_up_waits_for_an_admin(project: ProjectFixture) -> None:
    """However good its figures, a policy moves up by a person's word alone; it is proposed once, with its numbers."""
    granted(project)
    insert_cases(project.database, project.open_run(policy="watch-all-roles"), 60)
    assert stage(project) == stage(project) == "shadow"
    (one,) = proposed(project)
    assert one.summary == "Move policy watch-all-roles version 1 from shadow to canary"
    assert "at least" in one.reason
    (event,) = told(project, EventType.ROLLOUT_STAGE_PROPOSED)
    assert (event["to"], event["precision"]["decided"]) == ("canary", 60)
    assert told(project) == []
    assert confirm(project) == "confirmed"
    assert (stage(project), proposed(project)) == ("canary", [])
    with project.database.reading() as tx:
        (moved,) = audit.list_entries(tx, project.id, action="rollout_stage")
    assert moved.actor == "dana"


def test_a_proposal_falls_with_its_numbers(project: ProjectFixture) -> None:
    """Once its cases no longer allow the step it is withdrawn, and nobody can confirm it before that either."""
    granted(project)
    run = project.open_run(policy="watch-all-roles")
    insert_cases(project.database, run, 60)
    stage(project)
    insert_cases(project.database, run, 30, LATER, outcome="wrong")
    with pytest.raises(Conflict, match="no longer allow"):
        confirm(project)
    assert (stage(project), proposed(project)) == ("shadow", [])


def test_what_an_admin_refuses_is_not_repeated(project: ProjectFixture) -> None:
    """Not for a week; then the service proposes it again, if its numbers still hold."""
    granted(project)
    insert_cases(project.database, project.open_run(policy="watch-all-roles"), 60)
    stage(project)
    (one,) = proposed(project)
    second_person.refuse_proposal(project.database, Author(project.id, "dana", LATER), one.id)
    assert (stage(project), proposed(project)) == ("shadow", [])
    rollout_stage.review_rollout_stage(project.database, project.id, "watch-all-roles", LATER + timedelta(days=8))
    assert len(proposed(project)) == 1


def test_a_person_moves_it_back(project: ProjectFixture) -> None:
    """Back to shadow at any time, with a reason that is told and kept; from there it takes new cases."""
    granted(project)
    run = project.open_run(policy="watch-all-roles")
    insert_cases(project.database, run, 60)
    stage(project)
    confirm(project)
    with project.database.transaction() as tx:
        rollout_stage.lower_stage(tx, Author(project.id, "dana", LATER), "watch-all-roles", "a new eval set")
    assert (stage(project), proposed(project)) == ("shadow", [])
    assert [(move["to"], move["reason"]) for move in told(project)][1:] == [("shadow", "a new eval set")]
    with pytest.raises(Conflict, match="no stage above"), project.database.transaction() as tx:
        rollout_stage.lower_stage(tx, Author(project.id, "dana", LATER), "watch-all-roles", "again")


def test_every_move_is_told_with_its_numbers(project: ProjectFixture) -> None:
    """Up and back, each move is an event and an entry of the audit log, and looking again changes nothing."""
    granted(project)
    run = project.open_run(policy="watch-all-roles")
    assert stage(project) == "shadow"
    insert_cases(project.database, run, 60)
    stage(project)
    confirm(project)
    assert stage(project) == stage(project) == "canary"
    insert_cases(project.database, run, 7, LATER, outcome="wrong")
    assert stage(project) == stage(project) == "shadow"
    up, back = told(project)
    assert (up["from"], up["to"], back["from"], back["to"]) == ("shadow", "canary", "canary", "shadow")
    assert up["precision"]["bounds"]["low"] > LINE
    assert back["precision_since"]["decided"] == 7
    with project.database.reading() as tx:
        moves = audit.list_entries(tx, project.id, action="rollout_stage")
        assert [entry.action for entry in moves] == ["rollout_stage.moved"] * 2


def test_a_new_version_begins_in_shadow(project: ProjectFixture) -> None:
    """What one version has shown is not another's; changed terms leave a policy where it is."""
    granted(project)
    insert_cases(project.database, project.open_run(policy="watch-all-roles"), 60)
    stage(project)
    confirm(project)
    assert stage(project) == "canary"
    with project.database.transaction() as tx:
        assert rollout_stage.set_rollout_stage(tx, project.id, "watch-all-roles", 1, 0.85, 0.5, LATER).stage == "canary"
        policies.add_policy(
            tx, projects.get_project(tx, project.id), "watch-all-roles", ALL_ROLES_POLICY | {"at_least": 2}, LATER
        )
    assert stage(project) == "shadow"
    assert told(project)[-1]["reason"] == "version 2 has no cases yet"
    with project.database.reading() as tx:
        held = rollout_stages.find_stage(tx, project.id, "watch-all-roles")
    assert held is not None
    assert (held.version, held.canary_share) == (2, 0.5)


def test_only_what_is_observed_by_design_counts(project: ProjectFixture) -> None:
    """What people say of stops that were carried out lets nobody rise."""
    granted(project)
    insert_cases(project.database, project.open_run(policy="watch-all-roles"), 90, treatment="stopped", derived=False)
    assert stage(project) == "shadow"
