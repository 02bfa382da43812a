"""Types for argparse that refuse numbers no command could use, and say which would do."""

from __future__ import annotations

import argparse


def whole_number(text: str) -> int:
    """Read a whole number of at least 0."""
    return _at_least(0, text)


def positive_number(text: str) -> int:
    """Read a whole number of at least 1."""
    return _at_least(1, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number of at least {least}")
    return int(text)
