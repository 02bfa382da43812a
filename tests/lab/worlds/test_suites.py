"""The independent suite of runs, and those that follow public reports and the outlines of public logs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from evalstop_lab.worlds import second_suite, third_suite
from evalstop_lab.worlds.public_outlines import OUTLINES
from evalstop_lab.worlds.scoring import Outcome, find_cliff, score_cliffs
from evalstop_lab.worlds.second_suite import SECOND_SUITE
from evalstop_lab.worlds.third_suite import THIRD_SUITE, Kind
from evalstop_lab.worlds.truth import Label

SEEDS = range(15)


@pytest.mark.parametrize("name", SECOND_SUITE)
def test_every_run_has_the_declared_label(name: str) -> None:
    """A turning run has at least two evals after its peak, so that it can be stopped."""
    for seed in SEEDS:
        truth = second_suite.draw_world(name, seed).truth
        assert truth.label is (Label.HACKING if SECOND_SUITE[name].turns else Label.HEALTHY)
        if SECOND_SUITE[name].turns:
            assert truth.peak <= len(truth.steps) - 3


@pytest.mark.parametrize("name", SECOND_SUITE)
def test_every_series_has_one_value_per_step(name: str) -> None:
    """Steps increase, lengths are as declared, standard errors are positive, and the first eval exists."""
    kind = SECOND_SUITE[name]
    for seed in SEEDS:
        world = second_suite.draw_world(name, seed)
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


def test_progress_is_the_share_of_the_planned_steps() -> None:
    """The progress of a run past its planned end is 1; a run without a plan has none."""
    worlds = [second_suite.draw_world("slow_hack", seed) for seed in range(200)]
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
        world = second_suite.draw_world("stricter_grader", seed)
        difference = world.eval_scores - world.truth.eval_scores
        before, after = np.nanmedian(difference[: len(difference) // 5]), np.nanmedian(difference[-2:])
        steps_down += bool(after - before < -0.1 * world.truth.unit)
    assert steps_down >= 20


def test_failed_evals_are_posted_as_zero() -> None:
    """Each such run has at least one failed eval, whose true score is not near 0."""
    for seed in range(30):
        world = second_suite.draw_world("failed_evals", seed)
        failed = world.eval_scores == 0.0
        assert failed.any()
        assert (world.truth.eval_scores[failed] > 0.05).all()


SUITES = [(kinds, name) for kinds in (THIRD_SUITE, OUTLINES) for name in kinds]


@pytest.mark.parametrize(("kinds", "name"), SUITES, ids=[name for _, name in SUITES])
def test_every_kind_draws_usable_runs_of_one_label(kinds: Mapping[str, Kind], name: str) -> None:
    """Steps increase, the first eval exists, no plan is shorter than the run, and equal seeds draw equal runs."""
    worlds = [third_suite.draw_world(name, seed, kinds) for seed in range(6)]
    assert len({world.truth.label for world in worlds}) == 1
    for world in worlds:
        assert (np.diff(world.steps) > 0).all()
        assert np.isfinite(world.eval_scores[0])
        assert len(world.steps) == len(world.eval_scores) == len(world.proxy) == len(world.kl)
        assert world.planned_steps is None or world.planned_steps >= world.last_step
        assert world.observations()
    again = third_suite.draw_world(name, 3, kinds)
    assert np.array_equal(again.eval_scores, worlds[3].eval_scores, equal_nan=True)
    assert not np.array_equal(again.eval_scores, worlds[4].eval_scores, equal_nan=True)


def test_cliff_counts_if_the_stop_comes_within_six_evals() -> None:
    """The sixth eval from the first that fell still counts, the seventh doesn't; a decline has no cliff."""
    fallen = next(
        world for world in (third_suite.draw_world("map-zero", seed) for seed in range(40)) if len(world.steps) > 40
    )
    cliff = find_cliff(fallen.truth)
    assert cliff is not None
    assert fallen.truth.peak < cliff <= fallen.truth.peak + 2
    for late, hits in ((5, 1), (6, 0)):
        share = score_cliffs([(Outcome(int(fallen.steps[cliff + late])), fallen.truth)])
        assert (share.hits, share.n) == (hits, 1)
    assert find_cliff(third_suite.draw_world("overfit-long", 1).truth) is None
