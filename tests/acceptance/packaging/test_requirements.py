"""Each distribution declares what it imports."""

from __future__ import annotations

import ast
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]

FRAMEWORKS = {"keras", "lightning", "ray", "torch", "transformers"}
"""Imported by their callbacks in the client, for trainers that use them."""

STANDARD = sys.stdlib_module_names | {"compression"}  # of Python 3.14


find_owners = cache(packages_distributions)


def list_imports(folder: Path) -> dict[str, Path]:
    """The packages imported anywhere in a folder, each with a file that imports it."""
    found: dict[str, Path] = {}
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            else:
                continue
            found |= dict.fromkeys((name.partition(".")[0] for name in names), file)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("distribution", ["detectors", "clients", "service", "lab"])
def test_imports_are_declared(distribution: str) -> None:
    """Every package that a distribution imports is among its requirements or those of its extras."""
    project = tomllib.loads((ROOT / distribution / "pyproject.toml").read_text())["project"]
    parts = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    declared = {canonicalize_name(Requirement(text).name) for part in parts for text in part}
    installed = find_owners()
    undeclared = {
        name: str(file.relative_to(ROOT))
        for name, file in list_imports(ROOT / distribution).items()
        if name not in STANDARD
        and not {canonicalize_name(owner) for owner in installed.get(name, [name])}
        & (declared | {canonicalize_name(project["name"])})
        and not (distribution == "clients" and name in FRAMEWORKS)
    }
    assert undeclared == {}
