"""Each row of the threat model names an existing test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TEST_LINK = re.compile(r"\[`(test_\w+)`\]\((tests/[\w/]+\.py)\)")


def list_threats() -> list[str]:
    """The rows of the tables, and the items about the veto."""
    text = (ROOT / "SECURITY.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.endswith("| test |")]
    veto = text.split("## The veto")[1].split("\n## ")[0]
    points = [line for line in veto.splitlines() if line.startswith("- ") and not line.startswith("- Not covered")]
    return rows + points


@pytest.mark.parametrize("line", list_threats(), ids=lambda line: line[2:40])
def test_each_threat_names_an_existing_test(line: str) -> None:
    """Each defended threat of SECURITY.md links a test that exists in the named file."""
    tests = TEST_LINK.findall(line)
    assert tests, line
    for name, path in tests:
        tree = ast.parse((ROOT / path).read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{path} has no {name}"
