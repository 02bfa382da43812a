"""Reads the Markdown of the repository: code blocks, links and headings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = ("", "docs", "docs/detectors", "docs/operations", "detectors", "service", "clients", "lab", "tests/data")
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
"""A block may be indented: in a tab."""
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A code block: `kind` is its language, `runs` whether it is marked as one that can be run by itself, `is_step`
    whether it is run as a part of its page."""

    file: Path
    kind: str
    runs: bool
    is_step: bool
    text: str
    number: int

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}[{self.number}]"


def documents() -> list[Path]:
    """Every document for people."""
    return sorted(file for folder in FOLDERS for file in (ROOT / folder).glob("*.md"))


def blocks(kind: str) -> list[Block]:
    """All code blocks of a language."""
    return [block for file in documents() for block in blocks_of(file) if block.kind == kind]


def blocks_of(file: Path) -> list[Block]:
    """All code blocks of a document, as they stand there."""
    found = []
    for number, match in enumerate(FENCE.finditer(file.read_text()), start=1):
        language, _, mark = match["info"].partition(" ")
        text = re.sub(f"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
        found.append(Block(file, language, mark == "run", mark in ("run", "script"), text, number))
    return found


def links(file: Path) -> list[str]:
    """The targets of all links and pictures, code left aside."""
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", file.read_text()))
    return LINK.findall(prose)


def anchors(file: Path) -> set[str]:
    """The anchors that the headings of a document make, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", file.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(block: Block) -> list[str]:
    """The commands of a shell block, one a line, comments and continuations resolved."""
    text = block.text.replace("\\\n", " ")
    lines = (re.sub(r"(^|\s+)#.*$", "", line).strip() for line in text.splitlines())
    return [line for line in lines if line]
