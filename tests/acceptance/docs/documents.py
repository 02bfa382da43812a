"""Reads the repository's Markdown: code blocks, links and headings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = ("", "docs", "docs/detectors", "docs/operations", "detectors", "service", "clients", "lab", "tests/data")
CODE_BLOCK = re.compile(r"^(?P<indent> *)```(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
"""A code block may be indented, as in a tab."""
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A code block.

    `language` is its language, `runs` whether it is marked to run by itself, and `is_step` whether it is run as a part
    of its page.
    """

    file: Path
    language: str
    runs: bool
    is_step: bool
    text: str
    number: int

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}[{self.number}]"


def list_documents() -> list[Path]:
    """Every Markdown document of the repository."""
    return sorted(file for folder in FOLDERS for file in (ROOT / folder).glob("*.md"))


def list_blocks(language: str) -> list[Block]:
    """The code blocks of all documents in a language."""
    return [block for file in list_documents() for block in read_blocks(file) if block.language == language]


def read_blocks(file: Path) -> list[Block]:
    """The code blocks of a document."""
    blocks = []
    for number, match in enumerate(CODE_BLOCK.finditer(file.read_text()), start=1):
        language, _, mark = match["info"].partition(" ")
        text = re.sub(f"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
        blocks.append(Block(file, language, mark == "run", mark in ("run", "script"), text, number))
    return blocks


def read_links(file: Path) -> list[str]:
    """The targets of all links and images outside code."""
    prose = re.sub(r"`[^`\n]*`", "", CODE_BLOCK.sub("", file.read_text()))
    return LINK.findall(prose)


def read_anchors(file: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub derives them."""
    headings = re.findall(r"^#+ (.+)$", CODE_BLOCK.sub("", file.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def read_commands(block: Block) -> list[str]:
    """The commands of a shell block, one a line, with comments removed and continuations joined."""
    text = block.text.replace("\\\n", " ")
    lines = (re.sub(r"(^|\s+)#.*$", "", line).strip() for line in text.splitlines())
    return [line for line in lines if line]
