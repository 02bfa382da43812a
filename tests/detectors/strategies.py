"""Hypothesis strategies: parameters of detectors, series of observations, policies; and evidence over a series."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from evalstop_detectors import (
    ROLES,
    Detector,
    EvalRequests,
    Evidence,
    GuardKind,
    Member,
    MetricRole,
    Observation,
    Policy,
    Thresholds,
)
from evalstop_detectors.detectors.collapse import Collapse
from evalstop_detectors.detectors.divergence import Divergence
from evalstop_detectors.detectors.focus import Focus
from evalstop_detectors.detectors.gao_fit import GaoFit
from evalstop_detectors.detectors.k_decline import KDecline
from evalstop_detectors.detectors.non_finite import NonFinite
from evalstop_detectors.detectors.posterior import Posterior
from evalstop_detectors.detectors.river_drift import RiverDrift
from evalstop_detectors.detectors.sudden_change import SuddenChange
from hypothesis import strategies as st

AnyDetector = Detector[Any]

EXTREME_VALUES = [math.nan, math.inf, -math.inf, sys.float_info.max, -sys.float_info.max, 5e-324, -5e-324, 0.0, -0.0]
EXTREME_VALUES += [0.1, 0.2, 0.1 + 0.2, 0.3, 1.0, math.nextafter(1.0, 2.0), 1e16, 1e16 + 2]

small_counts = st.integers(1, 5)
any_role = st.sampled_from(list(MetricRole))
amounts = st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0, 3.0, 5e-324, sys.float_info.max]) | st.floats(
    0, allow_infinity=False, allow_nan=False
)

DETECTOR_STRATEGIES: dict[str, st.SearchStrategy[AnyDetector]] = {
    "divergence": st.builds(
        Divergence,
        least_evals=st.integers(1, 6),
        slack=st.sampled_from([0.0, 1.0, sys.float_info.max]),
        control_variate=st.booleans(),
        noisy_from=st.sampled_from([0.0, 0.05]),
    ),
    "collapse": st.builds(Collapse, k=st.integers(3, 6), sigmas=st.sampled_from([0.01, 6.0])),
    "focus": st.builds(Focus, candidates=st.sampled_from([4, 32])),
    "gao_fit": st.builds(
        GaoFit,
        least_evals=st.integers(5, 8),
        least_fall=st.sampled_from([0.0, 0.1, 1e6]),
        misfit=st.sampled_from([1.0, 2.0, 1e6]),
    ),
    "k_decline": st.builds(KDecline, k=small_counts, min_delta=amounts, role=any_role),
    "non_finite": st.builds(NonFinite, role=any_role),
    "posterior": st.builds(
        Posterior,
        requests=st.none() | st.builds(EvalRequests, at=st.sampled_from([1e-9, 0.3]), most=st.integers(1, 3)),
        most_evals=st.none() | st.integers(3, 40),
    ),
    "sudden_change": st.builds(
        SuddenChange,
        role=st.sampled_from([role for role, traits in ROLES.items() if traits.hints]),
        factor=st.sampled_from([1.01, 3.0]),
        blocks=st.integers(1, 10),
        falls=st.booleans(),
    ),
    "river_drift": st.builds(RiverDrift, st.sampled_from(["ADWIN", "KSWIN", "PageHinkley"])),
}

any_value = st.sampled_from(EXTREME_VALUES) | st.floats()
finite_values = st.sampled_from([x for x in EXTREME_VALUES if math.isfinite(x)]) | st.floats(
    allow_nan=False, allow_infinity=False
)
round_values = st.integers(-4, 4).map(float)
values = st.one_of(round_values, st.sampled_from([0.0, 1.0, 2.0, math.nan]), any_value)

progress_values = st.none() | st.floats(0, 1) | st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 1.5])
stderr_values = st.none() | st.floats(0, 10)


DrawnObservation = tuple[int, MetricRole, float, float | None, float | None]


def series(
    roles: Iterable[MetricRole], drawn_values: st.SearchStrategy[float] = values, max_size: int = 16
) -> st.SearchStrategy[list[Observation]]:
    """Observations of these roles in step order, with values as drawn, constant, or falling.

    The gaps between steps are from 0 (another role at the same step) to 10**9.
    """
    gaps = st.sampled_from([1, 1, 0, 2, 15, 10**9])
    drawn = st.tuples(gaps, st.sampled_from(sorted(roles)), drawn_values, stderr_values, progress_values)
    shapes = st.sampled_from(["drawn", "drawn", "drawn", "falling", "constant"])
    return st.builds(build_observations, st.lists(drawn, max_size=max_size), shapes)


def build_observations(drawn: Sequence[DrawnObservation], shape: str) -> list[Observation]:
    """Observations at steps that are the sums of the gaps, with values changed to the shape."""
    values = [item[2] for item in drawn]
    if shape == "constant":
        values = values[:1] * len(values)
    if shape == "falling":
        values.sort(reverse=True)
    observations: dict[tuple[int, int], Observation] = {}
    step = 0
    for (gap, role, _, stderr, progress), value in zip(drawn, values, strict=True):
        step += gap
        observation = Observation(role, step, value, stderr, progress)
        observations[observation.order] = observation
    return sorted(observations.values(), key=lambda observation: observation.order)


def add_eval_versions(observations: list[Observation], changes: set[int]) -> list[Observation]:
    """The observations with a new eval version from the steps of these indices on."""
    steps = {observations[index].step for index in changes if index < len(observations)}
    return [
        msgspec.structs.replace(item, eval_version=sum(step <= item.step for step in steps)) for item in observations
    ]


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Policies of 1 to 4 detectors that mostly stop early, some only when several agree."""
    detectors = draw(st.lists(st.one_of(*DETECTOR_STRATEGIES.values()), min_size=1, max_size=4))
    ids = draw(st.just([None] * len(detectors)) | st.permutations([None, "first", "b", "k_decline"]))
    members = tuple(
        Member(detector, draw(thresholds(detector)), member_id)
        for detector, member_id in zip(detectors, ids, strict=False)
    )
    return Policy(
        name=draw(st.from_regex(r"[a-z0-9][a-z0-9._-]{0,63}", fullmatch=True)),
        members=members,
        at_least=draw(st.integers(1, len(members))),
        eval_required=draw(st.booleans()),
        min_evals=draw(st.sampled_from([0, 0, 3])),
        description=draw(st.sampled_from(["", "Stops early; é, 停."])),
        stops_despite=tuple(draw(st.lists(st.sampled_from(GuardKind), max_size=3))),
        evaluate_now=draw(st.none() | st.just(EvalRequests(at=0.2, multiplier=2))),
        observers=tuple(
            Member(detector, draw(thresholds(detector)))
            for detector in draw(st.lists(st.one_of(*DETECTOR_STRATEGIES.values()), max_size=2))
        ),
    )


@st.composite
def thresholds(draw: st.DrawFn, detector: AnyDetector) -> Thresholds:
    """Default thresholds of the detector, or others that its evidence can reach."""
    threshold = st.none() | st.sampled_from(
        [value for value in (0.5, 1.0, 2.0, 7.5) if value <= detector.kind.upper_bound]
    )
    return draw(st.just(detector.thresholds) | st.builds(Thresholds, suspect_at=threshold, stop_at=threshold))


def single_member_policy(detector: AnyDetector) -> Policy:
    """A policy of this detector alone, which may stop a run without an eval."""
    return Policy("single", (Member(detector, detector.thresholds),), eval_required=False)


def eval_series(scores: Sequence[float], start: int = 0) -> list[Observation]:
    """Eval observations at consecutive steps."""
    return [Observation(MetricRole.EVAL, start + index, value) for index, value in enumerate(scores)]


def collect_evidence(detector: AnyDetector, observations: Iterable[Observation]) -> list[Evidence]:
    """The evidence after each observation."""
    state, collected = detector.start(), []
    for observation in observations:
        state, evidence = detector.step(state, observation)
        collected.append(evidence)
    return collected


def collect_values(detector: AnyDetector, observations: Iterable[Observation]) -> list[float]:
    """The value of the evidence after each observation."""
    return [evidence.value for evidence in collect_evidence(detector, observations)]
