"""Detectors give the same bits on every Python that is supported."""

from __future__ import annotations

import ast
from pathlib import Path

import evalstop_detectors
from evalstop_detectors.summation import add_up

PACKAGE = Path(evalstop_detectors.__file__).parent


def test_no_detector_uses_the_builtin_sum() -> None:
    """Builtin `sum` and `statistics` round otherwise from Python 3.12 on, so no detector uses them."""
    offending = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Name) and node.id == "sum")
        or (isinstance(node, ast.ImportFrom) and node.module == "statistics")
        or (isinstance(node, ast.Import) and "statistics" in [alias.name for alias in node.names])
    ]
    assert offending == [], "use evalstop_detectors.summation.add_up or math.fsum"


def test_sums_are_not_compensated() -> None:
    """Rounding is what plain double precision makes of it: a lost 1 stays lost, wherever the test runs."""
    assert add_up([1e16, 1.0, -1e16]) == 0.0
    assert add_up([]) == 0.0
    assert str(add_up([-0.0])) == "0.0"
