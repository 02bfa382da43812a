"""One thing has one name: tables stand in the glossary, and no name uses a word that another word has replaced."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from evalstop_service.store.tables import metadata

ROOT = Path(__file__).parents[2]
PACKAGES = (
    ROOT / "detectors" / "evalstop_detectors",
    ROOT / "service" / "evalstop_service",
    ROOT / "clients" / "evalstop",
    ROOT / "clients" / "evalstop_client",
    ROOT / "lab" / "evalstop_lab",
)

INSTEAD = {
    "arrival": "message or observation",
    "authority": "rollout stage",
    "bell": "wakeup",
    "brain": "decisions",
    "brake": "guard",
    "chore": "periodic job",
    "crowd": "what is counted",
    "door": "what is called",
    "gold": "eval",
    "hand": "what is done",
    "hindsight": "change point in hindsight",
    "junction": "apply",
    "mouth": "endpoint",
    "news": "message",
    "point": "observation",
    "pulse": "run health",
    "rehearsal": "backtest",
    "reservation": "guard",
    "seal": "encrypt",
    "setback": "clock skew",
    "signal": "role",
    "stroke": "save",
    "tally": "count",
    "told": "reported",
    "truth": "outcome",
    "vault": "encryption",
    "vigil": "stale-run monitor",
    "vital": "run health",
}
"""Words that nobody in the field uses, or that mean something else there, and what to say."""

FIELD_TERMS = re.compile(
    r"(choose|checkpoint|shutdown)_?signals?|signal_(each|name|number)|^signals?$"  # terms of operating systems,
    r"|(change|operating|entry|check)_?points?",  # of statistics, and of software
    re.IGNORECASE,
)

EXCEPTIONS = {
    "evalstop_lab/rlhf/gold.py",  # Gao's gold reward model
    "evalstop_lab/worlds/truth.py",  # the ground truth of drawn runs
    "evalstop_lab.Gold",
    "evalstop_lab.Truth",
    "evalstop_lab._draw_truth",
    "evalstop_lab.draw_gold",
}


def find_forbidden(name: str) -> set[str]:
    """The words of a name, in snake case or camel case, that another word has replaced."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", FIELD_TERMS.sub("", name))
    return {word.lower() for word in words if {word.lower(), word.lower().removesuffix("s")} & INSTEAD.keys()}


def list_names() -> Iterator[tuple[str, str]]:
    """Every module, folder, class and function of the packages: where it stands, and its name."""
    for package in PACKAGES:
        for file in package.rglob("*.py"):
            where = file.relative_to(package.parent).as_posix()
            if where.startswith("evalstop_service/migrations/"):
                continue
            for part in file.relative_to(package).with_suffix("").parts:
                yield where, part
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{package.name}.{node.name}", node.name


def test_names_use_the_words_of_the_glossary() -> None:
    """No module, class or function is named by a word that the glossary has another word for."""
    found = {where: find_forbidden(name) for where, name in list_names() if find_forbidden(name)}
    hints = [
        f"{where}: say {INSTEAD.get(word, INSTEAD.get(word.removesuffix('s')))} for {word}"
        for where, words in sorted(found.items())
        if where not in EXCEPTIONS
        for word in words
    ]
    assert hints == []


def test_tables_and_columns_use_the_words_of_the_glossary() -> None:
    """Every table stands in the glossary, and no table or column is named by a word that was replaced."""
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert [table for table in metadata.tables if f"`{table}`" not in glossary] == []
    names = [f"{table}.{column.name}" for table, rows in metadata.tables.items() for column in rows.c]
    assert [name for name in names if find_forbidden(name)] == []


def test_every_exception_is_needed() -> None:
    """An exception whose name is gone is removed from the list."""
    assert EXCEPTIONS - {where for where, name in list_names() if find_forbidden(name)} == set()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Vault", {"vault"}),
        ("open_vaults", {"vaults"}),
        ("find_change_point", set()),
        ("StoredPoint", {"point"}),
        ("CheckpointSignal", set()),
        ("_metric_of_a_signal", {"signal"}),
    ],
)
def test_a_planted_word_is_found(name: str, words: set[str]) -> None:
    """Words are found in both ways of writing names, one and many, and terms of the field are left alone."""
    assert find_forbidden(name) == words
