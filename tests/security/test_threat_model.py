"""Each line of the threat model names a test that there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

NAMED = re.compile(r"\[`(test_\w+)`\]\((tests/[\w/]+\.py)\)")


def list_lines() -> list[str]:
    """What is said to be defended: the rows of the tables, and the points about the veto."""
    text = (ROOT / "SECURITY.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.endswith("| test |")]
    veto = text.split("## The veto")[1].split("\n## ")[0]
    points = [line for line in veto.splitlines() if line.startswith("- ") and not line.startswith("- Not covered")]
    return rows + points


@pytest.mark.parametrize("line", list_lines(), ids=lambda line: line[2:40])
def test_each_line_of_the_threat_model_names_a_test(line: str) -> None:
    """What SECURITY.md says is defended is held by a test, which it names."""
    named = NAMED.findall(line)
    assert named, line
    for name, path in named:
        tree = ast.parse((ROOT / path).read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{path} has no {name}"
