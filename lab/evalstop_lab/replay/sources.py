"""Chooses the reader of a source, default names of runs, and the roles of metrics."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from evalstop_detectors import ROLES, MetricRole, RoleOrigin, choose_direction
from evalstop_detectors.roles.params import find_declared_eval
from evalstop_detectors.roles.recognition import (
    FIRST_EVALS,
    is_constant,
    recognize_by_values,
    warn_of_direction,
)
from evalstop_detectors.roles.words import LEARNING_RATES
from evalstop_service.domain.run import COMBINED_METRIC
from rich.console import Console
from rich.progress import track

from evalstop_lab.arguments import positive_number
from evalstop_lab.errors import UnreadableInput, UnusableArguments
from evalstop_lab.replay.folders import (
    READ,
    FileLog,
    Findings,
    leave_out_copies,
    list_folder,
    name_kind,
    open_file,
    print_findings,
)
from evalstop_lab.replay.rows import NO_METRICS, STEPS
from evalstop_lab.replay.runs import ReadErrors, Roles, Run, Runs
from evalstop_lab.replay.servers import MlflowRun, ServiceRun, list_mlflow_runs, list_service_runs


def add_role_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for the column of each role, `--minimize` and `--step`."""
    for role, traits in ROLES.items():
        text = f"column of {traits.meaning} (default: recognized by its name)"
        parser.add_argument(f"--{role.replace('_', '-')}", metavar="COLUMN", help=text)
    parser.add_argument("--minimize", action="append", default=[], metavar="COLUMN", help="a column to minimize")
    parser.add_argument("--step", metavar="COLUMN", help="the column that counts steps (default: step)")


def add_source_options(parser: argparse.ArgumentParser, examples: str) -> None:
    """Add what a command on past runs takes: its sources, which its help lists after the examples, and the roles."""
    parser.epilog = examples + SOURCES
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="file, folder or server, see below")
    add_role_options(parser)


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", default="default", metavar="NAME|FILE", help="policy to apply (default: default)")
    parser.add_argument(
        "--total-steps", type=positive_number, metavar="STEPS", help="planned length of runs that do not report it"
    )
    parser.add_argument(
        "--confirm", action="store_true", help="judge runs by metrics whose role is a guess, as after you confirm it"
    )
    parser.add_argument("--jobs", type=positive_number, help="processes (default: one per core for many runs)")


MLFLOW, EVALSTOP = "mlflow+", "evalstop+"
"""Prefixes of addresses, before http:// or https://."""

CONNECTIONS = 8
MOST_ERRORS_SHOWN = 20
NO_ROLE = "no metric of it is an eval, proxy, KL or loss"

SOURCES = """A source is a file or a folder, or the address of a server:
  runs.jsonl, runs.csv          one row per eval, {"run": "a", "step": 10, "eval": 0.61, "eval_stderr": 0.02}; also
                                exports of W&B, and files of verl's file logger
  trainer_state.json            the log of the Hugging Face Trainer
  logs/                         a folder with any of these, TensorBoard events, W&B's offline runs, or the logs of
                                Lightning, Ultralytics, stable-baselines3 or LLaMA-Factory
  train.log                     the console output of verl or OpenRLHF (.log, .out, .txt)
  mlflow+http://host:5000       an MLflow server; append ?experiment=NAME for one experiment
  evalstop+http://host:8787     an EvalStop service, with a key in EVALSTOP_KEY
"""


@dataclass(frozen=True)
class RequestedRoles:
    """The roles in the options: a column by role, columns to minimize, and the column of steps."""

    named: Mapping[MetricRole, str] = field(default_factory=dict)
    minimized: frozenset[str] = frozenset()
    step: str | None = None


Log = FileLog | MlflowRun | ServiceRun
"""A unit of reading, whose metrics keep their roles throughout."""


def read_runs(
    sources: Sequence[str | Path], requested: RequestedRoles | None = None, errors: ReadErrors | None = None
) -> Runs:
    """Read all runs of these sources. Rows with the same run name form one run.

    What cannot be read is added to `errors`. Raises UnreadableInput if a server cannot be read, and UnusableArguments
    for a requested column that occurs nowhere.
    """
    requested, errors = requested or RequestedRoles(), [] if errors is None else errors
    runs = Runs()
    everywhere: set[str] = set()
    for source in sources:
        everywhere |= _read_source(source, runs, requested, errors)
    if everywhere:
        _check_columns(requested, everywhere)
    return runs


def read_history(args: argparse.Namespace) -> tuple[list[Run], ReadErrors]:
    """The runs of the sources, read with these options and settled, and what could not be read, which is printed.

    Raises as `read_runs` does, and UnreadableInput if there are no runs.
    """
    errors: ReadErrors = []
    named = {role: column for role in MetricRole if (column := getattr(args, role)) is not None}
    read = read_runs(args.sources, RequestedRoles(named, frozenset(args.minimize), args.step), errors)
    replaced = read.settle()
    runs = [run for run in read.by_name.values() if run.series]
    if not runs and not errors:
        errors.append(UnreadableInput(args.sources[0], "it has no readable run"))
    last = None if runs else errors.pop()
    for text in (*map(str, errors[:MOST_ERRORS_SHOWN]), *_describe_reading(runs, replaced, len(errors))):
        sys.stderr.write(f"evalstop-lab: {text}\n")
    if last is not None:
        raise last
    for run in runs:
        run.total_steps = run.total_steps or args.total_steps
        if getattr(args, "confirm", False):
            run.roles = replace(run.roles, guessed=frozenset())
    return runs, errors


def _describe_reading(runs: Sequence[Run], replaced: int, errors: int) -> Iterator[str]:
    if errors > MOST_ERRORS_SHOWN:
        yield f"and {errors - MOST_ERRORS_SHOWN:,} more like these"
    if replaced:
        yield (
            f"{replaced:,} {'value was' if replaced == 1 else 'values were'} logged again at the same"
            " step, with other values, as by a trainer that started again; the last stands"
        )
    for name, count in Counter(run.roles.eval_name for run in runs if run.roles.combined).items():
        what = "run is" if count == 1 else "runs are"
        yield f"{count:,} {what} judged by {name}; --eval COLUMN names one"


def _list_logs(source: str | Path, open_until: ExitStack, findings: Findings) -> Iterable[Log]:
    """The logs of a source, readable until `open_until` closes: a file is one log, a folder or a server has many.
    `findings` gets the files that are left out."""
    text = str(source)
    if text.startswith(MLFLOW):
        return list_mlflow_runs(text.removeprefix(MLFLOW), open_until)
    if text.startswith(EVALSTOP):
        return list_service_runs(text.removeprefix(EVALSTOP), open_until)
    if "://" in text:
        raise UnusableArguments(f"{text}: give the kind of server, {MLFLOW}{text} or {EVALSTOP}{text}.")
    path = Path(text)
    return list_folder(path, findings) if path.is_dir() else [open_file(path)]


class _Changes(Exception):
    """The eval of some run changes at its beginning: the rest of the log, often most of it, need not be read."""


class _RunsUntilChange(Runs):
    """Runs of a log that is read up to the first whose eval changes; raises `_Changes`."""

    def run(self, name: str, roles: Roles) -> Run:
        found = super().run(name, roles)
        evals = found.series.get(MetricRole.EVAL)
        if evals and evals.ascending and len(evals.values) == FIRST_EVALS and not is_constant(evals.values):
            raise _Changes
        return found


def _choose_roles(log: Log, metrics: set[str], requested: RequestedRoles) -> Roles:
    """The roles of the metrics of a log, as requested, else as declared by its run, else by name."""
    names, roles = metrics - NO_METRICS, log.roles
    step = requested.step or next((name for name in STEPS if name in metrics), "step")

    def load_evals(metric: str) -> Sequence[float]:
        """The evals of a run that is long enough to tell whether they change, preferably of one where they do."""
        runs = _RunsUntilChange()
        if roles is None and MetricRole.EVAL not in {*requested.named, *names}:
            with suppress(_Changes):
                log.read(runs, Roles({MetricRole.EVAL: metric}, frozenset(), step), [])
        runs.settle()
        evals = [series.values for run in runs.by_name.values() for series in run.series.values()]
        long = [values for values in evals if len(values) >= FIRST_EVALS]
        return next((values for values in long if not is_constant(values)), long[0] if long else ())

    recognised = recognize_by_values(metrics, log.tags, load_evals)  # a column of steps may tell the trainer
    columns: dict[MetricRole, str] = {}
    minimized, guessed, combined = set(requested.minimized), set[MetricRole](), tuple[str, ...]()
    for role in MetricRole:
        declared = roles.columns.get(role) if roles is not None else None
        found = recognised.list_metrics(role)
        recognised_name = COMBINED_METRIC if len(found) > 1 else next(iter(found), None)
        if role is MetricRole.LEARNING_RATE:
            recognised_name = next((name for name in LEARNING_RATES if name in names), None)
        literal = role.value if role.value in names else None
        chosen = requested.named.get(role) or declared
        if roles is None or role is MetricRole.LEARNING_RATE:  # a service names none, and reads it from these names
            chosen = chosen or literal or recognised_name
        other_columns = {*columns.values(), *(column for other, column in requested.named.items() if other is not role)}
        if chosen is None or chosen in other_columns:
            continue
        columns[role] = chosen
        if chosen == declared:
            continue
        by_name = chosen == recognised_name and role not in requested.named and bool(found)
        combined = tuple(found) if by_name and chosen == COMBINED_METRIC else combined
        direction = recognised.roles[found[0]].direction if by_name else choose_direction(role, chosen)
        if by_name and recognised.origins[found[0]] is RoleOrigin.GUESSED:
            guessed.add(role)
        if direction == "minimize":
            minimized.update(combined if chosen == COMBINED_METRIC else (chosen,))
    if MetricRole.LOSS in columns:
        minimized.add(columns[MetricRole.LOSS])
    if roles is not None:
        minimized |= roles.minimized
        guessed |= roles.guessed - requested.named.keys()
    return Roles(columns, frozenset(minimized), step, frozenset(guessed), combined)


def _read_source(source: str | Path, runs: Runs, requested: RequestedRoles, errors: ReadErrors) -> set[str]:
    everything: set[str] = set()
    is_known, errors_before, runs_before = False, len(errors), len(runs.by_name)
    with ExitStack() as stack:
        findings, alone = Findings(), dict[str, Path]()
        logs = list(_list_logs(source, stack, findings))
        pool = stack.enter_context(ThreadPoolExecutor(CONNECTIONS))
        read_log = partial(_read_log, runs, requested)
        remote = bool(logs) and isinstance(logs[0].place, str)
        results = pool.map(read_log, logs) if remote else map(read_log, logs)
        bar = partial(track, console=Console(stderr=True), transient=True, disable=len(logs) < 2)
        for log, (names, fits, log_runs, log_errors) in zip(bar(logs, f"reading {source}"), results, strict=True):
            everything |= names
            if isinstance(log.place, Path):
                why = log_errors[0].problem if log_errors else NO_ROLE
                findings[name_kind(log.place), READ if fits else why.partition("; ")[0]] += 1
                if fits and len(runs.by_name) == runs_before + 1:
                    alone[next(reversed(runs.by_name))] = log.place
                runs_before = len(runs.by_name)
            is_known = is_known or fits
            errors += log_errors
            if log_runs is not runs:
                _add_runs(log_runs, runs, source)
    if Path(source).is_dir() and (is_known or len(logs) > 1):  # else the error says it
        leave_out_copies(Path(source), runs, alone, findings)
        print_findings(findings, Path(source))
    if not is_known and (everything or len(errors) == errors_before):
        expected = [requested.named.get(role, role.value) for role in MetricRole if role != "learning_rate"]
        others = f"but {_format_columns(everything)}; set the columns with --eval, --proxy, --kl or --loss COLUMN"
        missing = f"it has none of the columns {', '.join(expected)}, {others}"
        errors.append(UnreadableInput(source, missing if everything else "no metrics were found in it"))
    return everything


def _add_runs(log_runs: Runs, runs: Runs, source: str | Path) -> None:
    """Add the runs of a server; if a name is in use, the source is appended to it."""
    for run in log_runs.by_name.values():
        if run.name in runs.by_name:
            run.name = f"{run.name} ({source})"
        runs.by_name[run.name] = run


def _read_log(runs: Runs, requested: RequestedRoles, log: Log) -> tuple[set[str], bool, Runs, ReadErrors]:
    """Read one log; returns its columns, whether any of them has a role, its runs, and what could not be read.

    The runs of servers, which are read concurrently, are apart from `runs`.
    """
    runs = Runs() if isinstance(log.place, str) else runs
    errors: ReadErrors = []
    try:
        metrics = log.list_metrics(errors)
        roles = _choose_roles(log, metrics, requested)
        declared, direction = find_declared_eval(log.tags)
        if direction is not None and (warning := warn_of_direction(declared, direction)):
            sys.stderr.write(f"evalstop-lab: {log.place}: {warning}\n")
        # The learning rate says nothing of a run without another metric.
        fits = bool(metrics & {column for role, column in roles.cells if role is not MetricRole.LEARNING_RATE})
        if fits:
            errors.clear()  # reading the values finds the same
            log.read(runs, roles, errors)
    except UnreadableInput as error:
        return set(), False, runs, [*errors, error]
    return metrics - NO_METRICS, fits, runs, errors


def _check_columns(requested: RequestedRoles, everywhere: set[str]) -> None:
    for role, column in requested.named.items():
        if column not in everywhere:
            columns = _format_columns(everywhere)
            raise UnusableArguments(f"--{role} {column}: there is no such column; there are {columns}.")
    if missing := sorted(requested.minimized - everywhere):
        columns = _format_columns(everywhere)
        raise UnusableArguments(f"--minimize {missing[0]}: there is no such column; there are {columns}.")


def _format_columns(columns: set[str]) -> str:
    names = sorted(columns)
    return ", ".join(names[:30]) + (f" and {len(names) - 30} more" if len(names) > 30 else "")
