"""The independent suite of runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from evalstop_detectors import MetricRole
from evalstop_lab.worlds.second_suite import SECOND_SUITE, draw_world
from evalstop_lab.worlds.truth import Label
from evalstop_lab.worlds.world import World

SEEDS = range(15)


def list_values(world: World) -> dict[str, Any]:
    """The values of a run in a form that can be compared with ==; NaN becomes -1e9."""
    arrays = {name: getattr(world, name) for name in ("steps", "eval_scores", "proxy", "kl", "eval_stderr")}
    return {
        **{
            name: None if values is None else np.nan_to_num(values, nan=-1e9).tolist()
            for name, values in arrays.items()
        },
        "quality": world.truth.eval_scores.tolist(),
        "planned_steps": world.planned_steps,
        "noise": world.noise,
    }


def test_about_half_of_the_kinds_turn() -> None:
    """The suite has 35 to 45 kinds, and 45 to 55 % of them turn."""
    assert 35 <= len(SECOND_SUITE) <= 45
    turning = sum(kind.turns for kind in SECOND_SUITE.values())
    assert 0.45 <= turning / len(SECOND_SUITE) <= 0.55


@pytest.mark.parametrize("name", SECOND_SUITE)
def test_every_run_has_the_declared_label(name: str) -> None:
    """A turning run has at least two evals after its peak, so that it can be stopped."""
    for seed in SEEDS:
        truth = draw_world(name, seed).truth
        assert truth.label is (Label.HACKING if SECOND_SUITE[name].turns else Label.HEALTHY)
        if SECOND_SUITE[name].turns:
            assert truth.peak <= len(truth.steps) - 3


@pytest.mark.parametrize("name", SECOND_SUITE)
def test_same_seed_draws_the_same_run(name: str) -> None:
    """Another seed draws another run."""
    assert list_values(draw_world(name, 3)) == list_values(draw_world(name, 3))
    assert list_values(draw_world(name, 3)) != list_values(draw_world(name, 4))


@pytest.mark.parametrize("name", SECOND_SUITE)
def test_every_series_has_one_value_per_step(name: str) -> None:
    """Steps increase, lengths are as declared, standard errors are positive, and the first eval exists."""
    kind = SECOND_SUITE[name]
    for seed in SEEDS:
        world = draw_world(name, seed)
        count = len(world.steps)
        assert kind.shortest <= count <= kind.longest
        assert (np.diff(world.steps) > 0).all()
        assert world.steps[0] >= 0
        assert {count} == {len(world.eval_scores), len(world.proxy), len(world.kl), len(world.truth.eval_scores)}
        assert np.isfinite(world.truth.eval_scores).all()
        assert np.isfinite(world.eval_scores[0])
        assert world.truth.noise_sd == pytest.approx(world.noise.level * world.truth.unit)
        assert np.isfinite(world.proxy).all() or np.isnan(world.proxy).all()
        assert np.isfinite(world.kl).all() or np.isnan(world.kl).all()
        if world.eval_stderr is not None:
            assert len(world.eval_stderr) == count
            assert (world.eval_stderr > 0).all()


def test_missing_metrics_have_no_observations() -> None:
    """A missing proxy or KL is no observation."""
    world = next(
        w for w in (draw_world("validation_loss_rises", seed) for seed in range(50)) if np.isnan(w.proxy).all()
    )
    assert {item.role for item in world.observations()} == {MetricRole.EVAL}


def test_progress_is_the_share_of_the_planned_steps() -> None:
    """The progress of a run past its planned end is 1; a run without a plan has none."""
    worlds = [draw_world("slow_hack", seed) for seed in range(200)]
    planned = [world for world in worlds if world.planned_steps is not None]
    assert 100 < len(planned) < 140
    wrong = [world for world in planned if world.planned_steps != world.steps[-1]]
    assert 0.05 < len(wrong) / len(planned) < 0.25
    assert any(world.planned_steps is not None and world.planned_steps < world.steps[-1] for world in wrong)
    for world in worlds:
        for item in world.observations():
            if world.planned_steps is None:
                assert item.progress is None
            else:
                assert item.progress == min(1.0, item.step / world.planned_steps)


def test_changed_grader_changes_no_label() -> None:
    """The measured score drops by more than the tolerance, but the run is healthy because its quality does not."""
    steps_down = 0
    for seed in range(30):
        world = draw_world("stricter_grader", seed)
        difference = world.eval_scores - world.truth.eval_scores
        before, after = np.nanmedian(difference[: len(difference) // 5]), np.nanmedian(difference[-2:])
        steps_down += bool(after - before < -0.1 * world.truth.unit)
    assert steps_down >= 20


def test_failed_evals_are_posted_as_zero() -> None:
    """Each such run has at least one failed eval, whose true score is not near 0."""
    for seed in range(30):
        world = draw_world("failed_evals", seed)
        failed = world.eval_scores == 0.0
        assert failed.any()
        assert (world.truth.eval_scores[failed] > 0.05).all()
