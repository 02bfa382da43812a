"""Names in code and database use the words of the glossary."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
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
    ROOT / "tests",
)

REPLACEMENTS = {
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
"""Words that the field does not use, or uses in another sense, and what to write instead."""

FIELD_TERMS = re.compile(
    # Signals of operating systems, points of statistics and of software, and everyday English.
    r"(choose|checkpoint|shutdown|handle|ignore|send|after_a|on|the)_?signals?|^(test_)?signals?$"
    r"|signals?_(are|each|handler|name|number|target)"
    r"|(change|operating|entry|check)_?points?"
    r"|computed_by_hand|hand_over",
    re.IGNORECASE,
)

EXCEPTIONS = {
    "evalstop_lab/worlds/truth.py",  # the ground truth of drawn runs
    "evalstop_lab.Gold",
    "evalstop_lab.Truth",
    "evalstop_lab._draw_truth",
    "evalstop_lab.draw_gold",
    "tests.test_gold_of_healthy_rises_and_stays",
    "tests.test_gold_of_overoptimizes_peaks_and_falls_while_the_proxy_climbs",
    "tests.test_only_metrics_depend_on_the_truth",
}


DEFINITION = re.compile(r"^ *(?:class|def|async def) (\w+)", re.MULTILINE)


def find_replaced_words(name: str) -> set[str]:
    """The words of a name, in snake case or camel case, that have a replacement."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", FIELD_TERMS.sub("", name))
    return {word.lower() for word in words if {word.lower(), word.lower().removesuffix("s")} & REPLACEMENTS.keys()}


def list_names() -> Iterator[tuple[str, str]]:
    """Every module, folder, class and function of the packages and the tests: its place, and its name."""
    for package in PACKAGES:
        for file in package.rglob("*.py"):
            place = file.relative_to(package.parent).as_posix()
            if place.startswith("evalstop_service/migrations/"):
                continue
            for part in file.relative_to(package).with_suffix("").parts:
                yield place, part
            for name in DEFINITION.findall(file.read_text(encoding="utf-8")):
                yield f"{package.name}.{name}", name


@cache  # every file is read
def list_replaced_words() -> dict[str, set[str]]:
    """The words that have a replacement, by the place of the name that has them."""
    return {place: words for place, name in list_names() if (words := find_replaced_words(name))}


def test_names_use_the_words_of_the_glossary() -> None:
    """No module, class or function is named by a word that has a replacement."""
    hints = [
        f"{place}: write {REPLACEMENTS.get(word, REPLACEMENTS.get(word.removesuffix('s')))} for {word}"
        for place, words in sorted(list_replaced_words().items())
        if place not in EXCEPTIONS
        for word in words
    ]
    assert hints == []


def test_tables_and_columns_use_the_words_of_the_glossary() -> None:
    """The glossary lists every table, and no table or column is named by a word that has a replacement."""
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert [table for table in metadata.tables if f"`{table}`" not in glossary] == []
    names = [f"{table}.{column.name}" for table, rows in metadata.tables.items() for column in rows.c]
    assert [name for name in names if find_replaced_words(name)] == []


def test_every_exception_is_needed() -> None:
    """An exception whose name no longer exists is removed from the list."""
    assert EXCEPTIONS - list_replaced_words().keys() == set()


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
def test_replaced_words_are_found(name: str, words: set[str]) -> None:
    """Words are found in snake case and camel case, in singular and plural; terms of the field are not."""
    assert find_replaced_words(name) == words
