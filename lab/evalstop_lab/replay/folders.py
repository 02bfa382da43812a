"""Finds the logs in a folder: which files are read and by which reader, and why others are not."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
from evalstop_detectors import MetricRole
from rich.console import Console
from rich.text import Text

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.binary_logs import parse_evaluations, parse_events
from evalstop_lab.replay.rows import (
    STEPS,
    LoggedRun,
    Row,
    add_rows,
    open_log,
    without_gz,
)
from evalstop_lab.replay.runs import ReadErrors, Roles, Run, Runs
from evalstop_lab.replay.text_logs import (
    CONSOLE_MARKS,
    parse_console,
    parse_trainer_state,
    read_csv,
    read_json_lines,
)
from evalstop_lab.replay.wandb_offline import parse_offline_run
from evalstop_lab.report import new_table

EVENTS = "events.out.tfevents"
STATE = "trainer_state.json"
EVALUATIONS = "evaluations.npz"
OFFLINE = ".wandb"
TABLES = ("results.csv", "progress.csv", "metrics.csv")
"""The logs of Ultralytics, stable-baselines3 and Lightning; a folder may have others, of other things."""
TRAINER_LOG = "trainer_log.jsonl"
NAMED_BY_FOLDER = (STATE, *TABLES, EVALUATIONS, TRAINER_LOG)

CONSOLES = (".log", ".out", ".txt")
_ONE_RUN: Mapping[str, Callable[[Path], LoggedRun]] = {
    ".json": parse_trainer_state,
    ".npz": parse_evaluations,
    OFFLINE: parse_offline_run,
    **dict.fromkeys(CONSOLES, parse_console),
}
"""What parses files of one run each, by suffix; others have rows, which may be of many runs."""

_parse_run = lru_cache(maxsize=1)(lambda parse, path: parse(path))


class FileLog:
    """A log in a file or a folder. It is read twice: for its metrics, and for the values of those that have a role."""

    roles = None

    def __init__(self, path: Path, name: str) -> None:
        self.place = path
        self._name = name
        suffix = without_gz(path).suffix
        self._is_table = suffix in (".csv", ".tsv")
        is_events = EVENTS in path.name or path.is_dir()
        self._parse = parse_events if is_events else _ONE_RUN.get(suffix)
        self._columns: set[str] = set()
        self._has_steps = self._names_runs = False

    def list_metrics(self, errors: ReadErrors) -> set[str]:
        _parse_run.cache_clear()
        rows = self._load_rows(errors)
        for number, (_, step, cells) in enumerate(islice(rows, 1) if self._is_table else rows):
            self._columns.update(cells)
            self._has_steps = self._has_steps or step is not None
            self._names_runs = self._names_runs or (number == 0 and self._parse is None and "run" in cells)
        return self._columns | ({"step"} if self._has_steps else set())

    @property
    def tags(self) -> Mapping[str, str]:
        """What the trainer tells of its metrics."""
        return {} if self._parse is None else _parse_run(self._parse, self.place).tags

    def read(self, runs: Runs, roles: Roles, errors: ReadErrors) -> None:
        """Read every row. A file whose first row names no run holds one, otherwise each row must name its run."""
        rows, name = self._load_rows(errors), self._name
        if not self._has_steps and roles.step not in self._columns:
            columns = ", ".join(sorted(self._columns))[:200]
            errors.append(UnreadableInput(self.place, f"it has no column `{roles.step}`, but {columns}"))
            return
        if self._parse is not None:
            log = _parse_run(self._parse, self.place)
            name = log.name or name
            run = runs.run(name, roles)
            run.gpus, run.seconds, run.total_steps = log.gpus, log.seconds, log.total_steps or run.total_steps
            run.stopped_early, run.doubts_plan = log.stopped_early, log.doubts_plan
        named = None if self._names_runs else name
        add_rows(runs, roles, named, rows, self.place, errors, may_name_runs=self._parse is None)
        if name in runs.by_name and runs.by_name[name].total_steps is None:
            runs.by_name[name].total_steps = _find_plan(self.place)

    def _load_rows(self, errors: ReadErrors) -> Iterable[Row]:
        if self._parse is None:
            return (read_csv if self._is_table else read_json_lines)(self.place, errors)
        log: LoggedRun = _parse_run(self._parse, self.place)
        errors += log.errors
        return log.rows


_PLANS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "results.csv": (("args.yaml",), "epochs"),
    "metrics.csv": (("hparams.yaml",), "max_steps"),
    "progress.csv": (("args.yml", "config.yml", "*/args.yml", "*/config.yml"), "n_timesteps"),
    EVALUATIONS: (("args.yml", "config.yml", "*/args.yml", "*/config.yml"), "n_timesteps"),
}
"""By the name of a log: the files beside it, the first that has the key counts, and the key of the planned length."""

LONGEST_START = 16 << 20
"""Bytes of a console's output in which its trainer must show."""

LONGEST_SETTINGS = 1 << 20
LEAST_EVALS = 5
"""Two logs in unrelated folders that begin alike are one run if the shorter has so many evals."""


READ = "read"


Findings = Counter[tuple[str, str]]
"""How many files of each kind in a folder were `READ`, and why others were not."""


def print_findings(findings: Findings, folder: Path) -> None:
    """Print one table to standard error."""
    table = new_table(f"read from {folder}", "files", "number", "what became of them", left=1)
    table.columns[2].justify = "left"
    for (kind, fate), count in sorted(findings.items(), key=lambda item: (item[0][1] != READ, *item[0])):
        table.add_row(Text(kind), f"{count:,}", Text(fate if fate == READ else f"not read: {fate}"))
    Console(stderr=True, width=max(100, Console(stderr=True).width)).print(table)


def name_kind(path: Path) -> str:
    """The kind of a log, for people."""
    if EVENTS in path.name or path.is_dir():
        return f"{EVENTS}*"
    return path.name if path.name in NAMED_BY_FOLDER else "*" + path.name.removeprefix(without_gz(path).stem)


def list_folder(folder: Path, findings: Findings) -> list[FileLog]:
    """The logs in this folder, at any depth, with the names of their runs."""
    found: dict[str, list[Path]] = {}
    for root, folders, names in os.walk(folder):
        place = Path(root)
        if offline := [place / name for name in names if name.startswith("run-") and name.endswith(OFFLINE)]:
            found.setdefault("offline", []).extend(offline)
            folders[:] = [name for name in folders if name not in ("files", "logs", "tmp")]  # they tell of the same run
        if any(EVENTS in name for name in names):
            found.setdefault("events", []).append(place)
        for name in names:
            kind = _classify(place / name)
            if kind == "other":
                findings[name_kind(place / name), "it is no log that is known by its name or rows"] += 1
            elif kind is not None:
                found.setdefault(kind, []).append(place / name)
    if not found:
        seen = "; ".join(f"{kind}: {why}" for kind, why in findings)
        raise UnreadableInput(
            folder,
            f"the folder has no {', '.join(NAMED_BY_FOLDER)}, no console output or JSON lines of a known trainer, no"
            " TensorBoard event files and no offline run of W&B; name the files" + (f" ({seen})" if seen else ""),
        )
    states = _leave_out_beginnings(sorted(found.get("state", ())), findings)
    order = ("table", "npz", "events", "offline", "lines", "console")
    others = [path for kind in order for path in sorted(found.get(kind, ()))]
    return [*states, *map(open_file, others)]


def _classify(path: Path) -> str | None:
    """The kind of a file in a folder; "other" for what may be a log but is not known as one, None for all else."""
    name, suffix = without_gz(path).name, without_gz(path).suffix
    if name == STATE:
        return "state"
    if name in TABLES:
        return "table"
    if path.name == EVALUATIONS:
        return "npz"
    if suffix == ".jsonl":
        return "lines" if _counts_steps(path) else "other"
    if suffix in CONSOLES:
        return "console" if _starts_as_console(path) else None if suffix == ".txt" else "other"
    return "other" if suffix in (".csv", ".tsv") else None


def _counts_steps(path: Path) -> bool:
    """Whether the first row of JSON lines has a column of steps, and a number beside it."""
    _, _, row = next(read_json_lines(path, []), (0, None, {}))
    return any(name in row for name in STEPS) and any(type(cell) in (int, float) for cell in row.values())


def _starts_as_console(path: Path) -> bool:
    try:
        with open_log(path) as file:
            return CONSOLE_MARKS.search(file.read(LONGEST_START)) is not None
    except (OSError, EOFError, zlib.error):
        return False


def _leave_out_beginnings(states: Sequence[Path], findings: Findings) -> list[FileLog]:
    """The trainer states without those of checkpoints, whose history is the beginning of another's. If one is left of
    an output folder, its run has the name of that folder, as has LLaMA-Factory's own log."""
    histories = dict.fromkeys(states, "")
    for path in states:
        with suppress(UnreadableInput):
            histories[path] = "".join(
                json.dumps(entry, sort_keys=True) for _, _, entry in parse_trainer_state(path).rows
            )
    ordered = sorted(states, key=lambda path: histories[path])
    # In this order a history that is continued stands directly before one that continues it.
    continued = {a for a, b in pairwise(ordered) if histories[a] and histories[b].startswith(histories[a])}
    kept = [path for path in states if path not in continued]
    if left_out := len(states) - len(kept):
        findings[STATE, f"another {STATE} continues it"] += left_out
    of_folder = Counter(map(_find_output_folder, kept))
    named = (_find_output_folder(path) if of_folder[_find_output_folder(path)] == 1 else path.parent for path in kept)
    return [FileLog(path, _to_name(folder)) for path, folder in sorted(zip(kept, named, strict=True))]


def _find_output_folder(state: Path) -> Path:
    """The output folder of a training; its trainer state may be in a checkpoint."""
    folder = state.parent
    return folder.parent if re.fullmatch(r"checkpoint-\d+", folder.name) else folder


def open_file(path: Path) -> FileLog:
    """The log in this file; if its rows name no runs, its run has the name of the file, or of its folder."""
    named = path if path.is_dir() else without_gz(path).with_suffix("")
    if without_gz(path).name in NAMED_BY_FOLDER or EVENTS in path.name:
        named = path.parent
    return FileLog(path, _to_name(named))


def _to_name(path: Path) -> str:
    return str(path) if str(path) != "." else path.absolute().name


def _find_plan(path: Path) -> int | None:
    """The planned length, in the steps of this log, that its trainer wrote into a file beside it."""
    patterns, key = _PLANS.get(without_gz(path).name, ((), ""))
    # In YAML `epochs: 100`; in that of RL Zoo a list of pairs, of which the second line is the value.
    planned = re.compile(rf"\b{key}['\"]?\s*:?\s*(?:-\s+)?(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)\b")
    for file in (file for pattern in patterns for file in sorted(path.parent.glob(pattern))):
        try:
            with file.open(encoding="utf-8", errors="replace") as text:
                match = planned.search(text.read(LONGEST_SETTINGS))
        except OSError:
            continue
        if match and 1 <= (steps := float(match[1])) < 2**53:
            return int(steps)
    return None


def leave_out_copies(folder: Path, runs: Runs, places: Mapping[str, Path], findings: Findings) -> None:
    """Remove each run of the folder whose evals are the first of another's: one training is often logged twice, by its
    trainer and by TensorBoard. `places`: the log of each run that was read from a log of its own."""
    histories = sorted((_pack_evals(runs.by_name[name]), -number, name) for number, name in enumerate(places))
    for (shorter, _, name), (longer, _, other) in pairwise(histories):
        evals = len(shorter) // _EVAL.itemsize
        folders = (path if path.is_dir() else path.parent for path in (places[name], places[other]))
        bases = [place.relative_to(folder).parts[:1] for place in folders]
        if evals and longer.startswith(shorter) and (bases[0] == bases[1] or () in bases or evals >= LEAST_EVALS):
            run, kept = runs.by_name.pop(name), runs.by_name[other]
            kept.total_steps = kept.total_steps or run.total_steps
            kept.stopped_early = kept.stopped_early or run.stopped_early
            kind = name_kind(places[name])
            findings += Counter({(kind, "another log has the same evals"): 1})
            findings -= Counter({(kind, READ): 1})


_EVAL = np.dtype([("step", ">i8"), ("place", "u1"), ("value", ">f4")])


def _pack_evals(run: Run) -> bytes:
    """Steps and evals, of several sets each, in the precision of TensorBoard, so that the beginning of a run is that of
    the bytes."""
    several = [run.parts[column] for column in sorted(run.parts)]
    packed = [np.zeros(0, dtype=_EVAL)]
    for place, series in enumerate(several or [run.series[role] for role in run.series if role is MetricRole.EVAL]):
        packed.append(np.full(len(series.steps), place, dtype=_EVAL))
        with np.errstate(over="ignore"):
            packed[-1]["step"], packed[-1]["value"] = series.steps, np.frombuffer(series.values)
    evals = np.concatenate(packed)
    return (evals[np.lexsort((evals["place"], evals["step"]))] if several else evals).tobytes()
