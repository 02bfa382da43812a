"""Runs of a group with a rule, in a project on either database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from evalstop_service.clock import utc_now
from evalstop_service.decisions import commands, group_rules, sweeps
from evalstop_service.domain.decision_lifecycle import Exploit, Mode
from evalstop_service.domain.run import RunDescription
from evalstop_service.ingest import CheckpointSaved
from evalstop_service.store import decisions
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database
from evalstop_service.store.decisions import Decision
from evalstop_service.store.runs import Run

from tests.service.project_fixture import ProjectFixture, evals, set_up_project

GROUP = "sweep"
MEDIAN = {"kind": "median", "mode": "enforce", "fewest": 2, "sigmas": 0.0}
PBT = {
    "kind": "pbt",
    "mode": "enforce",
    "ready_steps": 4,
    "fewest": 2,
    "sigmas": 0.0,
    "hyperparameters": {"lr": {"factors": [2.0]}},
}
CURVES = {"best": 0.09, "good": 0.08, "fair": 0.07, "worst": 0.01}
"""The rise in a step of each run of a group."""


def set_up(database: Database, rule: dict[str, Any] = MEDIAN, window_seconds: float = 0.0) -> ProjectFixture:
    """A project without limits on stops, in which a group has this rule."""
    project = replace(set_up_project(database, veto_window_seconds=window_seconds), now=utc_now())
    project.change_settings(stops_share=None, stops_per_hour=None, held_out_share=0.0)
    set_rule(project, rule)
    return project


def set_rule(project: ProjectFixture, rule: dict[str, Any]) -> None:
    author = Author(project.id, "dana", project.now)
    with project.database.transaction() as tx:
        group_rules.set_rule(tx, author, GROUP, group_rules.parse_rule(rule), may_change=True)


def open_group(
    project: ProjectFixture, names: Sequence[str] = tuple(CURVES), steps: int = 6, **options: Any
) -> dict[str, Run]:
    """Runs of the group that rise at their own rate, each with a checkpoint at every second step."""
    members = {}
    for number, name in enumerate(names, 1):
        description = RunDescription(group=GROUP)
        params = {"lr": f"{number}e-6"}
        run = project.open_run(name, mode=Mode.ENFORCE, description=description, params=params, **options)
        extend_run(project, run, range(steps), CURVES[name])
        members[name] = run
    return members


def open_alone(project: ProjectFixture, others_ended: str) -> Run:
    """The worst run of a group whose other runs have ended."""
    members = open_group(project)
    for name in ("best", "good", "fair"):
        project.finish_run(members[name], others_ended)
    return members["worst"]


def extend_run(project: ProjectFixture, run: Run, steps: range, rate: float) -> None:
    project.post_observations(run, evals(*[rate * step for step in steps], start=steps[0]))
    for step in steps[::2]:
        project.submit(run, CheckpointSaved(step, f"file:///{run.name}/{step}"))


def compare(project: ProjectFixture) -> None:
    """One round of the periodic job."""
    sweeps.create_job(project.database, utc_now).do(lambda _: False)


def list_decisions(project: ProjectFixture) -> list[Decision]:
    """All decisions of the group's rule, oldest first."""
    with project.database.reading() as tx:
        return decisions.list_of_group(tx, project.id, GROUP, 100)[::-1]


def list_names(project: ProjectFixture) -> list[tuple[str, str]]:
    return [(decision.run_name, decision.state) for decision in list_decisions(project)]


def offer(project: ProjectFixture, run: Run) -> Exploit | None:
    """What an answer asks the trainer to copy."""
    return commands.offer_exploit(project.database, utc_now, project.load_run(run))
