"""Which cases count towards a rollout stage: those of real runs, and of each key so many a day."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from evalstop_service.decisions import commands
from evalstop_service.evaluation import rollout_stage
from evalstop_service.evaluation.rollout_stage import StageCases
from evalstop_service.rules.case_requirements import CaseRequirements, Shortfall
from evalstop_service.store import case_counts, rollout_stages, tables
from evalstop_service.store.case_counts import CaseFilter
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.observations import PostedObservation

from tests.service.case_rows import insert_cases
from tests.service.project_fixture import NOW, ProjectFixture, evals, set_up_project

LINE = 0.8
PER_DAY = 20


@pytest.fixture
def project(database: Database) -> ProjectFixture:
    """A project with a policy that has to earn its stage."""
    project = set_up_project(database)
    with database.transaction() as tx:
        rollout_stage.set_rollout_stage(tx, project.id, "watch-all-roles", 1, LINE, 0.25, NOW)
    return project


def load(project: ProjectFixture) -> StageCases:
    with project.database.reading() as tx:
        held = rollout_stages.find_stage(tx, project.id, "watch-all-roles")
        assert held is not None
        return rollout_stage.load_stage_cases(tx, held)


def explain(project: ProjectFixture) -> set[str]:
    with project.database.reading() as tx:
        listed = case_counts.list_cases(tx, project.id, CaseFilter(), limit=200)
        return set(rollout_stage.explain_shortfalls(tx, project.id, listed).values())


@pytest.mark.parametrize(
    ("known", "shortfall", "said"),
    [
        ({"seconds": 40.0}, Shortfall.DURATION, "lasted 40 s of the 10 min needed"),
        ({"evals": 7}, Shortfall.EVALS, "has 7 of the 8 finite evals needed"),
        ({"gpu_hours": 0.02}, Shortfall.GPU_HOURS, "used 0.02 of the 0.1 GPU-hours needed"),
    ],
)
def test_tiny_runs_earn_no_trust(
    project: ProjectFixture, known: dict[str, Any], shortfall: Shortfall, said: str
) -> None:
    """However many short runs say that a policy was right, its precision is not measured by them."""
    run = project.open_run(policy="watch-all-roles")
    insert_cases(project.database, run, 100, **known)
    insert_cases(project.database, run, 3, gpu_hours=50.0)
    shown = load(project)
    assert (shown.counted, shown.of_version.decided) == (3, 3)
    assert shown.not_counted == {one: 100 if one is shortfall else 0 for one in Shortfall}
    assert explain(project) == {said}


def test_one_key_earns_so_much_a_day(project: ProjectFixture) -> None:
    """Of each key and day the first cases count, right or wrong; the next day, and another key, count anew."""
    run, key = project.open_run(policy="watch-all-roles"), new_id()
    insert_cases(project.database, run, PER_DAY - 1, key_id=key)
    insert_cases(project.database, run, 1, NOW + timedelta(minutes=1), key_id=key, outcome="wrong")
    insert_cases(project.database, run, 60, NOW + timedelta(minutes=2), key_id=key)
    insert_cases(project.database, run, 1, NOW, key_id=key, seconds=1.0)  # what does not count takes no place
    shown = load(project)
    assert (shown.counted, shown.not_counted[Shortfall.KEY_AND_DAY]) == (PER_DAY, 60)
    assert shown.of_version.value == (PER_DAY - 1) / PER_DAY
    assert explain(project) == {
        f"its key already has the {PER_DAY} cases that count in a day",
        "lasted 1 s of the 10 min needed",
    }
    insert_cases(project.database, run, 60, NOW + timedelta(days=1), key_id=key)
    insert_cases(project.database, run, 1, NOW, key_id=new_id())
    assert load(project).counted == 2 * PER_DAY + 1


def test_a_case_says_what_its_run_showed(project: ProjectFixture) -> None:
    """How long it lasted by the service's clock, with how many finite evals; what was resumed away stays shown."""
    run = project.open_run(policy="watch-all-roles")
    project.post_observations(run, [*evals(0.1, 0.2, 0.3), PostedObservation("eval", 3, float("nan"))])
    commands.finish_run(project.database, project.id, run.id, "completed", NOW + timedelta(seconds=40))
    (case,) = project.load_rows(tables.cases, run)
    assert (case["seconds"], case["evals"], case["key_id"]) == (40.0, 3, None)


def test_what_is_needed_is_a_setting() -> None:
    """Zeros ask for nothing but a place among the day's cases."""
    needed = CaseRequirements(7200.0, 0, 0.0, 1)
    assert needed.explain(Shortfall.DURATION, 150.0, 0, None) == "lasted 2 min of the 2.0 h needed"
