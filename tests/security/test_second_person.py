"""Projects with a second-person rule: starting stops, or allowing more of them, takes two people."""

from __future__ import annotations

from datetime import timedelta

import pytest
from evalstop_detectors import Policy, policy_from_document, policy_to_document
from evalstop_service.decisions import pause, second_person
from evalstop_service.domain.decision_lifecycle import Mode
from evalstop_service.domain.statuses import PROPOSAL_OPEN_FOR, ProposalKind, ProposalState, Stage
from evalstop_service.errors import Conflict
from evalstop_service.evaluation import rollout_stage
from evalstop_service.evaluation.rollout_stage import StageTerms
from evalstop_service.projects.project_settings import ProjectChange
from evalstop_service.store import audit, projects, proposals, rollout_stages
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.policies import StoredPolicy
from evalstop_service.store.projects import Project
from evalstop_service.store.proposals import Proposal
from evalstop_service.store.runs import Run

from tests.service.case_rows import insert_cases
from tests.service.project_fixture import NOW, ProjectFixture, set_up_project


@pytest.fixture
def project(database: Database) -> ProjectFixture:
    """A project with the second-person rule."""
    project = set_up_project(database, "shadow")
    restriction = ProjectChange(second_person=True, max_mode=Mode.SHADOW)
    second_person.change_project(database, create_author(project, "ada"), restriction)
    return project


def create_author(project: ProjectFixture, name: str, identity: str = "", seconds: float = 0.0) -> Author:
    return Author(project.id, name, NOW + timedelta(seconds=seconds), identity)


def load_project(project: ProjectFixture) -> Project:
    with project.database.reading() as tx:
        return projects.get_project(tx, project.id)


def list_actions(project: ProjectFixture, kind: str) -> list[tuple[str, str]]:
    with project.database.reading() as tx:
        return [(entry.action, entry.actor) for entry in audit.list_entries(tx, project.id, action=kind)]


def find_state(project: ProjectFixture, run: Run) -> str | None:
    decision = project.find_decision(run)
    return None if decision is None else decision.state


def test_stop_needs_a_second_person(project: ProjectFixture) -> None:
    """An order repeated with the same key, even under another name, stays a proposal until another person confirms
    it."""
    run = project.open_run()
    for name in ("ada", "ada again"):
        ada = create_author(project, name, "key 1")
        proposal = second_person.stop_run(project.database, ada, run.id, "it diverged")
        assert proposal is not None
        unconfirmed = second_person.confirm_proposal(project.database, ada, proposal.id)
        assert unconfirmed.state == "open"
    assert find_state(project, run) is None
    ben = create_author(project, "ada", "key 2")
    assert second_person.confirm_proposal(project.database, ben, unconfirmed.id).state == "confirmed"
    assert find_state(project, run) == "requested"
    decision = project.find_decision(run)
    assert decision is not None
    assert "it diverged (proposed by ada)" in decision.verdict.reason
    assert list_actions(project, "proposal") == [("proposal.confirmed", "ada"), ("proposal.created", "ada")]


def test_project_without_the_rule_needs_one_person(database: Database) -> None:
    """One person stops a run, adds a version of a shipped policy, and raises a policy to enforce."""
    project = set_up_project(database)
    run, ada = project.open_run(policy="watch-all-roles"), create_author(project, "ada")
    insert_cases(database, run, 60)
    with database.transaction() as tx:
        rollout_stage.set_rollout_stage(tx, project.id, "watch-all-roles", 1, StageTerms(0.8, 0.25), NOW)
    for stage in (Stage.CANARY, Stage.ENFORCE):
        rollout_stage.review_rollout_stage(database, project.id, "watch-all-roles", NOW)
        with database.reading() as tx:
            (proposal,) = proposals.list_open(tx, project.id, NOW, ["watch-all-roles"])
        assert proposal.argument == stage
        assert second_person.confirm_proposal(database, ada, proposal.id).state == "confirmed"
    assert second_person.stop_run(database, ada, run.id, "it diverged") is None
    assert find_state(project, run) == "requested"
    assert isinstance(second_person.add_policy(database, ada, create_policy("default", 2)), StoredPolicy)


def test_same_order_by_another_person_confirms_the_first(project: ProjectFixture) -> None:
    """Two people who each stop the run have stopped it."""
    run = project.open_run()
    ada, ben = create_author(project, "ada"), create_author(project, "ben")
    assert second_person.stop_run(project.database, ada, run.id, "it diverged") is not None
    assert second_person.stop_run(project.database, ben, run.id, "it diverged") is None
    assert find_state(project, run) == "requested"


def test_refused_or_expired_proposal_cannot_be_confirmed(project: ProjectFixture) -> None:
    """A confirmation after a refusal, or a day later, is a conflict and changes nothing."""
    refused, expired = project.open_run(), project.open_run()
    ada, ben = create_author(project, "ada"), create_author(project, "ben")
    first = second_person.stop_run(project.database, ada, refused.id, "it diverged")
    second = second_person.stop_run(project.database, ada, expired.id, "it diverged")
    assert first is not None
    assert second is not None
    for _ in range(2):
        assert second_person.refuse_proposal(project.database, ben, first.id).state is ProposalState.REFUSED
    with pytest.raises(Conflict, match="refused"):
        second_person.confirm_proposal(project.database, ben, first.id)
    tomorrow = create_author(project, "ben", seconds=PROPOSAL_OPEN_FOR.total_seconds())
    with pytest.raises(Conflict, match="expired"):
        second_person.confirm_proposal(project.database, tomorrow, second.id)
    assert [find_state(project, run) for run in (refused, expired)] == [None, None]
    assert second_person.stop_run(project.database, tomorrow, expired.id, "it diverged") is not None


def test_expired_proposals_hide_no_open_one(project: ProjectFixture) -> None:
    """An order that nobody confirmed in time is listed as expired and not as open, and takes no place among those that
    can be confirmed."""
    ada = create_author(project, "ada")
    with project.database.transaction() as tx:
        step_up = _build_proposal(project, ProposalKind.RAISE_STAGE, "early")
        proposals.add_proposal(tx, step_up)
        for number in range(50):
            proposals.add_proposal(tx, _build_proposal(project, ProposalKind.STOP_RUN, str(number)))
    with project.database.reading() as tx:
        opened = proposals.list_proposals(tx, project.id, ada.at + PROPOSAL_OPEN_FOR, state=ProposalState.OPEN)
        assert opened == proposals.list_open(tx, project.id, ada.at + PROPOSAL_OPEN_FOR, ["0", "early"]) == [step_up]
        expired = proposals.list_proposals(tx, project.id, ada.at + PROPOSAL_OPEN_FOR, state=ProposalState.EXPIRED)
    assert [item.subject for item in expired] == [str(number) for number in reversed(range(50))]


def _build_proposal(project: ProjectFixture, kind: ProposalKind, subject: str) -> Proposal:
    return Proposal(new_id(), project.id, kind, subject, "", "", "", "ada", (), ProposalState.OPEN, NOW)


def test_release_needs_a_second_person(database: Database) -> None:
    """A stop stays on hold until a second person confirms its release."""
    project = set_up_project(database, "enforce")
    second_person.change_project(database, create_author(project, "ada"), ProjectChange(second_person=True))
    pause.pause_project(database, project.id, "ada", "", NOW)
    run, decision = project.open_declining_run()
    pause.resume_project(database, project.id, "ada", NOW)
    waiting = second_person.release_stop(database, create_author(project, "ada"), decision.id, "known")
    assert waiting is not None
    assert find_state(project, run) == "on_hold"
    second_person.confirm_proposal(database, create_author(project, "ben"), waiting.id)
    assert find_state(project, run) == "requested"


def test_allowing_more_stops_needs_a_second_person(project: ProjectFixture) -> None:
    """Raising max_mode and removing the rule need two people; lowering max_mode again takes effect at once."""
    ada, ben = create_author(project, "ada"), create_author(project, "ben")
    for change in (ProjectChange(max_mode=Mode.ENFORCE, stops_per_hour=3), ProjectChange(second_person=False)):
        before = load_project(project)
        waiting = second_person.change_project(project.database, ada, change)
        assert waiting is not None
        assert load_project(project) == before
        second_person.confirm_proposal(project.database, ben, waiting.id)
        assert load_project(project) != before
    assert (load_project(project).max_mode, load_project(project).stops_per_hour) == ("enforce", 3)
    second_person.change_project(project.database, ada, ProjectChange(second_person=True))
    assert second_person.change_project(project.database, ada, ProjectChange(max_mode=Mode.SHADOW)) is None
    assert load_project(project).max_mode == "shadow"


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        ({"default_mode": Mode.ENFORCE}, {"default_mode": Mode.SHADOW}),
        ({"stops_per_hour": 30}, {"stops_per_hour": 5}),
        ({"stops_per_hour": None}, {"stops_per_hour": 5}),
        ({"stops_share": 0.5}, {"stops_share": 0.25}),
        ({"stops_share": None}, {"stops_share": 0.5}),
        ({"stale_seconds": 600.0}, {"stale_seconds": 300.0}),
        ({"veto_window_seconds": 0.0}, {"veto_window_seconds": 600.0}),
        ({"held_out_share": 0.0}, {"held_out_share": 0.1}),
        ({"confirm_seconds": 1.0}, {"confirm_seconds": 900.0}),
        ({"case_seconds": 0.0}, {"case_seconds": 600.0}),
        ({"case_evals": 0}, {"case_evals": 8}),
        ({"cases_per_key_and_day": 1_000_000}, {"cases_per_key_and_day": 20}),
        ({"act_from_messages": False}, {"act_from_messages": True}),
        ({"stop_hours": None}, {"stop_hours": "mon-fri 09:00-18:00"}),
        ({"allowed_policies": None}, {"allowed_policies": []}),
        ({"allowed_policies": ["early"]}, {"allowed_policies": ["early@1"]}),
        ({"allowed_policies": ["early", "cautious"]}, {"allowed_policies": ["early"]}),
    ],
)
def test_easing_a_setting_needs_a_second_person(
    database: Database, wide: dict[str, object], narrow: dict[str, object]
) -> None:
    """A guard is loosened, or more policies allowed, by two people, and the reverse by one."""
    project = set_up_project(database, "enforce")
    ada, ben = create_author(project, "ada"), create_author(project, "ben")
    second_person.change_project(database, ada, ProjectChange.model_validate(narrow | {"second_person": True}))
    narrow_project = load_project(project)
    waiting = second_person.change_project(database, ada, ProjectChange.model_validate(wide))
    assert waiting is not None
    assert waiting.summary.startswith(f"Set {next(iter(wide))} = ")
    assert load_project(project) == narrow_project
    second_person.confirm_proposal(database, ben, waiting.id)
    wide_project = load_project(project)
    assert wide_project != narrow_project
    assert second_person.change_project(database, ada, ProjectChange.model_validate(narrow)) is None
    assert load_project(project) == narrow_project


@pytest.mark.parametrize("allowed", [None, ["cautious@1"]])
def test_another_default_policy_needs_a_second_person(project: ProjectFixture, allowed: list[str] | None) -> None:
    """It decides on runs whose trainers chose nothing: not even an allowed policy becomes the default by one person."""
    ada = create_author(project, "ada")
    second_person.change_project(project.database, ada, ProjectChange(allowed_policies=allowed))
    waiting = second_person.change_project(project.database, ada, ProjectChange(default_policy="cautious@1"))
    assert waiting is not None
    assert load_project(project).default_policy == "paper"
    second_person.confirm_proposal(project.database, create_author(project, "ben"), waiting.id)
    assert load_project(project).default_policy == "cautious@1"


def test_confirmed_change_sets_only_the_changed_fields(project: ProjectFixture) -> None:
    """A form sends every setting, and one that was equal then is not reverted by the confirmation."""
    form = ProjectChange(max_mode=Mode.ENFORCE, stops_per_hour=30)
    waiting = second_person.change_project(project.database, create_author(project, "ada"), form)
    assert waiting is not None
    second_person.change_project(project.database, create_author(project, "ada"), ProjectChange(stops_per_hour=2))
    second_person.confirm_proposal(project.database, create_author(project, "ben"), waiting.id)
    assert load_project(project).stops_per_hour == 2


def test_promotion_to_enforce_needs_two_admins(project: ProjectFixture) -> None:
    """The step to canary needs one confirmation, that to enforce two, and so does removing the stage."""
    with project.database.transaction() as tx:
        rollout_stage.set_rollout_stage(tx, project.id, "watch-all-roles", 1, StageTerms(0.8, 0.25), NOW)
    run, ada, ben = (
        project.open_run(policy="watch-all-roles"),
        create_author(project, "ada"),
        create_author(project, "ben"),
    )

    def find_stage() -> str:
        with project.database.reading() as tx:
            stage = rollout_stages.find_stage(tx, project.id, "watch-all-roles")
        return "none" if stage is None else stage.stage

    def confirm(author: Author) -> str:
        rollout_stage.review_rollout_stage(project.database, project.id, "watch-all-roles", NOW)
        with project.database.reading() as tx:
            (proposal,) = proposals.list_open(tx, project.id, NOW, ["watch-all-roles"])
        second_person.confirm_proposal(project.database, author, proposal.id)
        return find_stage()

    insert_cases(project.database, run, 60)
    assert confirm(ada) == Stage.CANARY
    assert [confirm(ada), confirm(ada), confirm(ben)] == ["canary", "canary", "enforce"]
    assert second_person.remove_stage(project.database, ada, "watch-all-roles") is not None
    assert find_stage() == Stage.ENFORCE
    assert second_person.remove_stage(project.database, ben, "watch-all-roles") is None
    assert find_stage() == "none"


def test_easing_the_terms_of_a_stage_needs_two_admins(project: ProjectFixture) -> None:
    """A lower required precision or a larger canary waits for a second admin; stricter terms take effect at once."""
    ada, ben = create_author(project, "ada"), create_author(project, "ben")

    def set_terms(author: Author, required_precision: float, canary_share: float) -> Proposal | None:
        terms = StageTerms(required_precision, canary_share)
        return second_person.set_stage(project.database, author, "watch-all-roles", terms)

    def find_terms() -> tuple[float, float]:
        with project.database.reading() as tx:
            stage = rollout_stages.find_stage(tx, project.id, "watch-all-roles")
        assert stage is not None
        return stage.required_precision, stage.canary_share

    assert set_terms(ada, 0.8, 0.25) is None
    assert set_terms(ada, 0.9, 0.2) is None
    for terms, summary in [((0.8, 0.2), "required_precision = 80.0 %"), ((0.8, 0.5), "canary_share = 50.0 %")]:
        before = find_terms()
        waiting = set_terms(ada, *terms)
        assert waiting is not None
        assert waiting.summary == f"Set {summary} for the rollout stage of policy watch-all-roles"
        assert find_terms() == before
        second_person.confirm_proposal(project.database, ben, waiting.id)
        assert find_terms() == terms


def test_version_of_an_allowed_policy_needs_two_people(project: ProjectFixture) -> None:
    """A version that trainers may choose by the policy's name, or that was allowed before it existed, is proposed; one
    of another policy is stored at once."""
    second_person.change_project(
        project.database, create_author(project, "ada"), ProjectChange(allowed_policies=["ours", "fixed@1", "later@2"])
    )
    for name, stored_at_once in [("fixed", False), ("later", True), ("draft", True)]:
        stored = second_person.add_policy(project.database, create_author(project, "ada"), create_policy(name, 2))
        assert isinstance(stored, StoredPolicy) is stored_at_once, name
    later = second_person.add_policy(project.database, create_author(project, "ada"), create_policy("later", 3))
    assert isinstance(later, Proposal)
    proposal = second_person.add_policy(project.database, create_author(project, "ada"), create_policy("ours", 2))
    assert isinstance(proposal, Proposal)
    assert (proposal.state, proposal.summary) == ("open", "Add version 1 of policy ours")
    assert proposal.document == policy_to_document(create_policy("ours", 2))
    with pytest.raises(Conflict, match="another proposal"):
        second_person.add_policy(project.database, create_author(project, "ben"), create_policy("ours", 1))
    same = second_person.add_policy(project.database, create_author(project, "ben"), create_policy("ours", 2))
    assert isinstance(same, StoredPolicy)
    assert same.reference == "ours@1"
    assert second_person.add_policy(project.database, create_author(project, "ada"), create_policy("ours", 2)) == same
    assert list_actions(project, "policy.created")[0] == ("policy.created", "ben")


def test_draft_of_a_policy_without_runs_needs_no_second_person(project: ProjectFixture) -> None:
    """While any policy is allowed, a version waits if its policy is shipped or has had runs; another one is stored."""
    ada = create_author(project, "ada")
    assert load_project(project).allowed_policies is None
    for name, k, stored_at_once in [("draft", 2, True), ("draft", 4, True), ("early", 2, False), ("default", 2, False)]:
        stored = second_person.add_policy(project.database, ada, create_policy(name, k))
        assert isinstance(stored, StoredPolicy) is stored_at_once, name
    project.open_run(policy="draft")
    proposal = second_person.add_policy(project.database, ada, create_policy("draft", 5))
    assert isinstance(proposal, Proposal)
    assert proposal.summary == "Add version 3 of policy draft"


def create_policy(name: str, k: int) -> Policy:
    return policy_from_document({"name": name, "members": [{"detector": "k_decline", "params": {"k": k}}]})
