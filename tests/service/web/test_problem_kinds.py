"""Each kind of problem is one that is answered, and differs from the others."""

from __future__ import annotations

import ast
from pathlib import Path

import evalstop_service
from evalstop_service.web.problem_kinds import ProblemKind


def test_every_kind_is_answered_somewhere() -> None:
    """The docs list no code that no answer has, and no two kinds have the same title."""
    answered = {
        node.attr
        for path in Path(evalstop_service.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ProblemKind"
    }
    assert answered == {kind.name for kind in ProblemKind}
    assert len({kind.title for kind in ProblemKind}) == len(ProblemKind)
