"""In a project that asks for a second person, nobody ends jobs, or lets more be ended, alone."""

from __future__ import annotations

from datetime import timedelta

import pytest
from evalstop_service.decisions import pause, second_person
from evalstop_service.errors import Conflict
from evalstop_service.evaluation import rollout_stage
from evalstop_service.projects.project_settings import ProjectChange
from evalstop_service.rules.decision_lifecycle import Mode, Released, StopOrdered
from evalstop_service.rules.proposals import OPEN_FOR
from evalstop_service.rules.statuses import Stage
from evalstop_service.store import audit, projects, proposals, rollout_stages
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database
from evalstop_service.store.projects import Project
from evalstop_service.store.runs import Run

from tests.service.case_rows import insert_cases
from tests.service.project_fixture import DECLINING_EVALS, NOW, ProjectFixture, set_up_project


@pytest.fixture
def project(database: Database) -> ProjectFixture:
    """A project that asks for a second person."""
    project = set_up_project(database, "shadow")
    narrow = ProjectChange(second_person=True, max_mode=Mode.SHADOW)
    second_person.change_project(database, by(project, "ada"), narrow)
    return project


def by(project: ProjectFixture, name: str, identity: str = "", seconds: float = 0.0) -> Author:
    return Author(project.id, name, NOW + timedelta(seconds=seconds), identity)


def order(author: Author) -> StopOrdered:
    return StopOrdered(author.at, author.actor, "it diverged")


def project_of(project: ProjectFixture) -> Project:
    with project.database.reading() as tx:
        return projects.get_project(tx, project.id)


def actions(project: ProjectFixture, kind: str) -> list[tuple[str, str]]:
    with project.database.reading() as tx:
        return [(one.action, one.actor) for one in audit.list_entries(tx, project.id, action=kind)]


def state(project: ProjectFixture, run: Run) -> str | None:
    decision = project.find_decision(run)
    return None if decision is None else decision.state


def test_nobody_stops_a_run_alone(project: ProjectFixture) -> None:
    """One person's order is a proposal, however often they say it and under whatever name; another's word stops."""
    run = project.open_run()
    for name in ("ada", "ada again"):
        ada = by(project, name, "key 1")
        proposed = second_person.stop_run(project.database, ada, run.id, order(ada))
        assert proposed is not None
        waiting = second_person.confirm_proposal(project.database, ada, proposed.id)
        assert waiting.state == "open"
    assert state(project, run) is None
    ben = by(project, "ada", "key 2")
    assert second_person.confirm_proposal(project.database, ben, waiting.id).state == "confirmed"
    assert state(project, run) == "requested"
    decision = project.find_decision(run)
    assert decision is not None
    assert "it diverged (proposed by ada)" in decision.verdict.reason
    assert actions(project, "proposal") == [("proposal.confirmed", "ada"), ("proposal.made", "ada")]


def test_the_same_order_of_another_is_the_second_word(project: ProjectFixture) -> None:
    """Two people who press Stop now have stopped the run."""
    run = project.open_run()
    ada, ben = by(project, "ada"), by(project, "ben")
    assert second_person.stop_run(project.database, ada, run.id, order(ada)) is not None
    assert second_person.stop_run(project.database, ben, run.id, order(ben)) is None
    assert state(project, run) == "requested"


def test_a_proposal_can_be_refused_and_expires(project: ProjectFixture) -> None:
    """Nothing is done by a word that comes after another's refusal, or a day later."""
    refused, late = project.open_run(), project.open_run()
    ada, ben = by(project, "ada"), by(project, "ben")
    first = second_person.stop_run(project.database, ada, refused.id, order(ada))
    second = second_person.stop_run(project.database, ada, late.id, order(ada))
    assert first is not None
    assert second is not None
    second_person.refuse_proposal(project.database, ben, first.id)
    with pytest.raises(Conflict, match="refused"):
        second_person.confirm_proposal(project.database, ben, first.id)
    tomorrow = by(project, "ben", seconds=OPEN_FOR.total_seconds())
    with pytest.raises(Conflict, match="expired"):
        second_person.confirm_proposal(project.database, tomorrow, second.id)
    assert [state(project, run) for run in (refused, late)] == [None, None]
    assert second_person.stop_run(project.database, tomorrow, late.id, order(tomorrow)) is not None


def test_nobody_releases_a_stop_alone(database: Database) -> None:
    """A stop on hold stays so until a second person wants it carried out."""
    project = set_up_project(database, "enforce")
    second_person.change_project(database, by(project, "ada"), ProjectChange(second_person=True))
    pause.pause_project(database, project.id, "ada", "", NOW)
    run = project.open_run()
    decision = project.post_observations(run, DECLINING_EVALS).decision
    assert decision is not None
    pause.resume_project(database, project.id, "ada", NOW)
    waiting = second_person.release_stop(database, by(project, "ada"), decision.id, Released(NOW, "ada", "known"))
    assert waiting is not None
    assert state(project, run) == "on_hold"
    second_person.confirm_proposal(database, by(project, "ben"), waiting.id)
    assert state(project, run) == "requested"


def test_nobody_lets_more_be_ended_alone(project: ProjectFixture) -> None:
    """Raising max_mode, and doing without a second person, take two; what narrows, and all else, is done at once."""
    ada, ben = by(project, "ada"), by(project, "ben")
    for change in (ProjectChange(max_mode=Mode.ENFORCE, stops_per_hour=3), ProjectChange(second_person=False)):
        before = project_of(project)
        waiting = second_person.change_project(project.database, ada, change)
        assert waiting is not None
        assert project_of(project) == before
        second_person.confirm_proposal(project.database, ben, waiting.id)
        assert project_of(project) != before
    assert (project_of(project).max_mode, project_of(project).stops_per_hour) == ("enforce", 3)
    second_person.change_project(project.database, ada, ProjectChange(second_person=True))
    assert second_person.change_project(project.database, ada, ProjectChange(max_mode=Mode.SHADOW)) is None
    assert project_of(project).max_mode == "shadow"


def test_a_confirmed_change_is_only_what_was_changed(project: ProjectFixture) -> None:
    """A form names every setting: what is the same on the day of the proposal is not set back by its confirmation."""
    form = ProjectChange(max_mode=Mode.ENFORCE, stops_per_hour=30)
    waiting = second_person.change_project(project.database, by(project, "ada"), form)
    assert waiting is not None
    second_person.change_project(project.database, by(project, "ada"), ProjectChange(stops_per_hour=2))
    second_person.confirm_proposal(project.database, by(project, "ben"), waiting.id)
    assert project_of(project).stops_per_hour == 2


def test_the_step_to_enforce_takes_two_admins(project: ProjectFixture) -> None:
    """A canary takes one word, as ever; the step that the service proposes next takes two, and so does its removal."""
    with project.database.transaction() as tx:
        rollout_stage.set_rollout_stage(tx, project.id, "watch-all-roles", 1, 0.8, 0.25, NOW)
    run, ada, ben = project.open_run(policy="watch-all-roles"), by(project, "ada"), by(project, "ben")

    def held() -> str:
        with project.database.reading() as tx:
            found = rollout_stages.find_stage(tx, project.id, "watch-all-roles")
        return "none" if found is None else found.stage

    def confirm(author: Author) -> str:
        rollout_stage.review_rollout_stage(project.database, project.id, "watch-all-roles", NOW)
        with project.database.reading() as tx:
            (one,) = proposals.list_open(tx, project.id, NOW)
        second_person.confirm_proposal(project.database, author, one.id)
        return held()

    insert_cases(project.database, run, 60)
    assert confirm(ada) == Stage.CANARY
    assert [confirm(ada), confirm(ada), confirm(ben)] == ["canary", "canary", "enforce"]
    assert second_person.remove_stage(project.database, ada, "watch-all-roles") is not None
    assert held() == Stage.ENFORCE
    assert second_person.remove_stage(project.database, ben, "watch-all-roles") is None
    assert held() == "none"
