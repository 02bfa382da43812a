"""Output of commands: tables, with rich if it is installed, or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from importlib import import_module

GAP = 3
"""Spaces between two columns."""

PROSE_WIDTH = 24
"""The least width of a column of prose."""

Shown = str | int | float | bool | datetime | None


def print_json(document: object) -> None:
    sys.stdout.write(json.dumps(document, default=_write_time) + "\n")
    sys.stdout.flush()


def _write_time(value: object) -> str:
    """A time as the API writes it."""
    if not isinstance(value, datetime):
        raise TypeError(f"{value!r} is not JSON")
    return value.astimezone(UTC).isoformat().replace("+00:00", "Z")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Shown]], prose: Collection[str] = ()) -> None:
    """Print a table; plain text without rich; `none` without rows.

    Only the columns named in `prose` are broken into lines, if the others leave them room in the terminal.
    """
    cells = [tuple(map(_format_value, row)) for row in rows]
    if not cells:
        print("none")
        return
    try:
        box, console, table = (import_module(name) for name in ("rich.box", "rich.console", "rich.table"))
    except ImportError:
        _print_columns([tuple(columns), *cells])
        return
    rich_table = table.Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        rich_table.add_column(column, overflow="fold", no_wrap=column not in prose)
    for row in cells:
        rich_table.add_row(*row)
    output = console.Console(highlight=False, markup=False)
    least = sum(
        PROSE_WIDTH if column in prose else max(len(column), *map(len, values))
        for column, values in zip(columns, zip(*cells, strict=True), strict=True)
    ) + GAP * len(columns)
    if not output.is_terminal or output.width < least:
        output.width = 1000  # a broken name or id cannot be copied, a long line can
    output.print(rich_table)


def _print_columns(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def print_facts(facts: Iterable[tuple[str, Shown]]) -> None:
    """Print one fact per line, without those that are None. Needs no library: a command can always print its result."""
    texts = [(name, _format_value(value)) for name, value in facts if value is not None]
    width = max((len(name) for name, _ in texts), default=0)
    for name, text in texts:
        print(f"{name:<{width}}  {text}")


def parse_time(text: str | None) -> datetime | None:
    """A time as the API writes it."""
    return datetime.fromisoformat(text) if text is not None else None


def format_number(value: float) -> str:
    """A measured value with few digits."""
    return f"{value:.6g}"


def _format_value(value: Shown) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return format_number(value)
    if isinstance(value, datetime):
        return value.astimezone().strftime("%Y-%m-%d %H:%M")
    text = str(value)
    return text if text.isprintable() else "".join(letter if letter.isprintable() else " " for letter in text)
