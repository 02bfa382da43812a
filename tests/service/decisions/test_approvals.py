"""Approvals of proposals that need several."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from evalstop_service.decisions import second_person
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.domain.statuses import ProposalKind, ProposalState
from evalstop_service.errors import Conflict
from evalstop_service.store import proposals
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.proposals import Approval, Proposal

from tests.service.concurrency import run_concurrently, wait_for_blocked_process
from tests.service.project_fixture import NOW, ProjectFixture, set_up_project


def build_proposal(
    project: ProjectFixture, kind: ProposalKind, subject: str, approvals: tuple[Approval, ...] = ()
) -> Proposal:
    return Proposal(new_id(), project.id, kind, subject, "", "", "", "service", approvals, ProposalState.OPEN, NOW)


def add_proposal(project: ProjectFixture) -> Proposal:
    proposal = build_proposal(project, ProposalKind.REMOVE_STAGE, "default")
    with project.database.transaction() as tx:
        proposals.add_proposal(tx, proposal)
    return proposal


def test_concurrent_approvals_are_both_counted_or_refused(project: ProjectFixture) -> None:
    """Of two people who approve at the same time, each is counted, or is told to try again."""
    proposal = add_proposal(project)
    failures = run_concurrently(
        *(
            lambda name=name: second_person.confirm_proposal(
                project.database, Author(project.id, name, NOW), proposal.id
            )
            for name in ("dana", "erik")
        )
    )
    assert all(isinstance(failure, Conflict) for failure in failures)
    with project.database.reading() as tx:
        stored = proposals.load_proposal(tx, project.id, proposal.id)
    assert len(stored.approvals) == 2 - len(failures)


def test_approval_of_a_changed_proposal_is_refused(project: ProjectFixture) -> None:
    """An approval that was decided on before another one or the end of the proposal is not stored."""
    read = add_proposal(project)
    second_person.confirm_proposal(project.database, Author(project.id, "dana", NOW), read.id)
    approval = Approval("erik", "erik", NOW)
    with project.database.transaction() as tx:
        assert proposals.add_approval(tx, read, approval) is None
        current = proposals.load_proposal(tx, project.id, read.id)
        assert [item.actor for item in current.approvals] == ["dana"]
        approved = proposals.add_approval(tx, current, approval)
        assert approved is not None
        proposals.close_proposal(tx, approved, ProposalState.REFUSED, NOW)
        assert proposals.add_approval(tx, approved, Approval("fay", "fay", NOW)) is None


def test_open_proposal_counts_although_its_id_is_lower(project: ProjectFixture) -> None:
    """A replica whose clock is behind gives it a lower id than an earlier, closed proposal about the same has."""
    first, second = (build_proposal(project, ProposalKind.STOP_RUN, "run") for _ in range(2))
    with project.database.transaction() as tx:
        proposals.add_proposal(tx, second)
        proposals.close_proposal(tx, second, ProposalState.REFUSED, NOW)
        assert proposals.add_proposal(tx, first)
        assert proposals.find_newest(tx, project.id, ProposalKind.STOP_RUN, "run") == first


def test_two_people_who_order_a_stop_at_the_same_time_have_stopped_the_run(postgres_database: Database) -> None:
    """The order that waited for the other's commit finds its proposal, and is the second approval of it."""
    project = set_up_project(postgres_database)
    project.change_settings(second_person=True)
    run = project.open_run()

    def stop_run(name: str) -> Proposal | None:
        author = Author(project.id, name, NOW)
        return second_person.stop_run(project.database, author, run.id, "it diverged")

    approvals = (Approval("dana", "dana", NOW),)
    with ThreadPoolExecutor(1) as thread:
        with project.database.transaction() as tx:
            proposals.add_proposal(tx, build_proposal(project, ProposalKind.STOP_RUN, str(run.id), approvals))
            second = thread.submit(stop_run, "erik")
            wait_for_blocked_process(project.database)
        assert second.result() is None
    assert project.load_decision(run).state == DecisionState.REQUESTED
