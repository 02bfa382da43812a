"""Cohen's kappa: how far two people agree beyond chance."""

from __future__ import annotations

import random

import pytest
from evalstop_service.rules.agreement import compute_kappa, measure_agreements
from hypothesis import given
from hypothesis import strategies as st

PAIRS = st.lists(st.tuples(st.sampled_from("ab?"), st.sampled_from("ab?")), min_size=1, max_size=40)


def test_kappa_of_a_known_table() -> None:
    """20 times both yes, 15 both no, 5 and 10 times different: kappa is 0.4."""
    table = [("yes", "yes")] * 20 + [("no", "no")] * 15 + [("yes", "no")] * 5 + [("no", "yes")] * 10
    assert compute_kappa(table) == pytest.approx(0.4)


@given(PAIRS)
def test_kappa_is_symmetric_and_within_minus_one_and_one(pairs: list[tuple[str, str]]) -> None:
    """Kappa is 1 only if the two always agree, and undefined if only one label is used."""
    kappa = compute_kappa(pairs)
    assert kappa == compute_kappa([(second, first) for first, second in pairs])
    if kappa is None:
        assert len({label for pair in pairs for label in pair}) == 1
    else:
        assert -1 <= kappa <= 1
        assert (kappa == 1) == all(first == second for first, second in pairs)


def test_kappa_of_random_labels_is_zero() -> None:
    """Two people who label at random have a kappa near 0."""
    random_source = random.Random(1)
    assert compute_kappa(
        [(random_source.choice("ab"), random_source.choice("ab")) for _ in range(10_000)]
    ) == pytest.approx(0, abs=0.03)


def test_only_common_cases_are_compared() -> None:
    """Two people are compared on the cases both labeled; pairs without common cases are left out."""
    labels = {"ana": {1: "a", 2: "b", 3: "a"}, "ben": {2: "b", 3: "a", 4: "a"}, "eve": {9: "a"}}
    (agreement,) = measure_agreements(labels)
    assert (agreement.first, agreement.second, agreement.cases, agreement.alike, agreement.kappa) == (
        "ana",
        "ben",
        2,
        2,
        1.0,
    )
