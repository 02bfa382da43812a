"""`evalstop-lab sweep`: groups of token policies under each rule, and halving on their recorded curves."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from evalstop_detectors import GroupRule, Score, Scores, check_rule
from evalstop_lab.cli import main
from evalstop_lab.rlhf.population import ALONE, OPTUNA, REFILLED, Setup, make_setup, replay_halving, train_group
from evalstop_lab.rlhf.trainer import Trainer, make_world


@pytest.fixture
def setup() -> Setup:
    """Runs of ten steps of few texts, with an eval after each."""
    setup = make_setup("overoptimizes", 400)
    return replace(setup, config=replace(setup.config, steps=10, samples_per_prompt=2, eval_samples_per_prompt=2))


def test_rules_of_the_study_are_valid() -> None:
    """The service would take each of them."""
    setup = make_setup("healthy", 80)
    for rule in (*setup.rules.values(), *setup.halving.values()):
        if rule is not None:
            check_rule(rule)


def test_run_goes_on_from_the_checkpoint_that_it_copies(setup: Setup) -> None:
    """A copy is the source's state trained further with the explored settings, and no step is lost or added."""
    world = make_world(setup.config)
    runs, spent = train_group(setup, world, 0, GroupRule("pbt", ready_steps=5, sigmas=0.0), refills=False)
    assert spent == 8 * 10
    copies = [run for run in runs if len(run.lineages) > 1]
    assert copies
    for run in copies:
        assert run.since == 5
        trained = []
        for other in runs:
            again = Trainer(run.trainer.config, other.lineages[0][1][5], world)
            again.train_step()
            trained.append(again.state.policy.parameters)
        first = run.lineages[1][1][6].policy.parameters
        assert [place for place, parameters in enumerate(trained) if np.array_equal(parameters, first)] != [run.number]
        assert any(np.array_equal(parameters, first) for parameters in trained)


def test_stopped_runs_make_room_for_others(setup: Setup) -> None:
    """Without refilling the steps after a stop are saved; with it new runs spend them."""
    rule = GroupRule("median", fewest=1, sigmas=0.0)
    world = make_world(setup.config)
    runs, spent = train_group(setup, world, 0, rule, refills=False)
    stopped = [run for run in runs if run.is_stopped]
    assert stopped
    assert spent == sum(run.trainer.state.step for run in runs) < 80
    refilled, all_spent = train_group(setup, world, 0, rule, refills=True)
    assert len(refilled) > 8
    assert 80 <= all_spent < 88


def test_regretted_stops_are_those_of_runs_that_end_among_the_best() -> None:
    """Of two curves the lower is stopped when it comes second; that is regretted if it would have ended higher."""
    rule = GroupRule("halving", fewest=1, first_rung=1, eta=2)
    curves = [Scores().add_scores(Score(step, value, 0.0) for step in range(1, 9)) for value in (1.0, 2.0)]
    right = replay_halving(rule, curves, [1.0, 2.0], 8, seed=0)
    wrong = replay_halving(rule, curves, [2.0, 1.0], 8, seed=0)
    assert 0 < right["stopped"] < 1
    assert right["regretted"] == 0
    assert wrong["regretted"] == right["stopped"] == wrong["stopped"]
    assert right["gpu_hours"] == pytest.approx(2 - right["stopped"] * 7 / 8)


@pytest.mark.slow
def test_sweep_reports_each_rule_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Every rule has its figures; none spends more than eight runs."""
    assert main(["sweep", "--seeds", "1", "--first-seed", "1000", "--hasten", "400", "--jobs", "1", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert set(figures) == {ALONE, "median", REFILLED, "pbt", "pbt, sigmas 0", "halving", OPTUNA}
    for name, row in figures.items():
        assert ("regretted" in row) == (name in ("halving", OPTUNA))
        assert row["gpu_hours"]["value"] <= 8.2
