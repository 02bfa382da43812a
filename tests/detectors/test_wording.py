"""Wording of counts and percentages in notes."""

from __future__ import annotations

import pytest
from evalstop_detectors.wording import format_count, format_percent


@pytest.mark.parametrize(("number", "words"), [(0, "0 more evals"), (1, "1 more eval"), (2, "2 more evals")])
def test_count_of_one_is_singular(number: int, words: str) -> None:
    """A noun is plural for every count but 1."""
    assert format_count(number, "more eval") == words


def test_percentage_has_a_space_before_the_sign() -> None:
    """A share is written in percent with the given number of decimals."""
    assert [format_percent(0.468), format_percent(0.468, 1)] == ["47 %", "46.8 %"]
