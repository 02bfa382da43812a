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

from tests.service.cases_written import write
from tests.service.scenes import FALLING, NOW, Scene, set_up


@pytest.fixture
def scene(database: Database) -> Scene:
    """A project that asks for a second person."""
    scene = set_up(database, "shadow")
    narrow = ProjectChange(second_person=True, max_mode=Mode.SHADOW)
    second_person.change_project(database, by(scene, "ada"), narrow)
    return scene


def by(scene: Scene, name: str, identity: str = "", seconds: float = 0.0) -> Author:
    return Author(scene.project_id, name, NOW + timedelta(seconds=seconds), identity)


def order(author: Author) -> StopOrdered:
    return StopOrdered(author.at, author.actor, "it diverged")


def project_of(scene: Scene) -> Project:
    with scene.database.reading() as tx:
        return projects.get_project(tx, scene.project_id)


def actions(scene: Scene, kind: str) -> list[tuple[str, str]]:
    with scene.database.reading() as tx:
        return [(one.action, one.actor) for one in audit.list_entries(tx, scene.project_id, action=kind)]


def state(scene: Scene, run: Run) -> str | None:
    decision = scene.decision(run)
    return None if decision is None else decision.state


def test_nobody_stops_a_run_alone(scene: Scene) -> None:
    """One person's order is a proposal, however often they say it and under whatever name; another's word stops."""
    run = scene.open()
    for name in ("ada", "ada again"):
        ada = by(scene, name, "key 1")
        proposed = second_person.stop_run(scene.database, ada, run.id, order(ada))
        assert proposed is not None
        waiting = second_person.confirm_proposal(scene.database, ada, proposed.id)
        assert waiting.state == "open"
    assert state(scene, run) is None
    ben = by(scene, "ada", "key 2")
    assert second_person.confirm_proposal(scene.database, ben, waiting.id).state == "confirmed"
    assert state(scene, run) == "requested"
    decision = scene.decision(run)
    assert decision is not None
    assert "it diverged (proposed by ada)" in decision.verdict.reason
    assert actions(scene, "proposal") == [("proposal.confirmed", "ada"), ("proposal.made", "ada")]


def test_the_same_order_of_another_is_the_second_word(scene: Scene) -> None:
    """Two people who press Stop now have stopped the run."""
    run = scene.open()
    ada, ben = by(scene, "ada"), by(scene, "ben")
    assert second_person.stop_run(scene.database, ada, run.id, order(ada)) is not None
    assert second_person.stop_run(scene.database, ben, run.id, order(ben)) is None
    assert state(scene, run) == "requested"


def test_a_proposal_can_be_refused_and_expires(scene: Scene) -> None:
    """Nothing is done by a word that comes after another's refusal, or a day later."""
    refused, late = scene.open(), scene.open()
    ada, ben = by(scene, "ada"), by(scene, "ben")
    first = second_person.stop_run(scene.database, ada, refused.id, order(ada))
    second = second_person.stop_run(scene.database, ada, late.id, order(ada))
    assert first is not None
    assert second is not None
    second_person.refuse_proposal(scene.database, ben, first.id)
    with pytest.raises(Conflict, match="refused"):
        second_person.confirm_proposal(scene.database, ben, first.id)
    tomorrow = by(scene, "ben", seconds=OPEN_FOR.total_seconds())
    with pytest.raises(Conflict, match="expired"):
        second_person.confirm_proposal(scene.database, tomorrow, second.id)
    assert [state(scene, run) for run in (refused, late)] == [None, None]
    assert second_person.stop_run(scene.database, tomorrow, late.id, order(tomorrow)) is not None


def test_nobody_releases_a_stop_alone(database: Database) -> None:
    """A stop on hold stays so until a second person wants it carried out."""
    scene = set_up(database, "enforce")
    second_person.change_project(database, by(scene, "ada"), ProjectChange(second_person=True))
    pause.pause_project(database, scene.project_id, "ada", "", NOW)
    run = scene.open()
    decision = scene.post(run, FALLING).decision
    assert decision is not None
    pause.resume_project(database, scene.project_id, "ada", NOW)
    waiting = second_person.release_stop(database, by(scene, "ada"), decision.id, Released(NOW, "ada", "known"))
    assert waiting is not None
    assert state(scene, run) == "on_hold"
    second_person.confirm_proposal(database, by(scene, "ben"), waiting.id)
    assert state(scene, run) == "requested"


def test_nobody_lets_more_be_ended_alone(scene: Scene) -> None:
    """Raising max_mode, and doing without a second person, take two; what narrows, and all else, is done at once."""
    ada, ben = by(scene, "ada"), by(scene, "ben")
    for change in (ProjectChange(max_mode=Mode.ENFORCE, stops_per_hour=3), ProjectChange(second_person=False)):
        before = project_of(scene)
        waiting = second_person.change_project(scene.database, ada, change)
        assert waiting is not None
        assert project_of(scene) == before
        second_person.confirm_proposal(scene.database, ben, waiting.id)
        assert project_of(scene) != before
    assert (project_of(scene).max_mode, project_of(scene).stops_per_hour) == ("enforce", 3)
    second_person.change_project(scene.database, ada, ProjectChange(second_person=True))
    assert second_person.change_project(scene.database, ada, ProjectChange(max_mode=Mode.SHADOW)) is None
    assert project_of(scene).max_mode == "shadow"


def test_a_confirmed_change_is_only_what_was_changed(scene: Scene) -> None:
    """A form names every setting: what is the same on the day of the proposal is not set back by its confirmation."""
    form = ProjectChange(max_mode=Mode.ENFORCE, stops_per_hour=30)
    waiting = second_person.change_project(scene.database, by(scene, "ada"), form)
    assert waiting is not None
    second_person.change_project(scene.database, by(scene, "ada"), ProjectChange(stops_per_hour=2))
    second_person.confirm_proposal(scene.database, by(scene, "ben"), waiting.id)
    assert project_of(scene).stops_per_hour == 2


def test_the_step_to_enforce_takes_two_admins(scene: Scene) -> None:
    """A canary takes one word, as ever; the step that the service proposes next takes two, and so does its removal."""
    with scene.database.transaction() as tx:
        rollout_stage.set_rollout_stage(tx, scene.project_id, "watchful", 1, 0.8, 0.25, NOW)
    run, ada, ben = scene.open(policy="watchful"), by(scene, "ada"), by(scene, "ben")

    def held() -> str:
        with scene.database.reading() as tx:
            found = rollout_stages.find_stage(tx, scene.project_id, "watchful")
        return "none" if found is None else found.stage

    def confirm(author: Author) -> str:
        rollout_stage.review_rollout_stage(scene.database, scene.project_id, "watchful", NOW)
        with scene.database.reading() as tx:
            (one,) = proposals.list_open(tx, scene.project_id, NOW)
        second_person.confirm_proposal(scene.database, author, one.id)
        return held()

    write(scene.database, run, 60)
    assert confirm(ada) == Stage.CANARY
    assert [confirm(ada), confirm(ada), confirm(ben)] == ["canary", "canary", "enforce"]
    assert second_person.remove_stage(scene.database, ada, "watchful") is not None
    assert held() == Stage.ENFORCE
    assert second_person.remove_stage(scene.database, ben, "watchful") is None
    assert held() == "none"
