"""Which cases count towards a rollout stage: those of long enough runs, and a limited number per key and day."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from evalstop_service.evaluation import rollout_stage
from evalstop_service.evaluation.rollout_stage import StageCases, StageTerms
from evalstop_service.store import rollout_stages, tables
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.observations import PostedObservation

from tests.service.case_rows import insert_cases
from tests.service.project_fixture import NOW, ProjectFixture, evals, set_up_project

REQUIRED_PRECISION = 0.8
PER_DAY = 20


@pytest.fixture
def project(database: Database) -> ProjectFixture:
    """A project with a policy that has to earn its rollout stage."""
    project = set_up_project(database)
    with database.transaction() as tx:
        rollout_stage.set_rollout_stage(tx, project.id, "watch-all-roles", 1, StageTerms(REQUIRED_PRECISION, 0.25), NOW)
    return project


def load_stage_cases(project: ProjectFixture) -> StageCases:
    with project.database.reading() as tx:
        stage = rollout_stages.find_stage(tx, project.id, "watch-all-roles")
        assert stage is not None
        return rollout_stage.load_stage_cases(tx, stage)


@pytest.mark.parametrize("values", [{"seconds": 40.0}, {"evals": 7}])
def test_cases_of_short_runs_do_not_count(project: ProjectFixture, values: dict[str, Any]) -> None:
    """However many short runs a policy stopped rightly, its precision is not measured by them."""
    run = project.open_run(policy="watch-all-roles")
    insert_cases(project.database, run, 100, **values)
    insert_cases(project.database, run, 3, gpu_hours=50.0)
    stage_cases = load_stage_cases(project)
    assert (stage_cases.counted, stage_cases.of_version.decided) == (3, 3)
    assert stage_cases.not_counted == 100


def test_cases_per_key_and_day_are_limited(project: ProjectFixture) -> None:
    """The first cases of a key count, right or wrong; the next day and another key have cases of their own."""
    run, key = project.open_run(policy="watch-all-roles"), new_id()
    insert_cases(project.database, run, PER_DAY - 1, key_id=key)
    insert_cases(project.database, run, 1, NOW + timedelta(minutes=1), key_id=key, outcome="wrong")
    insert_cases(project.database, run, 60, NOW + timedelta(minutes=2), key_id=key)
    insert_cases(project.database, run, 1, NOW, key_id=key, seconds=1.0)  # does not count, nor use up the limit
    stage_cases = load_stage_cases(project)
    assert (stage_cases.counted, stage_cases.not_counted) == (PER_DAY, 61)
    assert stage_cases.of_version.value == (PER_DAY - 1) / PER_DAY
    insert_cases(project.database, run, 60, NOW + timedelta(days=1), key_id=key)
    insert_cases(project.database, run, 1, NOW, key_id=new_id())
    assert load_stage_cases(project).counted == 2 * PER_DAY + 1


def test_case_records_duration_and_number_of_finite_evals(project: ProjectFixture) -> None:
    """The duration is by the service's clock, and a NaN is not counted."""
    run = project.open_run(policy="watch-all-roles")
    project.post_observations(run, [*evals(0.1, 0.2, 0.3), PostedObservation("eval", 3, float("nan"))])
    project.finish_run(run, now=NOW + timedelta(seconds=40))
    (case,) = project.load_rows(tables.cases, run)
    assert (case["seconds"], case["evals"], case["key_id"]) == (40.0, 3, None)
