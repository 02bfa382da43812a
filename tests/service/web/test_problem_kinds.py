"""Every kind of problem is used, and has its own title."""

from __future__ import annotations

import ast
from pathlib import Path

import evalstop_service
from evalstop_service.web.problem_kinds import ProblemKind


def test_every_problem_kind_is_used() -> None:
    """The documentation lists no code that no response has."""
    used_kinds = {
        node.attr
        for path in Path(evalstop_service.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ProblemKind"
    }
    assert used_kinds == {kind.name for kind in ProblemKind}
    assert len({kind.title for kind in ProblemKind}) == len(ProblemKind)
