"""Actions that require a second person in some projects, and the approvals of proposals.

    stop, release, change ──> project without second_person ──> done
                          └─> with it: proposed, in this person's name ──> another one confirms, or asks for the same
    rollout stage's step up: proposed by the service ──────────────────┘   (to `enforce`, with second_person: two)
                                                                       ──> done, in the transaction of the last approval

Persons are distinguished by their authenticated identity: their OpenID subject, or their key.
"""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import msgspec
from evalstop_detectors import Policy, policy_from_document, policy_to_document

from evalstop_service.decisions import commands
from evalstop_service.domain.decision_commands import Released, StopOrdered
from evalstop_service.domain.statuses import ProposalKind, ProposalState, Stage
from evalstop_service.errors import Conflict
from evalstop_service.evaluation import rollout_stage
from evalstop_service.evaluation.rollout_stage import StageTerms
from evalstop_service.projects import policies, project_settings
from evalstop_service.projects.project_settings import ProjectChange
from evalstop_service.store import decisions, projects, proposals, rollout_stages, runs
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.policies import StoredPolicy, find_policy
from evalstop_service.store.proposals import Approval, Proposal


def stop_run(database: Database, author: Author, run_id: UUID, reason: str) -> Proposal | None:
    """Stop a run on a person's order, or propose it; returns the open proposal, None if it is done."""
    with database.transaction() as tx:
        run = runs.load_run(tx, author.project_id, run_id)
        return _act(tx, author, ProposalKind.STOP_RUN, str(run.id), f"Stop {run.name} now", reason)


def release_stop(database: Database, author: Author, decision_id: UUID, reason: str) -> Proposal | None:
    """Release a stop on hold, or propose it; returns the open proposal, None if it is done."""
    with database.transaction() as tx:
        decision = decisions.load_decision(tx, author.project_id, decision_id)
        summary = f"Release the stop of {decision.run_name}"
        return _act(tx, author, ProposalKind.RELEASE_STOP, str(decision_id), summary, reason)


def change_project(database: Database, author: Author, change: ProjectChange) -> Proposal | None:
    """Change settings of a project, or propose it if they permit more stops; returns the proposal, None if done."""
    with database.transaction() as tx:
        project = projects.lock_project(tx, author.project_id)
        widened = project_settings.describe_widening(project, change)
        same = {name for name in change.model_fields_set if getattr(change, name) == getattr(project, name)}
        argument = change.model_dump_json(exclude_unset=True, exclude=same)
        kind, summary = ProposalKind.CHANGE_PROJECT, f"Set {widened}"
        return _act(tx, author, kind, "settings", summary, "", argument, widens=bool(widened))


def add_policy(database: Database, author: Author, policy: Policy) -> StoredPolicy | Proposal:
    """Store a policy as the next version of its name, or propose it if trainers may rely on it."""
    with database.transaction() as tx:
        project = projects.lock_project(tx, author.project_id)
        latest, document = find_policy(tx, project.id, policy.name), policy_to_document(policy)
        version = 1 if latest is None else latest.version + 1
        is_new = latest is None or latest.document != document
        is_relied_on = is_new and policies.is_relied_on(tx, project, policy.name, version)
        kind, summary = ProposalKind.ADD_POLICY_VERSION, f"Add version {version} of policy {policy.name}"
        argument = msgspec.json.encode(document).decode()
        waiting = _act(tx, author, kind, policy.name, summary, "", argument, widens=is_relied_on)
        return waiting or policies.load_version(tx, project.id, policy.name)


def remove_stage(database: Database, author: Author, policy_name: str) -> Proposal | None:
    """Remove a policy's rollout stage, or propose it; returns the open proposal, None if it is done."""
    with database.transaction() as tx:
        stage = rollout_stages.find_stage(tx, author.project_id, policy_name)
        kind, summary = ProposalKind.REMOVE_STAGE, f"Remove the rollout stage of policy {policy_name}"
        return _act(tx, author, kind, policy_name, summary, widens=stage is not None)


def set_stage(database: Database, author: Author, policy_name: str, terms: StageTerms) -> Proposal | None:
    """Start a policy's rollout in shadow, or change its terms, or propose terms that permit more stops.

    Returns the open proposal, None if it is done. Raises NotFound if there is no such policy.
    """
    with database.transaction() as tx:
        projects.lock_project(tx, author.project_id)
        stage = rollout_stages.find_stage(tx, author.project_id, policy_name)
        widened = "" if stage is None else rollout_stage.describe_widening(stage, terms)
        kind, summary = ProposalKind.CHANGE_STAGE, f"Set {widened} for the rollout stage of policy {policy_name}"
        argument = msgspec.json.encode(terms).decode()
        return _act(tx, author, kind, policy_name, summary, "", argument, widens=bool(widened))


def confirm_proposal(database: Database, author: Author, proposal_id: UUID) -> Proposal:
    """Approve a proposal; the last approval needed carries it out. Raises Conflict if it is not open."""
    with database.transaction() as tx:
        return _add_approval(tx, author, proposals.load_proposal(tx, author.project_id, proposal_id))


def refuse_proposal(database: Database, author: Author, proposal_id: UUID) -> Proposal:
    """Close a proposal without carrying it out; its author may do so too. Idempotent."""
    with database.transaction() as tx:
        proposal = proposals.load_proposal(tx, author.project_id, proposal_id)
        if proposal.state is ProposalState.REFUSED:
            return proposal
        _close_proposal(tx, author, proposal, ProposalState.REFUSED, "proposal.refused")
    return replace(proposal, state=ProposalState.REFUSED, closed_at=author.at)


def _act(
    tx: Transaction,
    author: Author,
    kind: ProposalKind,
    subject: str,
    summary: str,
    reason: str = "",
    argument: str = "",
    *,
    widens: bool = True,
) -> Proposal | None:
    """Do what a person asks for, or propose it where it takes a second person; returns the open proposal, if any.

    `widens`: it ends a job, or permits more stops.
    """
    proposal = Proposal(
        new_id(),
        author.project_id,
        kind,
        subject,
        summary,
        argument,
        reason,
        author.actor,
        (_make_approval(author),),
        ProposalState.OPEN,
        author.at,
    )
    if widens and projects.get_project(tx, author.project_id).second_person:
        return _add_proposal(tx, author, proposal)
    _carry_out(tx, author, proposal)
    return None


def _add_proposal(tx: Transaction, author: Author, proposal: Proposal) -> Proposal | None:
    """Propose an action in a person's name; if another person has proposed the same, this is the second approval."""
    of_subject = (author.project_id, proposal.kind, proposal.subject)
    before = proposals.find_newest(tx, *of_subject)
    if before is not None and before.state_at(author.at) is ProposalState.EXPIRED:
        proposals.close_proposal(tx, before, ProposalState.EXPIRED, author.at)
    if proposals.add_proposal(tx, proposal):
        author.record(
            tx, "proposal.created", f"proposal {proposal.id}", {"summary": proposal.summary, "reason": proposal.reason}
        )
        return proposal
    present = proposals.find_newest(tx, *of_subject)  # maybe committed while this one waited
    assert present is not None, "it prevented this one"
    if present.argument != proposal.argument:
        raise Conflict(f"another proposal by {present.proposed_by} is open: {present.summary}; confirm or refuse it")
    supported = _add_approval(tx, author, present)
    return supported if supported.state is ProposalState.OPEN else None


def _add_approval(tx: Transaction, author: Author, proposal: Proposal) -> Proposal:
    """Add a person's approval; with the last one needed, carry the proposal out.

    1. Carry it out first, under its own locks: run before decision before project.
    2. Close the proposal, unless it was closed meanwhile: then everything is rolled back.

    Raises Conflict if it was approved or closed meanwhile.
    """
    if not proposal.is_open(author.at):
        raise Conflict(f"the proposal is {proposal.state_at(author.at)}; propose it again")
    approval = _make_approval(author)
    if any(other.identity == approval.identity for other in proposal.approvals):
        return proposal
    approvals = (*proposal.approvals, approval)
    if len(approvals) < _count_needed_approvals(tx, proposal):
        approved = proposals.add_approval(tx, proposal, approval)
        if approved is None:
            raise _changed_concurrently(proposal)
        author.record(tx, "proposal.approved", f"proposal {proposal.id}", {"summary": proposal.summary})
        return approved
    proposal = replace(proposal, approvals=approvals)
    _carry_out(tx, author, proposal)
    _close_proposal(tx, author, proposal, ProposalState.CONFIRMED, "proposal.confirmed")
    return replace(proposal, state=ProposalState.CONFIRMED, closed_at=author.at)


def _count_needed_approvals(tx: Transaction, proposal: Proposal) -> int:
    if proposal.kind is not ProposalKind.RAISE_STAGE:
        return 2
    second_person = projects.get_project(tx, proposal.project_id).second_person
    return 2 if second_person and proposal.argument == Stage.ENFORCE else 1


def _carry_out(tx: Transaction, author: Author, proposal: Proposal) -> None:
    reason = proposal.reason
    if len(proposal.approvals) > 1:
        reason += f" (proposed by {proposal.proposed_by})"
    match proposal.kind:
        case ProposalKind.RAISE_STAGE:
            rollout_stage.raise_stage(tx, author, proposal.subject, Stage(proposal.argument))
        case ProposalKind.REMOVE_STAGE:
            rollout_stage.remove_rollout_stage(tx, author, proposal.subject)
        case ProposalKind.CHANGE_STAGE:
            terms, name = msgspec.json.decode(proposal.argument, type=StageTerms), proposal.subject
            version = policies.load_version(tx, author.project_id, name).version
            rollout_stage.set_rollout_stage(tx, author.project_id, name, version, terms, author.at)
            author.record(tx, "rollout_stage.set", f"policy {name}", msgspec.to_builtins(terms))
        case ProposalKind.STOP_RUN:
            command = StopOrdered(author.at, author.actor, reason)
            commands.order_run_stop(tx, author.project_id, UUID(proposal.subject), command)
        case ProposalKind.RELEASE_STOP:
            released = Released(author.at, author.actor, reason)
            commands.carry_out_command(tx, author.project_id, UUID(proposal.subject), released)
        case ProposalKind.ADD_POLICY_VERSION:
            policies.create_policy(tx, author, policy_from_document(msgspec.json.decode(proposal.argument)))
        case ProposalKind.CHANGE_PROJECT:
            change = ProjectChange.model_validate_json(proposal.argument)
            project_settings.apply_change(tx, author, change)


def _close_proposal(tx: Transaction, author: Author, proposal: Proposal, state: ProposalState, action: str) -> None:
    if not proposals.close_proposal(tx, proposal, state, author.at):
        raise _changed_concurrently(proposal)
    details = {"summary": proposal.summary, "proposed_by": proposal.proposed_by}
    author.record(tx, action, f"proposal {proposal.id}", details)


def _changed_concurrently(proposal: Proposal) -> Conflict:
    return Conflict(f"the proposal {proposal.id} was changed concurrently; reload it and try again")


def _make_approval(author: Author) -> Approval:
    return Approval(author.identity or author.actor, author.actor, author.at)
