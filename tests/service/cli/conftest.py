"""What tests of commands share: a command that runs in the tests' own process sets their logging up as well."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def logging_restored() -> Iterator[None]:
    """Other tests read what they print, and not what is logged beside it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
