"""`evalstop-lab stopbench`: evaluates stopping rules on reproducible runs, and compares them with common rules.

A rule sees each eval of a run once, in order, and may stop it. The noiseless curve determines whether that was right
and what it saved. See docs/stopbench.md for the suites, the figures and how to write a rule.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console

from evalstop_lab.arguments import positive_number
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.report import format_figure, format_number, format_percent, list_versions, new_table, to_json_values
from evalstop_lab.stopbench.judging import SEEDS, SUITES, compute_figures, judge_run
from evalstop_lab.stopbench.rules import BUILT_IN, is_installed, load_rule
from evalstop_lab.sweep import add_jobs_option, sweep

EXAMPLES = """examples:
  evalstop-lab stopbench --rule my_rule.py:MyRule
  evalstop-lab stopbench --rule my_rule.py:MyRule --only "EvalStop default" --suite drawn-1 --runs 200
  evalstop-lab stopbench --rule my_rule.py:MyRule --seeds held-out --json
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = __doc__, EXAMPLES
    parser.add_argument(
        "--rule", action="append", default=[], metavar="FILE.py:NAME", help="your rule; may be repeated"
    )
    names = ", ".join(BUILT_IN)
    parser.add_argument("--only", nargs="*", metavar="NAME", help=f"only these built-in rules: {names}")
    parser.add_argument("--suite", nargs="+", choices=SUITES, default=list(SUITES), help="(default: all)")
    parser.add_argument("--seeds", choices=SEEDS, default="public", help="public to develop, held-out to report")
    parser.add_argument("--runs", type=positive_number, metavar="N", help="only the first N of each suite, to try it")
    add_jobs_option(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, also by family and known length, instead of tables"
    )


def run(args: argparse.Namespace) -> int:
    rules, missing = _choose_rules(args.rule, args.only)
    suites = [name for name in args.suite if args.seeds == "public" or SUITES[name].held_out]
    if not suites:
        names = ", ".join(args.suite)
        raise UnusableArguments(f"There are no held-out seeds of {names}; leave out --seeds held-out.")
    results = {name: _judge_suite(rules, name, args.seeds, args.runs, args.jobs) for name in suites}
    if args.json:
        report = {"suites": results, "seeds": args.seeds, "not_installed": missing, "versions": list_versions()}
        sys.stdout.write(json.dumps(to_json_values(report)) + "\n")
        return 0
    console = Console() if sys.stdout.isatty() else Console(width=160)
    for name, result in results.items():
        _print_suite(console, name, result)
    for name in missing:
        console.print(f"{name} was skipped: its library is not installed.")
    return 0


def _choose_rules(own_rules: Sequence[str], only: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The rules to judge, and those skipped because their library is not installed."""
    unknown = [name for name in only or () if name not in BUILT_IN]
    if unknown:
        raise UnusableArguments(f"{unknown[0]!r} is not a built-in rule; choose from {', '.join(BUILT_IN)}.")
    requested = list(BUILT_IN) if only is None else list(only)
    rules = [*own_rules, *(name for name in requested if is_installed(name))]
    if not rules:
        raise UnusableArguments("No rule to judge; give --rule path.py:Name.")
    for name in own_rules:
        load_rule(name)
    return rules, [name for name in requested if not is_installed(name)]


def _judge_suite(rules: Sequence[str], suite: str, seeds: str, runs: int | None, jobs: int) -> dict[str, Any]:
    numbers = range(min(runs or SUITES[suite].runs, SUITES[suite].runs))
    outcomes = sweep(partial(judge_run, rules, suite, seeds), numbers, suite, jobs)
    worlds = [SUITES[suite].draw(seeds, number) for number in numbers]
    return {
        rule: compute_figures([(row[index], world) for row, world in zip(outcomes, worlds, strict=True)])
        for index, rule in enumerate(rules)
    }


def _print_suite(console: Console, name: str, result: Mapping[str, Any]) -> None:
    """Print a table with one row per rule; intervals are 95 %."""
    runs = next(iter(result.values()))["runs"]
    table = new_table(
        f"{name}: {runs} runs",
        *("rule", "recall", "cliffs", "false stops", "premature", "delay", "saved", "eval lost"),
        caption="cliffs: sudden falls after which it stopped within six evals; eval lost: of the gain\n"
        "saved: share of the evals after the peaks, minus those lost by wrong stops",
    )
    by_saved = sorted(
        result.items(), key=lambda item: np.nan_to_num(item[1]["saved"]["value"], nan=-math.inf), reverse=True
    )
    for rule, figures in by_saved:
        table.add_row(
            rule,
            format_figure(figures["recall"]),
            format_figure(figures["cliffs"]),
            format_figure(figures["false_stops"]),
            format_percent(figures["premature"]["value"]),
            format_number(figures["delay"]["value"], 0),
            format_figure(figures["saved"]),
            format_percent(figures["eval_lost"]["value"]),
        )
    console.print(table)
