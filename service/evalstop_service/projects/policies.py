"""The policies of a project: the shipped ones, which each project begins with, and its own."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from evalstop_detectors import POLICIES, InvalidPolicy, Policy, policy_from_document, policy_to_document
from evalstop_detectors.policy.shipped import with_panel

from evalstop_service.errors import Invalid, require
from evalstop_service.store import counts, policies, projects
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Transaction
from evalstop_service.store.policies import StoredPolicy
from evalstop_service.store.projects import Project


def add_shipped(tx: Transaction, project: Project, now: datetime) -> None:
    """Store the shipped policies in a new project."""
    for name, policy in POLICIES.items():
        policies.add_policy(tx, project, name, policy_to_document(policy), now)


def load_version(tx: Transaction, project_id: UUID, name: str, version: int | None = None) -> StoredPolicy:
    """The given version of a policy, or its latest; raises NotFound."""
    return require(policies.find_policy(tx, project_id, name, version), f"policy {name!r} in this project")


def find_referred_policy(tx: Transaction, project_id: UUID, reference: str) -> StoredPolicy:
    """The policy that `NAME` (its latest version) or `NAME@VERSION` refers to; raises Invalid, which lists them all."""
    name, _, version = reference.partition("@")
    if version and not (version.isdecimal() and len(version) <= 9):  # the range of the database's integer
        raise Invalid(f"policy {reference!r}: a version number must follow the @, as in paper@1")
    version_found = policies.find_policy(tx, project_id, name, int(version) if version else None)
    if version_found is None:
        names = sorted(policies.load_latest_versions(tx, project_id))
        raise Invalid(f"there is no policy {reference!r} in this project; it has {', '.join(names)}")
    return version_found


def is_allowed(project: Project, reference: str) -> bool:
    """Whether trainers may choose the policy that `NAME` or `NAME@VERSION` refers to."""
    name = reference.partition("@")[0]
    allowed = project.allowed_policies
    return allowed is None or {name, reference} & {*allowed, project.default_policy} != set()


def is_relied_on(tx: Transaction, project: Project, name: str, version: int) -> bool:
    """Whether trainers may rely on a version of a policy, once it is stored as the latest: it is the default or allowed
    by name, was allowed before it existed, or any policy is allowed and this one is shipped or has had runs."""
    if {name, f"{name}@{version}"} & {*(project.allowed_policies or ()), project.default_policy}:
        return True
    return project.allowed_policies is None and (name in POLICIES or policies.has_runs(tx, project.id, name))


def create_policy(tx: Transaction, author: Author, policy: Policy) -> StoredPolicy:
    """Store a policy as the next version of its name, with an audit entry; returns the latest if it is equal."""
    project = projects.lock_project(tx, author.project_id)
    before = policies.find_policy(tx, project.id, policy.name)
    stored = policies.add_policy(tx, project, policy.name, policy_to_document(policy), author.at)
    if stored != before:
        counts.require_room(tx, project, "policies", author.at, added=1)
        author.record(tx, "policy.created", f"policy {stored.reference}", {"id": str(stored.id)})
    return stored


def change_panel(tx: Transaction, author: Author, project: Project) -> None:
    """Store each shipped policy with the panel of the project as its next version, unless it has that; raises Invalid
    for an unknown detector, and for more members than a policy may have."""
    for name in POLICIES:
        latest = policy_from_document(load_version(tx, project.id, name).document)
        try:
            create_policy(tx, author, with_panel(latest, project.panel))
        except InvalidPolicy as error:
            raise Invalid(f"panel: {error}", "panel", str(error)) from error


def read_policy(tx: Transaction, policy_id: UUID) -> Policy:
    """The policy with this id, which a run refers to."""
    return policy_from_document(policies.get_policy(tx, policy_id).document)
