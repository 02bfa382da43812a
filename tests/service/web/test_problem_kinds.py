"""Each problem that the code names has a code of its own, and a line in the docs."""

from __future__ import annotations

import ast
from pathlib import Path

import evalstop_service
from evalstop_service.web.problem_kinds import KINDS_BY_TITLE


def test_every_title_has_a_kind() -> None:
    """A problem whose title no kind has would be answered with the code `other`."""
    titles = {
        call.args[1].value
        for path in Path(evalstop_service.__file__).parent.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Problem"
        if len(call.args) > 1 and isinstance(call.args[1], ast.Constant)
    }
    assert titles
    assert titles <= set(KINDS_BY_TITLE)
