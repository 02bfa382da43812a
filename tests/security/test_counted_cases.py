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

from tests.service.cases_written import write
from tests.service.scenes import NOW, Scene, evals, set_up

LINE = 0.8
PER_DAY = 20


@pytest.fixture
def scene(database: Database) -> Scene:
    """A project with a policy that has to earn its stage."""
    scene = set_up(database)
    with database.transaction() as tx:
        rollout_stage.set_rollout_stage(tx, scene.project_id, "watchful", 1, LINE, 0.25, NOW)
    return scene


def load(scene: Scene) -> StageCases:
    with scene.database.reading() as tx:
        held = rollout_stages.find_stage(tx, scene.project_id, "watchful")
        assert held is not None
        return rollout_stage.load_stage_cases(tx, held)


def explain(scene: Scene) -> set[str]:
    with scene.database.reading() as tx:
        listed = case_counts.list_cases(tx, scene.project_id, CaseFilter(), limit=200)
        return set(rollout_stage.explain_shortfalls(tx, scene.project_id, listed).values())


@pytest.mark.parametrize(
    ("known", "shortfall", "said"),
    [
        ({"seconds": 40.0}, Shortfall.DURATION, "lasted 40 s of the 10 min needed"),
        ({"evals": 7}, Shortfall.EVALS, "has 7 of the 8 finite evals needed"),
        ({"gpu_hours": 0.02}, Shortfall.GPU_HOURS, "used 0.02 of the 0.1 GPU-hours needed"),
    ],
)
def test_tiny_runs_earn_no_trust(scene: Scene, known: dict[str, Any], shortfall: Shortfall, said: str) -> None:
    """However many short runs say that a policy was right, its precision is not measured by them."""
    run = scene.open(policy="watchful")
    write(scene.database, run, 100, **known)
    write(scene.database, run, 3, gpu_hours=50.0)
    shown = load(scene)
    assert (shown.counted, shown.of_version.decided) == (3, 3)
    assert shown.not_counted == {one: 100 if one is shortfall else 0 for one in Shortfall}
    assert explain(scene) == {said}


def test_one_key_earns_so_much_a_day(scene: Scene) -> None:
    """Of each key and day the first cases count, right or wrong; the next day, and another key, count anew."""
    run, key = scene.open(policy="watchful"), new_id()
    write(scene.database, run, PER_DAY - 1, key_id=key)
    write(scene.database, run, 1, NOW + timedelta(minutes=1), key_id=key, outcome="wrong")
    write(scene.database, run, 60, NOW + timedelta(minutes=2), key_id=key)
    write(scene.database, run, 1, NOW, key_id=key, seconds=1.0)  # what does not count takes no place
    shown = load(scene)
    assert (shown.counted, shown.not_counted[Shortfall.KEY_AND_DAY]) == (PER_DAY, 60)
    assert shown.of_version.value == (PER_DAY - 1) / PER_DAY
    assert explain(scene) == {
        f"its key already has the {PER_DAY} cases that count in a day",
        "lasted 1 s of the 10 min needed",
    }
    write(scene.database, run, 60, NOW + timedelta(days=1), key_id=key)
    write(scene.database, run, 1, NOW, key_id=new_id())
    assert load(scene).counted == 2 * PER_DAY + 1


def test_a_case_says_what_its_run_showed(scene: Scene) -> None:
    """How long it lasted by the service's clock, with how many finite evals; what was resumed away stays shown."""
    run = scene.open(policy="watchful")
    scene.post(run, [*evals(0.1, 0.2, 0.3), PostedObservation("eval", 3, float("nan"))])
    commands.finish_run(scene.database, scene.project_id, run.id, "completed", NOW + timedelta(seconds=40))
    (case,) = scene.rows(tables.cases, run)
    assert (case["seconds"], case["evals"], case["key_id"]) == (40.0, 3, None)


def test_what_is_needed_is_a_setting() -> None:
    """Zeros ask for nothing but a place among the day's cases."""
    needed = CaseRequirements(7200.0, 0, 0.0, 1)
    assert needed.explain(Shortfall.DURATION, 150.0, 0, None) == "lasted 2 min of the 2.0 h needed"
