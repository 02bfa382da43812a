"""Which reader a path wants, and what its run is called when the file does not say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from evalstop_detectors import Signal

from evalstop_lab.errors import UnreadableInput, UnusableArguments
from evalstop_lab.replay import csv_table, jsonl, tensorboard_events, trainer_state
from evalstop_lab.replay.lines import STANDARD_INPUT
from evalstop_lab.replay.runs import Roles, Runs

EVENTS = "events.out.tfevents"
STATE = "trainer_state.json"


def read(paths: Sequence[Path], roles: Roles) -> Runs:
    """Read all runs of these files and folders. Runs of one name are one run, wherever their rows stand.

    Raises UnreadableInput naming file and line, and UnusableArguments for a column that occurs nowhere.
    """
    runs = Runs(roles)
    everywhere: set[str] = set()
    for path in paths:
        found: set[str] = set()
        for source in _sources(path):
            found |= _read_one(source, runs)
        if not found & set(roles.columns.values()):
            raise UnreadableInput(
                path,
                f"it has none of the columns {', '.join(roles.columns.values())}, but {_listed(found)}; say which"
                " is which with --eval, --proxy, --kl or --loss COLUMN",
            )
        everywhere |= found
    for signal, column in roles.columns.items():
        if column != signal and column not in everywhere:
            raise UnusableArguments(f"--{signal} {column}: there is no such column; there are {_listed(everywhere)}.")
    if missing := sorted(roles.minimized - everywhere - {"loss"}):
        raise UnusableArguments(f"--minimize {missing[0]}: there is no such column; there are {_listed(everywhere)}.")
    return runs


def default_roles(named: dict[Signal, str | None], minimized: Sequence[str]) -> Roles:
    """The roles when some columns are named: the others are called as their signal is, and a loss is minimized."""
    columns = {signal: named.get(signal) or signal.value for signal in Signal}
    return Roles(columns, frozenset({*minimized, columns[Signal.LOSS]}))


def _read_one(path: Path, runs: Runs) -> set[str]:
    if path.is_dir() or EVENTS in path.name:
        return tensorboard_events.read(path, _name(path), runs)
    if path.suffix in (".csv", ".tsv"):
        return csv_table.read(path, _name(path), runs)
    if path.suffix == ".json":
        return trainer_state.read(path, _name(path), runs)
    return jsonl.read(path, _name(path), runs)


def _sources(path: Path) -> Iterator[Path]:
    """The file itself; of a folder every trainer state in it and every folder in it that holds event files."""
    if not path.is_dir():
        yield path
        return
    states = sorted(path.rglob(STATE))
    folders = sorted({file.parent for file in path.rglob(f"{EVENTS}*")})
    if not states and not folders:
        raise UnreadableInput(path, f"the folder holds neither {STATE} nor TensorBoard event files; name the files")
    yield from states
    yield from folders


def _name(path: Path) -> str:
    if path == STANDARD_INPUT:
        return "stdin"
    if path.name == STATE or EVENTS in path.name:
        path = path.parent
    elif not path.is_dir():
        path = path.with_suffix("")
    return str(path) if str(path) != "." else path.absolute().name


def _listed(columns: set[str]) -> str:
    names = sorted(columns)
    return (", ".join(names[:30]) + (f" and {len(names) - 30} more" if len(names) > 30 else "")) or "no others"
