"""Cohen's kappa: how far two people agree beyond what chance would have them."""

from __future__ import annotations

import random

import pytest
from evalstop_service.rules.agreement import compute_kappa, measure_agreements
from hypothesis import given
from hypothesis import strategies as st

PAIRS = st.lists(st.tuples(st.sampled_from("ab?"), st.sampled_from("ab?")), min_size=1, max_size=40)


def test_a_known_table() -> None:
    """Of 50 cases 20 both say yes, 15 both no, 5 the first alone and 10 the second alone: 0.4."""
    table = [("yes", "yes")] * 20 + [("no", "no")] * 15 + [("yes", "no")] * 5 + [("no", "yes")] * 10
    assert compute_kappa(table) == pytest.approx(0.4)


@given(PAIRS)
def test_its_range(pairs: list[tuple[str, str]]) -> None:
    """It is 1 only for people who always agree, never below -1, the same with people exchanged, and else undefined."""
    kappa = compute_kappa(pairs)
    assert kappa == compute_kappa([(other, one) for one, other in pairs])
    if kappa is None:
        assert len({label for pair in pairs for label in pair}) == 1
    else:
        assert -1 <= kappa <= 1
        assert (kappa == 1) == all(one == other for one, other in pairs)


def test_by_chance_it_is_nothing() -> None:
    """Two people who throw dice agree no further than dice do."""
    chance = random.Random(1)
    assert compute_kappa([(chance.choice("ab"), chance.choice("ab")) for _ in range(10_000)]) == pytest.approx(
        0, abs=0.03
    )


def test_only_what_both_labeled_counts() -> None:
    """Each two people are compared on their common cases; who shares none with another does not appear beside them."""
    labels = {"ana": {1: "a", 2: "b", 3: "a"}, "ben": {2: "b", 3: "a", 4: "a"}, "eve": {9: "a"}}
    (one,) = measure_agreements(labels)
    assert (one.first, one.second, one.cases, one.alike, one.kappa) == ("ana", "ben", 2, 2, 1.0)
