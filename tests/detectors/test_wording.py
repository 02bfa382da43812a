"""Counts and shares in notes."""

from __future__ import annotations

import pytest
from evalstop_detectors.wording import format_count, format_percent


@pytest.mark.parametrize(("number", "words"), [(0, "0 more evals"), (1, "1 more eval"), (2, "2 more evals")])
def test_only_one_thing_is_in_the_singular(number: int, words: str) -> None:
    """A noun has an s behind every number but 1."""
    assert format_count(number, "more eval") == words


def test_a_share_is_written_in_percent() -> None:
    """A space stands between the number and its sign."""
    assert [format_percent(0.468), format_percent(0.468, 1)] == ["47 %", "46.8 %"]
