"""The suites that follow public reports and the outlines of public logs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from evalstop_lab.worlds.public_outlines import OUTLINES
from evalstop_lab.worlds.scoring import Outcome, find_cliff, score_cliffs
from evalstop_lab.worlds.third_suite import THIRD_SUITE, Kind, draw_world

SUITES = [(kinds, name) for kinds in (THIRD_SUITE, OUTLINES) for name in kinds]


@pytest.mark.parametrize(("kinds", "name"), SUITES, ids=[name for _, name in SUITES])
def test_every_kind_draws_usable_runs_of_one_label(kinds: Mapping[str, Kind], name: str) -> None:
    """Steps increase, the first eval exists, no plan is shorter than the run, and equal seeds draw equal runs."""
    worlds = [draw_world(name, seed, kinds) for seed in range(6)]
    assert len({world.truth.label for world in worlds}) == 1
    for world in worlds:
        assert (np.diff(world.steps) > 0).all()
        assert np.isfinite(world.eval_scores[0])
        assert len(world.steps) == len(world.eval_scores) == len(world.proxy) == len(world.kl)
        assert world.planned_steps is None or world.planned_steps >= world.last_step
        assert world.observations()
    again = draw_world(name, 3, kinds)
    assert np.array_equal(again.eval_scores, worlds[3].eval_scores, equal_nan=True)
    assert not np.array_equal(again.eval_scores, worlds[4].eval_scores, equal_nan=True)


def test_cliff_counts_if_the_stop_comes_within_six_evals() -> None:
    """The sixth eval from the first that fell still counts, the seventh doesn't; a decline has no cliff."""
    fallen = next(world for world in (draw_world("map-zero", seed) for seed in range(40)) if len(world.steps) > 40)
    cliff = find_cliff(fallen.truth)
    assert cliff is not None
    assert fallen.truth.peak < cliff <= fallen.truth.peak + 2
    for late, hits in ((5, 1), (6, 0)):
        share = score_cliffs([(Outcome(int(fallen.steps[cliff + late])), fallen.truth)])
        assert (share.hits, share.n) == (hits, 1)
    assert find_cliff(draw_world("overfit-long", 1).truth) is None
