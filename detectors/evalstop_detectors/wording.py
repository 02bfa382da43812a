"""Counts and shares as notes and reasons write them."""

from __future__ import annotations


def format_count(number: int, noun: str) -> str:
    """The number and its noun, in the plural by an s: `1 more eval`, `3 more evals`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_percent(share: float, decimals: int = 0) -> str:
    return f"{100 * share:.{decimals}f} %"
