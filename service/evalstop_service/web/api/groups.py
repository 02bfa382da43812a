"""Routes of groups: the rule that compares the runs of a group, its members, and what it has decided."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from evalstop_detectors import GroupRule
from fastapi import Path
from msgspec import structs
from pydantic import Field, RootModel

from evalstop_service.decisions import group_rules
from evalstop_service.decisions.group_rules import GroupedRun
from evalstop_service.domain.fields import Name
from evalstop_service.domain.statuses import RunStatus
from evalstop_service.store import groups
from evalstop_service.store.groups import Copy, Group
from evalstop_service.web.api.json_body import API, create_router
from evalstop_service.web.api.run_views import DecisionOut, view_decisions
from evalstop_service.web.api.schemas import Answer, Items, Stored, Time, answers
from evalstop_service.web.context import Db, IngestOrOperate, Now, Operate, Read
from evalstop_service.web.problems import Problem, ProblemKind

router = create_router("groups", prefix=f"{API}/groups")

RULE = {"kind": "pbt", "mode": "enforce", "ready_steps": 200, "hyperparameters": {"lr": {"low": 1e-7, "high": 1e-5}}}

GroupName = Annotated[Name, Path(description="name of the group")]


class RuleDocument(RootModel[dict[str, Any]]):
    """The rule of a group; `GroupRule` of the detectors defines its fields."""


@answers(GroupRule)
class GroupRuleOut(Answer):
    """The rule of a group, with every default written out."""


@answers(Copy)
class DescentOut(Answer):
    """A copy that a run has made: its attempt descends from the checkpoint of another run."""


class MemberOut(Answer):
    """A run of a group, as its rule sees it."""

    run_id: UUID = Field(description="id of the member, which is a run")
    name: str = Field(description="the run's name")
    status: RunStatus = Field(description="running, or how it ended")
    attempt: int = Field(description="its current attempt")
    step: int | None = Field(description="the highest step with an observation; null: none")
    since: int = Field(description="the step at which its lineage began: 0, or that of the checkpoint it copied last")
    score: Stored | None = Field(description="its last eval, in the unit of the metric; null: none")
    hyperparameters: dict[str, float | str] = Field(description="those that the rule explores, as they are now")
    initial: dict[str, float | str] = Field(description="those that the rule explores, as the run began")
    descent: list[DescentOut] = Field(description="the copies that it has made, oldest first")


class RunGroupOut(Answer):
    """A group: its rule, its newest 500 runs, and the decisions of its rule; in lists without both."""

    name: str = Field(description="the name of the group, as its runs give it")
    rule: GroupRuleOut | None = Field(None, description="how its runs are compared; null: they are not")
    created_at: Time | None = Field(None, description="when the rule was set; null: there is none")
    actor: str | None = Field(None, description="who set it; null: there is none")
    members: list[MemberOut] = Field([], description="its runs, oldest first")
    decisions: list[DecisionOut] = Field(
        [], description=f"of its rule, the newest {group_rules.MOST_DECISIONS}, newest first"
    )


@router.get("")
def list_groups(caller: Read, database: Db) -> Items[RunGroupOut]:
    """The groups that have a rule, by name."""
    with database.reading() as tx:
        return Items[RunGroupOut](items=[_view_group(group) for group in groups.list_groups(tx, caller.project_id)])


@router.get("/{name:path}")
def get_group(name: GroupName, caller: Read, database: Db) -> RunGroupOut:
    """A group's rule, its runs with what they descend from, and what its rule has decided."""
    with database.reading() as tx:
        loaded = group_rules.load_group(tx, caller.project_id, name)
        members, decided = map(_view_member, loaded.runs.values()), view_decisions(tx, loaded.decided)
    shown = {"name": name, "members": list(members), "decisions": decided}
    return (RunGroupOut(**shown) if loaded.group is None else _view_group(loaded.group)).model_copy(update=shown)


@router.post("/{name:path}")
def set_group_rule(name: GroupName, body: RuleDocument, caller: IngestOrOperate, database: Db, now: Now) -> RunGroupOut:
    """Set the rule of a group. It decides on each run no more than the run's mode and the project's `max_mode` allow.

    A key with the scope `ingest` sets a rule where there is none; to change one takes `operate`. In a project with
    `second_person` a rule enforces only if an admin sets it.
    """
    rule, scopes = group_rules.parse_rule(body.root), caller.key.scopes
    rights = {"may_change": not {"operate", "admin"}.isdisjoint(scopes), "is_admin": "admin" in scopes}
    with database.transaction() as tx:
        stands = group_rules.set_rule(tx, caller.author(now), name, rule, **rights)
    if stands != structs.replace(rule, mode=stands.mode):
        detail = f"the group {name!r} has another rule; a key with the scope operate may change it"
        raise Problem(403, ProblemKind.SCOPE_MISSING, detail)
    return get_group(name, caller, database)


@router.delete("/{name:path}", status_code=204)
def remove_group_rule(name: GroupName, caller: Operate, database: Db, now: Now) -> None:
    """Remove the rule of a group. Its runs go on, and its decisions stay."""
    with database.transaction() as tx:
        group_rules.remove_rule(tx, caller.author(now), name)


def _view_group(group: Group) -> RunGroupOut:
    return RunGroupOut.model_validate(vars(group) | {"rule": group_rules.read_rule(group)})


def _view_member(member: GroupedRun) -> MemberOut:
    shown = {"run_id": member.run.id, "step": member.run.last_step, "score": member.last_eval}
    return MemberOut.model_validate(structs.asdict(member.run) | vars(member) | shown)
