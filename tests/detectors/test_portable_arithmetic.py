"""Detectors compute the same bits on every supported Python version."""

from __future__ import annotations

import ast
from pathlib import Path

import evalstop_detectors
from evalstop_detectors.summation import add_up

PACKAGE = Path(evalstop_detectors.__file__).parent


def test_no_detector_uses_the_builtin_sum() -> None:
    """No detector uses `sum` or `statistics`, which round differently from Python 3.12 on."""
    violations = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Name) and node.id == "sum")
        or (isinstance(node, ast.ImportFrom) and node.module == "statistics")
        or (isinstance(node, ast.Import) and "statistics" in [alias.name for alias in node.names])
    ]
    assert violations == [], "use evalstop_detectors.summation.add_up or math.fsum"


def test_sums_are_not_compensated() -> None:
    """`add_up` rounds as plain double precision: in 1e16 + 1 the 1 is lost on every version."""
    assert add_up([1e16, 1.0, -1e16]) == 0.0
    assert add_up([]) == 0.0
    assert str(add_up([-0.0])) == "0.0"
