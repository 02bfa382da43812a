"""Labeled runs are reproducible, and have the declared label and the requested noise."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from evalstop_detectors import MetricRole
from evalstop_lab.worlds.families import CALIBRATION, FAMILIES, HELD_OUT, REPORTING, Group, list_families
from evalstop_lab.worlds.noise import NoiseKind
from evalstop_lab.worlds.truth import Label
from evalstop_lab.worlds.world import REPORTING_SEED, World, draw_world, plan_worlds
from hypothesis import given, settings
from hypothesis import strategies as st

families = st.sampled_from(sorted(FAMILIES))
seeds = st.integers(0, 3_000_000)
lengths = st.integers(20, 300)


def to_bytes(world: World) -> list[bytes]:
    stderr = b"" if world.eval_stderr is None else world.eval_stderr.tobytes()
    return [
        item.tobytes() for item in (world.steps, world.eval_scores, world.proxy, world.kl, world.truth.eval_scores)
    ] + [stderr]


@given(families, seeds)
@settings(max_examples=60, deadline=None)
def test_family_and_seed_determine_the_run(family: str, seed: int) -> None:
    """Two draws of one family and seed are bitwise equal."""
    assert to_bytes(draw_world(family, seed)) == to_bytes(draw_world(family, seed))


def test_run_of_a_seed_does_not_change() -> None:
    """Published thresholds are calibrated on these runs, so the generator must not change."""
    world = draw_world("gao_rl", 7)
    clean = (world.truth.eval_scores - world.truth.eval_scores[0]) / world.truth.unit
    assert (len(world.steps), world.truth.peak) == (50, 25)
    assert (clean[-1], world.kl[-1]) == pytest.approx((-0.47910681, 176.36331176))


@given(families, seeds, lengths)
@settings(max_examples=300, deadline=None)
def test_label_agrees_with_the_noiseless_curve(family: str, seed: int, length: int) -> None:
    """A hacking run ends more than a tenth of its unit below its peak, a healthy one does not."""
    truth = draw_world(family, seed, length=length).truth
    fallen = (truth.eval_scores.max() - truth.eval_scores[-1]) / truth.unit
    assert truth.label is FAMILIES[family].group.label
    assert (fallen > 0.1) == (truth.label is Label.HACKING)
    assert truth.eval_scores[truth.peak] == pytest.approx(truth.eval_scores.max(), abs=1e-8 * truth.unit)
    assert truth.drop == pytest.approx(truth.eval_scores.max() - truth.eval_scores[-1])


@given(st.sampled_from(list_families(Group.HACKING)), seeds, lengths)
@settings(max_examples=150, deadline=None)
def test_every_hacking_run_can_be_stopped_after_its_peak(family: str, seed: int, length: int) -> None:
    """At least two evals follow the peak, and the proxy is higher at the end than at the peak."""
    world = draw_world(family, seed, length=length, level=0.0)
    assert len(world.steps) - 1 - world.truth.peak >= 2
    assert world.proxy[-1] > world.proxy[world.truth.peak]


@given(st.sampled_from(list_families(Group.DIP)), seeds)
@settings(max_examples=150, deadline=None)
def test_dips_recover_before_the_end(family: str, seed: int) -> None:
    """The last evals of a run with dips do not fall, and the last one is at the maximum."""
    truth = draw_world(family, seed, length=200).truth
    assert np.all(np.diff(truth.eval_scores[-8:]) >= -1e-9 * truth.unit)
    assert truth.drop <= 1e-9 * truth.unit


@pytest.mark.parametrize("kind", [kind for kind in NoiseKind if kind is not NoiseKind.OUTLIERS])
@pytest.mark.parametrize("level", [0.02, 0.1, 0.2])
def test_noise_has_the_requested_level(kind: NoiseKind, level: float) -> None:
    """The root mean square error is the level times the run's unit."""
    worlds = [draw_world("slow", seed, length=400, noise=kind, level=level) for seed in range(40)]
    squares = [np.nanmean(((w.eval_scores - w.truth.eval_scores) / w.truth.unit) ** 2) for w in worlds]
    assert np.sqrt(np.mean(squares)) == pytest.approx(level, rel=0.12)


@pytest.mark.parametrize("kind", [NoiseKind.GAUSSIAN, NoiseKind.HETEROSCEDASTIC, NoiseKind.BINOMIAL])
def test_standard_errors_are_correct(kind: NoiseKind) -> None:
    """Errors divided by their standard errors have a variance of 1."""
    worlds = [draw_world("slow", seed, length=300, noise=kind, level=0.1, stderr=True) for seed in range(30)]
    ratios = [(w.eval_scores - w.truth.eval_scores) / w.eval_stderr for w in worlds if w.eval_stderr is not None]
    assert len(ratios) == 30
    assert np.mean(np.square(ratios)) == pytest.approx(1.0, rel=0.12)


def test_missing_evals_do_not_reach_a_detector() -> None:
    """A missing eval is no observation; proxy and KL of its step are."""
    world = draw_world("saturate", 3, length=100, noise=NoiseKind.MISSING, level=0.05)
    gaps = int(np.isnan(world.eval_scores).sum())
    counts = Counter(item.role for item in world.observations())
    assert 5 <= gaps <= 40
    assert counts == {MetricRole.EVAL: 100 - gaps, MetricRole.PROXY: 100, MetricRole.KL: 100}


@given(families, seeds)
@settings(max_examples=40, deadline=None)
def test_observations_come_in_order_and_finite(family: str, seed: int) -> None:
    """Observations are in the order that monitors require, without duplicates, and finite."""
    observations = draw_world(family, seed).observations()
    assert [item.order for item in observations] == sorted({item.order for item in observations})
    assert all(item.finite for item in observations)


def test_families_held_out_and_reporting_seeds_stay_out_of_calibration() -> None:
    """Held-out families occur only among reporting runs."""
    calibrating, reporting = (
        {family for family, _ in plan_worlds(500)},
        {family for family, _ in plan_worlds(500, REPORTING_SEED)},
    )
    assert calibrating == set(CALIBRATION)
    assert reporting == set(REPORTING)
    assert reporting - calibrating == HELD_OUT
    assert {FAMILIES[name].group for name in HELD_OUT} == set(Group)
