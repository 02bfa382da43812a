"""The evidence of a detector over a whole series of observations."""

from __future__ import annotations

from collections.abc import Iterable

from evalstop_detectors import Evidence, Observation

from tests.detectors.strategies import AnyDetector


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
