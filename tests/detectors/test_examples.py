"""The examples in docstrings run and print what they show."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import evalstop_detectors
import pytest
from evalstop_detectors import DETECTORS, Policy, advance, choose_best

MODULES = [info.name for info in pkgutil.walk_packages(evalstop_detectors.__path__, "evalstop_detectors.")]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_pass(name: str) -> None:
    """Every example of the module prints what its docstring says."""
    assert doctest.testmod(importlib.import_module(name), raise_on_error=True).failed == 0


@pytest.mark.parametrize("item", [*DETECTORS.values(), Policy, advance, choose_best])
def test_docstring_has_an_example(item: object) -> None:
    """Every detector, Policy, advance and choose_best have an example."""
    assert ">>> " in (item.__doc__ or "")
