"""The rule of a group of runs: who may set it, what it compares, and which runs it calls for.

A rule compares runs that have the same eval metric and direction. Left out are runs with several evals, whose mean is
standardized within each run, and runs whose eval is a guess: nothing guessed stops a run.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import msgspec
from evalstop_detectors import GroupCall, GroupMember, GroupRule, InvalidRule, Scores, check_rule, judge_group

from evalstop_service.domain.decision_lifecycle import OBSERVED, Mode
from evalstop_service.domain.run import COMBINED_METRIC, MOST_CHANGES
from evalstop_service.domain.statuses import RunStatus
from evalstop_service.errors import Invalid, require
from evalstop_service.runs.watched_metrics import find_eval_metric, find_eval_sign, select_scores
from evalstop_service.store import decisions, groups, mlflow, observations, projects, run_details, run_lists
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.groups import Copy, Group
from evalstop_service.store.projects import Project
from evalstop_service.store.run_lists import RunFilter
from evalstop_service.store.runs import Run

MOST_MEMBERS = 500
"""The newest runs of a group, which its rule compares."""

MOST_EVALS = 100_000
"""A run with more evals is left out."""

MOST_DECISIONS = 200
"""The newest decisions of a rule, which are shown with its group."""

KnownScores = dict[UUID, tuple[int, Scores]]
"""The scores of runs, by the version of their rows."""


@dataclass(frozen=True)
class GroupedRun:
    """A run of a group, with what its rule compares.

    `descent`: the copies that it has made, oldest first. `since`: the step at which its lineage began, 0 for the first.
    `is_live`: it runs, and nothing is decided about it. `initial`: the explored hyperparameters that it began with.
    """

    run: Run
    scores: Scores
    descent: Sequence[Copy]
    since: int
    is_live: bool
    hyperparameters: dict[str, float | str]
    initial: dict[str, float | str]

    @property
    def last_eval(self) -> float | None:
        """In the unit of the metric; None before the first eval."""
        values = self.scores.values
        return find_eval_sign(self.run) * float(values[-1]) if len(values) else None


@dataclass(frozen=True)
class LoadedGroup:
    """A group as it is shown: its rule, if it has one, its newest runs by id, oldest first, and the newest decisions of
    its rule, newest first."""

    group: Group | None
    rule: GroupRule | None
    runs: Mapping[UUID, GroupedRun]
    decided: Sequence[Decision]


def parse_rule(document: dict[str, Any]) -> GroupRule:
    """The rule that a document describes; raises Invalid."""
    # In JSON 200.0 is a whole number as well; msgspec takes it for none.
    document = {
        key: int(value) if isinstance(value, float) and value.is_integer() else value for key, value in document.items()
    }
    try:
        rule = msgspec.convert(document, GroupRule)
        check_rule(rule)
        msgspec.json.encode(rule)  # which refuses unpaired surrogates
    except (msgspec.ValidationError, InvalidRule, UnicodeError) as error:
        raise Invalid(f"the rule: {error}", "population") from None
    return rule


def read_rule(group: Group) -> GroupRule:
    """The stored rule of a group; raises Invalid if a later release wrote it."""
    return parse_rule(group.rule)


def set_rule(
    tx: Transaction, author: Author, name: str, rule: GroupRule, *, may_change: bool, is_admin: bool = False
) -> GroupRule:
    """Give a group a rule, with no wider mode than the project allows; returns the rule that it has then.

    Another rule stays unless the author `may_change` it. Where stops take a second person, only an admin's rule
    enforces. The project is locked, so that of two concurrent rules the first stands.
    """
    project = projects.lock_project(tx, author.project_id)
    before = groups.find_group(tx, project.id, name)
    if project.max_mode is not Mode.ENFORCE or (project.second_person and not is_admin):
        rule = msgspec.structs.replace(rule, mode="shadow")
    if before is not None and (not may_change or read_rule(before) == rule):
        return read_rule(before)
    document = msgspec.json.decode(msgspec.json.encode(rule))
    groups.save_group(tx, Group(project.id, name, document, author.at, author.actor))
    details = {"rule": document} | ({"before": before.rule} if before is not None else {})
    author.record(tx, "group.rule_set", f"group {name}", details)
    return rule


def remove_rule(tx: Transaction, author: Author, name: str) -> None:
    """Remove the rule of a group; raises NotFound."""
    projects.lock_project(tx, author.project_id)
    group = require(groups.find_group(tx, author.project_id, name), f"group {name!r} with a rule in this project")
    groups.remove_group(tx, group)
    author.record(tx, "group.rule_removed", f"group {name}", {"rule": group.rule})


def load_group(tx: Transaction, project_id: UUID, name: str) -> LoadedGroup:
    """A group with a rule or at least one run; raises NotFound for any other name."""
    group = groups.find_group(tx, project_id, name)
    rule = None if group is None else read_rule(group)
    members = load_members(tx, project_id, name, rule)
    require(group or members or None, f"group {name!r} in this project")
    decided = decisions.list_of_group(tx, project_id, name, MOST_DECISIONS)
    return LoadedGroup(group, rule, {member.run.id: member for member in members}, decided)


def load_members(
    tx: Transaction, project_id: UUID, name: str, rule: GroupRule | None, known: KnownScores | None = None
) -> list[GroupedRun]:
    """The newest runs of a group, oldest first. `known`: scores read before, to which those read now are added."""
    listed = run_lists.list_runs(tx, project_id, RunFilter(group=name), MOST_MEMBERS)[::-1]
    run_ids = [run.id for run in listed]
    scores = _load_scores(tx, listed, {} if known is None else known)
    decided = decisions.load_decisions(tx, run_ids)
    descent, lineages = groups.load_descent(tx, run_ids)
    params = mlflow.load_mlflow_runs(tx, run_ids)
    members = []
    for run in listed:
        decision, lineage = decided.get(run.id), lineages[run.id]
        # A copy is beside what a policy only recorded, but an attempt has one decision to end it.
        is_open = decision is None or (rule is not None and rule.kind == "pbt" and decision.state in OBSERVED)
        is_live = is_open and run.status is RunStatus.RUNNING and run.exploit is None
        explored = {} if rule is None else rule.hyperparameters
        own = {key: _read_number(text) for key, text in params[run.id].params.items() if key in explored}
        members.append(
            GroupedRun(
                run,
                scores[run.id],
                descent[run.id],
                lineage[-1].source_step if lineage else 0,
                is_live and len(run.eval_changes) < MOST_CHANGES,
                own | (lineage[-1].hyperparameters if lineage else {}),
                own,
            )
        )
    return members


def judge_members(rule: GroupRule, project: Project, name: str, members: Sequence[GroupedRun]) -> list[GroupCall]:
    """The calls of the rule, which depend on what was observed and the project's seed alone."""
    seed = int.from_bytes(hashlib.sha256(f"{project.seed} {name}".encode()).digest()[:8])
    compared: dict[object, list[GroupMember]] = defaultdict(list)
    for member in members:
        metric = find_eval_metric(member.run)
        guessed = member.run.recognition.guessed if member.run.recognition is not None else []
        if metric not in (None, COMBINED_METRIC, *guessed):
            run_id, sign, settings = str(member.run.id), find_eval_sign(member.run), dict(member.hyperparameters)
            alike = compared[metric, sign]
            alike.append(GroupMember(run_id, member.scores, member.since, member.is_live, settings, sign))
    return [call for alike in compared.values() for call in judge_group(rule, alike, seed)]


def still_calls(tx: Transaction, project: Project, decision: Decision) -> bool:
    """Whether the rule whose decision this is calls for the same again, and may enforce it."""
    group = groups.find_group(tx, project.id, decision.group or "")
    rule = None if group is None else read_rule(group)
    if group is None or rule is None or rule.mode != "enforce":
        return False
    members = load_members(tx, project.id, group.name, rule)
    # Nothing else is decided about the run, which is therefore live if it runs.
    asked = [replace(member, is_live=True) if member.run.id == decision.run_id else member for member in members]
    calls = [call for call in judge_members(rule, project, group.name, asked) if call.member == str(decision.run_id)]
    if decision.exploit is None:
        return bool(calls) and calls[0].source is None
    wanted = (str(decision.exploit.source_run), decision.exploit.source_step)
    sources = [call.source for call in calls if call.source is not None]
    return any((source.source_run, source.source_step) == wanted for source in sources)


def _load_scores(tx: Transaction, listed: Sequence[Run], known: KnownScores) -> dict[UUID, Scores]:
    changed = [run for run in listed if run.id not in known or known[run.id][0] != run.version]
    series = {(run.id, metric): 0 for run in changed if (metric := find_eval_metric(run)) is not None}
    points = observations.load_together(tx, series, MOST_EVALS) if series else {}
    saved = run_details.load_checkpoints(tx, [run.id for run in changed]) if changed else {}
    for run in changed:
        scores = Scores().add_scores(select_scores(run, points.get(run.id) or []))
        scores = scores.add_checkpoints({item.step: item.uri for item in saved.get(run.id, ())})
        known[run.id] = (run.version, scores)
    return {run.id: known[run.id][1] for run in listed}


def _read_number(text: str) -> float | str:
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text  # JSON has no other numbers
