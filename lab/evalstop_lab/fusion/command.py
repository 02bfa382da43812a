"""`evalstop-lab train-fusion`: fit the model of the detector `fusion`, on drawn runs or on one's own labeled ones."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from pprint import pformat
from typing import Any

import msgspec
from evalstop_detectors.detectors.fusion import FusionModel
from evalstop_detectors.detectors.fusion_model import MODELS
from rich.console import Console

from evalstop_lab.arguments import positive_number, whole_number
from evalstop_lab.calibrate.command import HEALTHY, versions
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.fusion import report as reports
from evalstop_lab.fusion import tables
from evalstop_lab.fusion.fit import EVALS_OF_A_RUN, PARAMETERS, exported, fit, posteriors
from evalstop_lab.fusion.passages import Passage, Recipe, labeled_runs, over_runs, over_worlds
from evalstop_lab.sweep import cores, sweep
from evalstop_lab.worlds import CALIBRATION, CALIBRATION_SEED, FAMILIES, REPORTING, REPORTING_SEED, Group, make, plan

# Apart from those on which `evalstop-lab calibrate` finds thresholds.
TRAINING_SEED = 500_000
LEFT_OUT_SEED = REPORTING_SEED + 1_000_000
# One run in so many is seen without proxy and KL, because some trainers post neither.
GOLD_ONLY_EVERY = 3
WITNESSES = ("gao_rl", "slow", "never_rose", "u_dip", "plateau")

EXAMPLES = """examples:
  evalstop-lab train-fusion --output fusion.json
  evalstop-lab train-fusion --runs 2000 --report
  evalstop-lab train-fusion --history runs.jsonl --labels turns.jsonl --output fusion.json

Each line of the labels is {"run": "a", "turn_step": 120}, with null for a run that never turned. The object under
"model" is what a policy takes: {"detector": "fusion", "params": {"model": ...}}. Find its thresholds by calibrate.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `train-fusion` to the command line."""
    parser = subparsers.add_parser(
        "train-fusion",
        help="fit the model of the detector fusion, on drawn runs or on one's own",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=positive_number, default=1000, help="how many to draw (default: 1000)")
    parser.add_argument(
        "--first-seed", type=whole_number, default=TRAINING_SEED, help=f"of the drawn runs (default: {TRAINING_SEED})"
    )
    parser.add_argument(
        "--history", type=Path, nargs="+", metavar="FILE", help="fit on these runs, as replay reads them"
    )
    parser.add_argument("--labels", type=Path, metavar="FILE", help="where the runs of the history turned")
    parser.add_argument("--report", action="store_true", help="measure it on families left out too (some minutes)")
    parser.add_argument("--jobs", type=positive_number, default=cores(), help="processes (default: one a core)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the JSON object here; as Python to a name that ends in .py"
    )
    parser.add_argument("--name", default="worlds-1", help="of the model in a Python file (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the JSON object rather than tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `evalstop-lab train-fusion`; return its exit code."""
    if (args.history is None) != (args.labels is None):
        raise UnusableArguments("--history and --labels go together: runs, and where each of them turned.")
    if args.history is not None:
        if args.report:
            raise UnusableArguments("--report leaves out families of drawn runs; it goes without --history.")
        runs = labeled_runs(args.history, args.labels)
        passages = sweep(over_runs, runs, "passing through the runs", args.jobs)
        data: dict[str, Any] = {"source": [str(path) for path in args.history], "runs": len(runs)}
    else:
        if args.first_seed + args.runs > REPORTING_SEED:
            raise UnusableArguments(f"Seeds from {REPORTING_SEED} on are for reports; fit on lower ones.")
        recipes = [(family, seed, seed % GOLD_ONLY_EVERY == 0) for family, seed in plan(args.runs, args.first_seed)]
        passages = sweep(over_worlds, recipes, "passing through drawn runs", args.jobs)
        data = {
            "source": "worlds",
            "runs": args.runs,
            "first_seed": args.first_seed,
            "families": list(CALIBRATION),
            "gold_only": f"seeds that {GOLD_ONLY_EVERY} divides",
        }
    model = exported(fit(passages))
    document = document_of(model, data)
    if args.output is not None:
        args.output.write_text(
            module_of(args.name, document) if args.output.suffix == ".py" else json.dumps(document, indent=2) + "\n",
            encoding="utf-8",
        )
    if args.report:
        document["report"] = measured(model, passages, args.jobs)
    if args.json:
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        console = Console() if sys.stdout.isatty() else Console(width=140)
        tables.print_model(console, model)
        if args.report:
            tables.print_report(console, document["report"])
    return 0


def document_of(model: FusionModel, data: dict[str, Any]) -> dict[str, Any]:
    """The model as JSON values, with what it was fitted on and by which command."""
    return {
        "model": json.loads(msgspec.json.encode(model)),
        "witnesses": witnesses(model),
        "data": data,
        "parameters": PARAMETERS | {"evals_of_a_run": EVALS_OF_A_RUN},
        "versions": versions() | {"scikit-learn": importlib.metadata.version("scikit-learn")},
        "command": "evalstop-lab " + shlex.join(sys.argv[1:]),
    }


def witnesses(model: FusionModel) -> list[dict[str, Any]]:
    """The highest probability in a few drawn runs: while these come out alike the members are what they were."""
    recipes: list[Recipe] = [(family, TRAINING_SEED - 1, False) for family in WITNESSES]
    highest = [posteriors(model, item.values).max() for item in over_worlds(recipes)]
    return [
        {"family": family, "seed": seed, "highest": float(value)}
        for (family, seed, _), value in zip(recipes, highest, strict=True)
    ]


def module_of(name: str, document: dict[str, Any]) -> str:
    """The Python module that the detector reads: the models that there are, and this one."""
    heading = (
        '"""Models of fusion as `evalstop-lab train-fusion` fitted them, with what they were fitted on; written by a'
        ' program."""\n\nfrom __future__ import annotations\n\nfrom typing import Any\n\n# fmt: off\n'
    )
    models = pformat(MODELS | {name: document}, width=120, compact=True, sort_dicts=False)
    return f"{heading}MODELS: dict[str, dict[str, Any]] = (\n{models}\n)\n"


def measured(model: FusionModel, training: Sequence[Passage], jobs: int) -> dict[str, Any]:
    """The report: known families, families left out in turn, families never seen, and the calibration."""
    calibration = _ground(plan(1000, CALIBRATION_SEED, HEALTHY), jobs)
    reporting = _ground(plan(600, REPORTING_SEED, REPORTING), jobs)
    apart = _ground([(family, LEFT_OUT_SEED + seed) for family in REPORTING for seed in range(_count(family))], jobs)
    known = [pair for pair in reporting if pair[0].family in CALIBRATION]
    return {
        "known": reports.known_families(model, calibration, known),
        "all": reports.known_families(model, calibration, reporting),
        "left_out": reports.left_out(training, calibration, apart),
        "never_seen": reports.never_seen(model, calibration, apart),
        "reliability": reports.reliability(model, [item for _, item in known]),
    }


def _count(family: str) -> int:
    """How many runs of a family to report on when it is left out: a share of false stops wants more than a recall."""
    return 20 if FAMILIES[family].group is Group.HACKING else 40


def _ground(recipes: Sequence[tuple[str, int]], jobs: int) -> reports.Ground:
    shown: list[Recipe] = [(family, seed, False) for family, seed in recipes]
    passages = sweep(over_worlds, shown, "passing through runs to report on", jobs)
    return [(make(family, seed), item) for (family, seed), item in zip(recipes, passages, strict=True)]
