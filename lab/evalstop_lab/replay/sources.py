"""Chooses the reader of a source, default names of runs, and the roles of metrics."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType

from evalstop_detectors import MetricRole
from evalstop_detectors.roles.recognition import RecognizedRoles, recognize_roles
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from evalstop_lab.arguments import positive_number
from evalstop_lab.errors import UnreadableInput, UnusableArguments
from evalstop_lab.replay import (
    console_log,
    csv_table,
    evalstop_runs,
    jsonl,
    mlflow_files,
    mlflow_server,
    tensorboard_events,
    trainer_state,
    wandb_offline,
)
from evalstop_lab.replay.cells import NO_METRICS, STEPS
from evalstop_lab.replay.lines import STANDARD_INPUT
from evalstop_lab.replay.runs import Roles, Runs, Troubles


def add_role_options(parser: argparse.ArgumentParser) -> None:
    """Add `--eval`, `--proxy`, `--kl`, `--loss`, `--minimize` and `--step`."""
    for role in reversed(MetricRole):
        parser.add_argument(
            f"--{role}", metavar="COLUMN", help=f"the column with the {role} (default: {role}, else by its name)"
        )
    parser.add_argument("--minimize", action="append", default=[], metavar="COLUMN", help="a column to minimize")
    parser.add_argument("--step", metavar="COLUMN", help="the column that counts steps (default: step)")


def add_source_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str, examples: str
) -> argparse.ArgumentParser:
    """Add a command on past runs: its sources, which its help lists, and the role options."""
    parser = subparsers.add_parser(
        name, help=summary, epilog=examples + SOURCES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="file, folder or server, see below")
    add_role_options(parser)
    return parser


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Add `--policy`, `--total-steps` and `--jobs`."""
    parser.add_argument("--policy", default="default", metavar="NAME|FILE", help="default: default")
    parser.add_argument(
        "--total-steps", type=positive_number, metavar="STEPS", help="the planned end of runs that do not report it"
    )
    parser.add_argument("--jobs", type=positive_number, help="processes (default: one per core for many runs)")


def asked_by(args: argparse.Namespace) -> Asked:
    """The roles in these options."""
    named = {role: column for role in MetricRole if (column := getattr(args, role)) is not None}
    return Asked(named, frozenset(args.minimize), args.step)


EVENTS = "events.out.tfevents"
STATE = "trainer_state.json"
OFFLINE = ".wandb"
MLFLOW, EVALSTOP = "mlflow+", "evalstop+"
"""Prefixes of addresses, before http:// or https://."""

CONNECTIONS = 8

_BY_SUFFIX: Mapping[str, ModuleType] = {
    ".csv": csv_table,
    ".tsv": csv_table,
    ".json": trainer_state,
    ".log": console_log,
    ".out": console_log,
    ".txt": console_log,
    OFFLINE: wandb_offline,
}

SOURCES = """A source is a file or a folder, or the address of a server:
  runs.jsonl, runs.csv          a row per eval, {"run": "a", "step": 10, "eval": 0.61, "eval_stderr": 0.02}; what W&B
                                exports, too, and what verl's file logger writes
  trainer_state.json            of the Hugging Face Trainer
  logs/                         TensorBoard events, trainer states, an MLflow file store and W&B's offline runs in it
  train.log                     the console of verl, OpenRLHF or NeMo-RL (.log, .out, .txt)
  mlflow+http://host:5000       an MLflow server; ?experiment=NAME behind it for one experiment
  evalstop+http://host:8000     the service itself, with a key in EVALSTOP_KEY
  -                             JSON lines from standard input
"""


@dataclass(frozen=True)
class Asked:
    """The roles in the options: a column by role, columns to minimize, and the column of steps."""

    named: Mapping[MetricRole, str] = field(default_factory=dict)
    minimized: frozenset[str] = frozenset()
    step: str | None = None


@dataclass(frozen=True)
class Log:
    """A unit of reading, whose metrics keep their roles throughout.

    `roles`: the roles that its runs declare. A `remote` log may be read concurrently with others.
    """

    place: Path | str
    metrics: Callable[[Troubles], set[str]]
    read: Callable[[Runs, Roles, Troubles], None]
    tags: Mapping[str, str] = field(default_factory=dict)
    roles: Roles | None = None
    remote: bool = False


def read(sources: Sequence[str | Path], asked: Asked | None = None, troubles: Troubles | None = None) -> Runs:
    """Read all runs of these sources. Rows with the same run name form one run.

    Raises UnreadableInput with file and line, unless `troubles` collects errors. Raises UnusableArguments for a
    requested column that occurs nowhere.
    """
    asked, troubles = asked or Asked(), troubles or Troubles()
    runs = Runs()
    everywhere: set[str] = set()
    for source in sources:
        found = _read_source(source, runs, asked, troubles)
        everywhere |= found
    if everywhere:
        _check(asked, everywhere)
    return runs


def logs_of(source: str | Path, open_until: ExitStack) -> Iterator[Log]:
    """The logs of a source, readable until `open_until` closes: a file is one, a folder or a server has many."""
    text = str(source)
    if text.startswith(MLFLOW):
        for item in mlflow_server.runs_of(text.removeprefix(MLFLOW), open_until):
            place = f"{item.remote.url}, run {item.name}"
            yield Log(place, partial(_known, item.metrics), item.read, item.tags, remote=True)
    elif text.startswith(EVALSTOP):
        for known in evalstop_runs.runs_of(text.removeprefix(EVALSTOP), open_until):
            place = f"{known.remote.url}, run {known.name}"
            metrics = frozenset(known.roles.columns.values())
            yield Log(place, partial(_known, metrics), known.read, roles=known.roles, remote=True)
    elif "://" in text:
        raise UnusableArguments(f"{text}: say which server it is, {MLFLOW}{text} or {EVALSTOP}{text}.")
    else:
        for path in _paths(Path(text)):
            module = _reader(path)
            tags = mlflow_files.tags(path) if module is mlflow_files else {}
            yield Log(path, partial(module.metrics, path), partial(_read_path, module, path, _name(path)), tags)


def choose(
    asked: Asked, metrics: set[str], tags: Mapping[str, str], roles: Roles | None
) -> tuple[Roles, RecognizedRoles]:
    """The roles of these metrics: as requested, else as their run declares, else by name; and those found only by
    name."""
    names = metrics - NO_METRICS
    recognised = recognize_roles(names, tags)
    columns: dict[MetricRole, str] = {}
    minimized = set(asked.minimized)
    for role in MetricRole:
        said = roles.columns.get(role) if roles is not None else None
        known = next((name for name, item in recognised.roles.items() if item.role is role), None)
        literal = role.value if role.value in names else None
        chosen = asked.named.get(role) or said or literal or (known if roles is None else None)
        others = {*columns.values(), *(column for other, column in asked.named.items() if other is not role)}
        if chosen is None or chosen in others:
            continue
        columns[role] = chosen
        if role not in asked.named and chosen == known and recognised.roles[known].direction == "minimize":
            minimized.add(chosen)
    if MetricRole.LOSS in columns:
        minimized.add(columns[MetricRole.LOSS])
    if roles is not None:
        minimized |= roles.minimized
    step = asked.step or next((name for name in STEPS if name in metrics), "step")
    return Roles(columns, frozenset(minimized), step), recognised


def _read_source(source: str | Path, runs: Runs, asked: Asked, troubles: Troubles) -> set[str]:
    """Read one source; returns its columns."""
    everything: set[str] = set()
    known = False
    columns = (TextColumn("reading {task.description}"), BarColumn(), MofNCompleteColumn())
    with ExitStack() as stack:
        logs = list(logs_of(source, stack))
        console = Console(stderr=True)
        progress = stack.enter_context(Progress(*columns, console=console, transient=True, disable=len(logs) < 2))
        pool = stack.enter_context(ThreadPoolExecutor(CONNECTIONS))
        task = progress.add_task(str(source), total=len(logs))

        def whole(log: Log) -> tuple[set[str], bool, Runs, Troubles]:
            own, trouble = Runs() if log.remote else runs, Troubles(troubles.strict)
            try:
                names, fits = _read_log(log, own, asked, trouble)
            except UnreadableInput as error:
                trouble.add(error)
                names, fits = set(), False
            return names, fits, own, trouble

        remote = bool(logs) and logs[0].remote
        for names, fits, own, trouble in pool.map(whole, logs) if remote else map(whole, logs):
            everything |= names
            known = known or fits
            troubles.found += trouble.found
            if own is not runs:
                _take_in(own, runs, source)
            progress.advance(task)
    if not known:
        wanted = [asked.named.get(role, role.value) for role in MetricRole]
        error = UnreadableInput(
            source,
            f"it has none of the columns {', '.join(wanted)}, but {_listed(everything)}; say which"
            " is which with --eval, --proxy, --kl or --loss COLUMN",
        )
        troubles.add(error)
    return everything


def _take_in(own: Runs, runs: Runs, source: str | Path) -> None:
    """Add runs of a server, which identifies its runs; a name that is taken gets its source appended."""
    for run in own.by_name.values():
        if run.name in runs.by_name:
            run.name = f"{run.name} ({source})"
        runs.by_name[run.name] = run


def _read_log(log: Log, runs: Runs, asked: Asked, troubles: Troubles) -> tuple[set[str], bool]:
    """Read one log; returns its columns, and whether any of them has a role."""
    first = Troubles(troubles.strict)
    metrics = log.metrics(first)
    roles, _ = choose(asked, metrics, log.tags, log.roles)
    fits = bool(metrics & set(roles.columns.values()))
    if fits:
        log.read(runs, roles, troubles)
    else:
        troubles.found += first.found
    return metrics - NO_METRICS, fits


def _check(asked: Asked, everywhere: set[str]) -> None:
    for role, column in asked.named.items():
        if column not in everywhere:
            raise UnusableArguments(f"--{role} {column}: there is no such column; there are {_listed(everywhere)}.")
    if missing := sorted(asked.minimized - everywhere):
        raise UnusableArguments(f"--minimize {missing[0]}: there is no such column; there are {_listed(everywhere)}.")


def _known(metrics: frozenset[str], troubles: Troubles) -> set[str]:
    return set(metrics)


def _read_path(module: ModuleType, path: Path, name: str, runs: Runs, roles: Roles, troubles: Troubles) -> None:
    module.read(path, name, runs, roles, troubles)


def _reader(path: Path) -> ModuleType:
    if EVENTS in path.name:
        return tensorboard_events
    if path.is_dir():
        return mlflow_files if mlflow_files.is_run(path) else tensorboard_events
    return _BY_SUFFIX.get(path.suffix, jsonl)


def _paths(path: Path) -> Iterator[Path]:
    """The file itself; in a folder the files with known names, at any depth."""
    if not path.is_dir():
        yield path
        return
    states = sorted(path.rglob(STATE))
    folders = sorted({file.parent for file in path.rglob(f"{EVENTS}*")})
    offline = sorted(file for file in path.rglob(f"run-*{OFFLINE}") if file.is_file())
    stored = sorted(file.parent for file in path.rglob("meta.yaml") if mlflow_files.is_run(file.parent))
    if not (states or folders or offline or stored):
        raise UnreadableInput(
            path,
            f"the folder holds neither {STATE} nor TensorBoard event files, no MLflow file store and no offline run of"
            " W&B; name the files",
        )
    yield from (*states, *folders, *offline, *stored)


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
