"""Counts lines and files of Python, a room each, and compares them with their budgets: `make size`.

With `--over`, as in `make lint`, it prints only the rooms that are larger than their budget.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SERVICE = "service/evalstop_service"


@dataclass(frozen=True)
class Room:
    """A part of the code: the Python below its paths, without what lies in another room below them."""

    name: str
    lines: int
    files: int | None
    """None: any number."""
    paths: tuple[str, ...]


# Change a budget in the commit that needs it, with the reason in its message; better, delete something first.
DISTRIBUTIONS = (
    Room("detectors", 6_800, 46, ("detectors/evalstop_detectors",)),
    Room("clients", 9_900, 80, ("clients/evalstop_client", "clients/evalstop")),
    Room("service", 32_000, 200, (SERVICE,)),
    Room("lab", 8_600, 95, ("lab/evalstop_lab",)),
)
PRODUCT = Room("product", 57_300, 420, tuple(path for room in DISTRIBUTIONS for path in room.paths))
TESTS = Room("tests", 60_800, None, ("tests",))
ROOMS_OF_THE_SERVICE = (
    Room("cli, app, settings", 1_700, 14, (SERVICE,)),
    Room("web, its own", 1_500, 8, (f"{SERVICE}/web",)),
    Room("web/api", 3_700, 32, (f"{SERVICE}/web/api",)),
    Room("web/mlflow", 1_500, 9, (f"{SERVICE}/web/mlflow",)),
    Room("web/pages", 4_000, None, (f"{SERVICE}/web/pages",)),
    Room("ingest", 2_850, 12, (f"{SERVICE}/ingest",)),
    Room(
        "decisions ... projects",
        5_150,
        None,
        tuple(f"{SERVICE}/{name}" for name in ("decisions", "evaluation", "runs", "projects")),
    ),
    Room("webhooks", 2_000, 18, (f"{SERVICE}/webhooks",)),
    Room("store", 6_450, 36, (f"{SERVICE}/store",)),
    Room("security, observability", 1_000, None, (f"{SERVICE}/security", f"{SERVICE}/observability")),
    Room("domain", 2_750, 15, (f"{SERVICE}/domain",)),
)


def list_files(room: Room, others: tuple[Room, ...] = ()) -> list[Path]:
    """The Python files of a room; `others` are the rooms that may lie within it."""
    elsewhere = {ROOT / path for other in others if other is not room for path in other.paths}
    found: list[Path] = []
    for path in room.paths:
        for folder, folders, names in os.walk(ROOT / path):  # does not follow the link to migrations/
            folders[:] = [name for name in folders if Path(folder, name) not in elsewhere]
            found += [Path(folder, name) for name in names if name.endswith(".py")]
    return found


def count(room: Room, others: tuple[Room, ...] = ()) -> tuple[int, int]:
    """The lines and files of a room; `others` are the rooms that may lie within it."""
    files = list_files(room, others)
    return sum(file.read_bytes().count(b"\n") for file in files), len(files)


def is_over(room: Room, lines: int, files: int) -> bool:
    return lines > room.lines or (room.files is not None and files > room.files)


def main(arguments: list[str]) -> int:
    """Print each room beside its budget; 1 if one is larger."""
    over: list[str] = []
    table = [f"{'room':26}{'lines':>8}{'budget':>8}{'files':>8}{'budget':>8}"]
    for rooms in (DISTRIBUTIONS, (PRODUCT, TESTS), ROOMS_OF_THE_SERVICE):
        for room in rooms:
            lines, files = count(room, rooms if rooms is ROOMS_OF_THE_SERVICE else ())
            row = f"{room.name:26}{lines:8,}{room.lines:8,}{files:8}{room.files or '':>8}"
            if is_over(room, lines, files):
                row += "  over"
                over.append(row)
            table.append(row)
        table.append("")
    if "--over" not in arguments:
        print("\n".join(table))
    elif over:
        print("\n".join([table[0], *over]))
    if over:
        print(f"{len(over)} over budget: delete something first, or move the budget in tests/size.py with a reason")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
