"""Counts lines and files of Python, a room each, and compares them with their budgets: `make size`.

With `--most`, as in `make test`, only the whole product fails, where it has grown beyond `MOST`.
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
    Room("clients", 10_200, 80, ("clients/evalstop_client", "clients/evalstop")),
    Room("service", 30_000, 200, (SERVICE,)),
    Room("lab", 11_500, 95, ("lab/evalstop_lab",)),
)
PRODUCT = Room("product", 58_000, 420, tuple(path for room in DISTRIBUTIONS for path in room.paths))
TESTS = Room("tests", 54_000, None, ("tests",))
MOST = Room("product", 60_843, 420, PRODUCT.paths)
"""What the product may not exceed until it fits its budget. Lower it in each commit that makes the product smaller."""
ROOMS_OF_THE_SERVICE = (
    Room("cli, app, settings", 1_900, 14, (SERVICE,)),
    Room("web, its own", 1_300, 8, (f"{SERVICE}/web",)),
    Room("web/api", 3_700, 32, (f"{SERVICE}/web/api",)),
    Room("web/mlflow", 1_500, 9, (f"{SERVICE}/web/mlflow",)),
    Room("web/pages", 4_000, None, (f"{SERVICE}/web/pages",)),
    Room("ingest", 2_200, 12, (f"{SERVICE}/ingest",)),
    Room(
        "decisions ... projects",
        3_900,
        None,
        tuple(f"{SERVICE}/{name}" for name in ("decisions", "evaluation", "runs", "projects")),
    ),
    Room("webhooks", 2_200, 18, (f"{SERVICE}/webhooks",)),
    Room("store", 5_700, 36, (f"{SERVICE}/store",)),
    Room("security, observability", 1_100, None, (f"{SERVICE}/security", f"{SERVICE}/observability")),
    Room("domain", 2_300, 14, (f"{SERVICE}/domain",)),
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
    if "--most" in arguments:
        lines, files = count(MOST)
        if is_over(MOST, lines, files):
            print(f"the product has {lines:,} lines in {files} files, and may have {MOST.lines:,} in {MOST.files}")
            print("delete something first, or move MOST in tests/size.py with a reason")
            return 1
        return 0
    over = 0
    print(f"{'room':26}{'lines':>8}{'budget':>8}{'files':>8}{'budget':>8}")
    for rooms in (DISTRIBUTIONS, (PRODUCT, TESTS), ROOMS_OF_THE_SERVICE):
        for room in rooms:
            lines, files = count(room, rooms if rooms is ROOMS_OF_THE_SERVICE else ())
            over += is_over(room, lines, files)
            counts = f"{lines:8,}{room.lines:8,}{files:8}{room.files or '':>8}"
            print(f"{room.name:26}{counts}{'  over' if is_over(room, lines, files) else ''}")
        print()
    if over:
        print(f"{over} over budget: delete something first, or move the budget in tests/size.py with a reason")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
