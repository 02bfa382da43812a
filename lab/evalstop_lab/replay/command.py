"""`evalstop-lab replay`: the verdicts of a policy on past runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import joblib
import msgspec
import yaml
from evalstop_detectors import POLICIES, Call, InvalidPolicy, Policy, policy_from_document
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evalstop_lab.errors import UnusableArguments
from evalstop_lab.replay.judged import Judged, judge_run
from evalstop_lab.replay.runs import Run
from evalstop_lab.replay.sources import add_policy_options, add_source_options, read_history
from evalstop_lab.report import new_table
from evalstop_lab.sweep import sweep

FEW_RUNS = 200
"""Up to this many runs, a second process costs more than it saves."""

EXAMPLES = """examples:
  evalstop-lab replay runs.jsonl --policy paper
  evalstop-lab replay runs.csv --policy my-policy.yaml --eval reward/gold --proxy reward/proxy --json
  evalstop-lab replay out/trainer_state.json --eval eval_loss --minimize eval_loss
  evalstop-lab replay logs/tensorboard --eval eval/score

"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_source_options(parser, EXAMPLES)
    add_policy_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object per run instead of a table")


def run(args: argparse.Namespace) -> int:
    policy = load_policy(args.policy)
    runs, _ = read_history(args)
    judged = judge_all(policy if args.json else policy.unobserved, runs, args.jobs)
    if guessed := [run for run in runs if run.is_guessed]:
        sys.stderr.write(f"evalstop-lab: {describe_guesses(guessed)}\n")
    if args.json:
        for result in judged:
            sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    else:
        Console().print(_build_table(judged, policy.name))
    return 0


def load_policy(name_or_file: str) -> Policy:
    """Load the shipped policy with this name, else the one in this file; raises UnusableArguments."""
    if name_or_file in POLICIES:
        return POLICIES[name_or_file]
    path = Path(name_or_file)
    if not path.is_file():
        raise UnusableArguments(
            f"There is no policy and no file {name_or_file!r}; give one of {', '.join(POLICIES)}, or a file with a"
            " policy in JSON or YAML."
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
        # YAML reads some numbers of JSON as text, such as 1e-05.
        return policy_from_document(json.loads(text) if path.suffix == ".json" else yaml.safe_load(text))
    except InvalidPolicy as error:
        raise UnusableArguments(f"{path}: {error}.") from error
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise UnusableArguments(f"{path}: {error}; give a policy in JSON or YAML.") from error


def judge_all(policy: Policy, runs: Sequence[Run], jobs: int | None) -> list[Judged]:
    """The policy's verdicts on these settled runs, with a progress bar."""
    return sweep(partial(judge_run, policy), runs, f"replaying under {policy.name}", choose_jobs(jobs, runs))


def choose_jobs(jobs: int | None, runs: Sequence[Run]) -> int:
    """The number of processes: as requested, else one per core for many runs."""
    return jobs or (int(joblib.cpu_count()) if len(runs) > FEW_RUNS else 1)


def describe_guesses(runs: Sequence[Run]) -> str:
    """What it means that these runs are judged on a guess."""
    names = sorted({run.roles.eval_name for run in runs})
    metrics = ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")
    return (
        f"{len(runs):,} {'run is' if len(runs) == 1 else 'runs are'} judged on a guess ({metrics}): the service would"
        " stop them only after you confirm, as --confirm does here; --eval COLUMN names the eval"
    )


def _build_table(judged: Sequence[Judged], policy: str) -> Table:
    stopped = sum(item.verdict == Call.STOP for item in judged)
    table = new_table(None, caption=f"policy {policy}: {stopped} of {len(judged)} runs stopped")
    table.add_column("run", overflow="fold")
    table.add_column("verdict")
    for heading in ("stop step", "first suspected", "best step"):
        table.add_column(heading, justify="right")
    table.add_column("reason", overflow="fold")
    for item in judged:
        steps = (item.stop_step, item.suspect_step, item.best_step)
        step_texts = ("-" if step is None else str(step) for step in steps)
        table.add_row(Text(item.run), item.verdict, *step_texts, Text(item.reason))
    return table
