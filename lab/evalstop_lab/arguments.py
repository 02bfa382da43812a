"""Checks of arguments: numbers, as argparse types with errors that name the valid range."""

from __future__ import annotations

import argparse
import math


def whole_number(text: str) -> int:
    """Parse an integer of at least 0."""
    return _at_least(0, text)


def positive_number(text: str) -> int:
    """Parse an integer of at least 1."""
    return _at_least(1, text)


def rate(text: str) -> float:
    """Parse a share above 0 and below 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0 and below 1, such as 0.01")
    return value


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
    return int(text)
