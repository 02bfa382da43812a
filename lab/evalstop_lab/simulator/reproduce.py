"""`evalstop-lab cluster reproduce`: reproduces the table of EvalStop (arXiv 2606.04145), on seeds not used for
fitting."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from evalstop_lab.report import format_figure, format_percent, new_table, save_figure, show_percent
from evalstop_lab.simulator import study
from evalstop_lab.simulator.metrics import Change, Figures, compare_paired, correct_p_values
from evalstop_lab.simulator.schedulers import SCHEDULERS
from evalstop_lab.simulator.setting import PAPER, Setting
from evalstop_lab.simulator.stopping import RULES
from evalstop_lab.simulator.study import NONE, ORACLE, Cell, Rows, build_cells
from evalstop_lab.worlds.scoring import Figure

SEEDS = 12
JOBS = 3000
BASELINE = "SRTF-Est"
COUNTED_ON = "FIFO-Skip"  # the cheapest scheduler, for settings in which only flags are counted
FEWER = 5  # those settings have this factor fewer jobs
POLICIES = tuple(RULES[name] for name in ("paper", "default", "fixed-progress", "loss-plateau"))
STOPPING = (*(policy.name for policy in POLICIES), ORACLE)
NOISES = (0.01, 0.02, 0.03, 0.04, 0.05)
HACKING = (0.2, 0.35, 0.5, 0.65, 0.8)
TOLERANCE = 0.02

CHANGES: Mapping[str, Callable[[Figures], float]] = {
    "mean time": lambda figures: figures.jct,
    "of healthy jobs": lambda figures: figures.jct_healthy,
    "of hacking jobs": lambda figures: figures.jct_hacking,
    "p95": lambda figures: figures.jct_p95,
    "wasted": lambda figures: figures.wasted,
}

FITTED = """Stated by the paper: 64 GPUs, 80 % RLHF jobs, k = 3. Chosen to reproduce its table: peaks at 0.5 to 0.7 of
the plan, 10 evals per job, noise of 0.03 on a score that gains 0.6, half of the RLHF jobs hacking, lognormal durations
with sd 0.8 and medians of 6, 3 and 1.5 h (RLHF, DPO, LoRA), estimates with sd 0.4, gang sizes. Fitted on seeds 0 to 9:
the rate at which a healthy eval score saturates (to false stops), the fall of the eval score (to recall and waste), the
load (to times), the noise of the loss (to loss plateau)."""


@dataclass(frozen=True)
class Line:
    """One figure of the paper and ours; `bound`: whether the paper states a value ("=") or a limit (">=", "<")."""

    what: str
    paper: float
    bound: str
    ours: Figure

    @property
    def matches(self) -> bool:
        """Whether ours is within two percentage points of the value, or within the limit."""
        if self.bound == ">=":
            return self.ours.value >= self.paper
        if self.bound == "<":
            return self.ours.value < self.paper
        return abs(self.ours.value - self.paper) <= TOLERANCE + 1e-9


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("reproduce", help="reproduce the paper's table, with intervals")
    study.add_common(parser, seeds=SEEDS)
    study.add_plots(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    setting = replace(PAPER, jobs=args.cluster_jobs or JOBS)
    seeds = study.get_seeds(args)
    rows = Rows(study.sweep_cells(args, _build_cells(setting, seeds), "reproducing"))
    lines, changes = build_lines(rows), compare_schedulers(rows)
    report = {
        "lines": [asdict(line) | {"matches": line.matches} for line in lines],
        "changes": {
            scheduler: {quantity: asdict(change) for quantity, change in by_figure.items()}
            for scheduler, by_figure in changes.items()
        },
        "rules": {rule: asdict(rows.counts("paper", rule)) for rule in STOPPING},
        "gpu_hours": {rule: _compute_shares(rows, rule) for rule in (NONE, *STOPPING)},
        "setting": study.encode_setting(setting, seeds),
        "fitted": " ".join(FITTED.split()),
    }

    def show(console: Console) -> None:
        tables = (_build_paper_table(lines), _build_rules_table(rows))
        console.print(*tables, _build_changes_table(changes), " ".join(FITTED.split()), sep="\n")

    return study.print_report(args, report, show, _plot)


def build_lines(rows: Rows) -> list[Line]:
    """The paper's figures and ours."""
    counts = rows.counts("paper", "paper")
    fixed, loss = rows.counts("paper", "fixed-progress"), rows.counts("paper", "loss-plateau")
    changes = [_compare_paper(rows, name, CHANGES["mean time"]).change for name in SCHEDULERS]
    baseline = {
        quantity: _compare_paper(rows, BASELINE, CHANGES[quantity]).change for quantity in ("mean time", "wasted")
    }
    return [
        Line("precision", 0.98, "=", counts.precision()),
        Line("recall", 0.99, "=", counts.recall()),
        Line("false stops of healthy jobs", 0.015, "=", counts.false_stops()),
        Line(f"mean time to completion, {BASELINE}", -0.09, "=", baseline["mean time"]),
        Line(f"wasted GPU-hours, {BASELINE}", -0.22, "=", baseline["wasted"]),
        Line("mean time, scheduler with the smallest gain", -0.09, "=", max(changes, key=lambda item: item.value)),
        Line("mean time, scheduler with the largest gain", -0.25, "=", min(changes, key=lambda item: item.value)),
        Line("lowest precision, noise up to 0.05", 0.91, ">=", _find_least_precision(rows, map(_name_noise, NOISES))),
        Line(
            "lowest precision, 20 to 80 % hacking", 0.89, ">=", _find_least_precision(rows, map(_name_share, HACKING))
        ),
        Line("fixed progress: false stops", 0.65, "=", fixed.false_stops()),
        Line("loss plateau: recall", 0.5, "<", loss.recall()),
    ]


def compare_schedulers(rows: Rows) -> dict[str, dict[str, Change]]:
    """The changes by the paper's rule relative to no stops, by scheduler; p-values are corrected for their number."""
    by_scheduler: dict[str, dict[str, Change]] = {name: {} for name in SCHEDULERS}
    for quantity, figure in CHANGES.items():
        changes = [_compare_paper(rows, name, figure) for name in SCHEDULERS]
        corrected = correct_p_values([change.p_value for change in changes])
        for name, change, p_value in zip(SCHEDULERS, changes, corrected, strict=True):
            by_scheduler[name][quantity] = Change(change.change, p_value)
    return by_scheduler


def _build_cells(setting: Setting, seeds: Sequence[int]) -> list[Cell]:
    fewer = replace(setting, jobs=math.ceil(setting.jobs / FEWER))
    noises = {_name_noise(sd): replace(fewer, noise_sd=sd) for sd in NOISES}
    shares = {_name_share(share): replace(fewer, hacking_share=share) for share in HACKING}
    return build_cells({"paper": setting}, seeds, POLICIES, tuple(SCHEDULERS)) + build_cells(
        noises | shares, seeds, (RULES["paper"],), (COUNTED_ON,)
    )


def _name_noise(sd: float) -> str:
    return f"noise {sd:g}"


def _name_share(share: float) -> str:
    return f"hacking {share:g}"


def _compare_paper(rows: Rows, scheduler: str, figure: Callable[[Figures], float]) -> Change:
    before, after = (rows.numbers("paper", name, scheduler, figure) for name in (NONE, "paper"))
    return compare_paired(before, after)


def _find_least_precision(rows: Rows, worlds: Iterable[str]) -> Figure:
    return min((rows.counts(world, "paper").precision() for world in worlds), key=lambda item: item.value)


def _compute_shares(rows: Rows, rule: str) -> dict[str, float]:
    """GPU-hours by use under the baseline, as shares of all GPU-hours without stops, and the mean `eval_lost`."""
    whole = sum(rows.numbers("paper", NONE, BASELINE, lambda figures: figures.gpu_hours))
    by_seed = rows.figures("paper", rule, BASELINE)
    names = ("gpu_hours", "post_peak", "false_stop", "pauses", "hacking")
    shares = {name: sum(getattr(item, name) for item in by_seed) / whole for name in names}
    return shares | {"eval_lost": sum(item.eval_lost for item in by_seed) / len(by_seed)}


def _build_paper_table(lines: Sequence[Line]) -> Table:
    title = "the paper's table (with flags at the last eval)"
    table = new_table(title, "", "paper", "ours", "within 2 points")
    for line in lines:
        paper = f"{'' if line.bound == '=' else line.bound + ' '}{format_percent(line.paper)}"
        table.add_row(line.what, paper, format_figure(line.ours), "yes" if line.matches else "no")
    return table


def _build_rules_table(rows: Rows) -> Table:
    title = "flags, with / without those at the last eval, which save nothing"
    table = new_table(title, "rule", "precision", "recall", "false stops", "premature", "eval lost")
    for rule in STOPPING:
        counts = rows.counts("paper", rule)
        both = [
            f"{format_percent(share().value)} / {format_percent(share(late=False).value)}"
            for share in (counts.precision, counts.recall, counts.false_stops)
        ]
        lost = _compute_shares(rows, rule)["eval_lost"]
        table.add_row(rule, *both, format_percent(counts.premature / counts.hacking), format_percent(lost))
    return table


def _build_changes_table(changes: Mapping[str, Mapping[str, Change]]) -> Table:
    title = "paper: changes relative to no stops, by scheduler (Wilcoxon, Holm over schedulers)"
    table = new_table(title, "scheduler", *CHANGES, "p, mean time")
    for name, by_figure in changes.items():
        cells = [format_figure(change.change, sign=True) for change in by_figure.values()]
        table.add_row(name, *cells, f"{by_figure['mean time'].p_value:.1g}")
    return table


def _plot(folder: Path, report: dict[str, Any]) -> None:
    """Write reproduce.png: the change of the mean time of all, healthy and hacking jobs, by scheduler."""
    changes = report["changes"]
    with save_figure(folder / "reproduce.png", (10, 4.6)) as axes:
        axis = axes[0, 0]
        for offset, (quantity, color) in enumerate(
            (("mean time", "#3b6fb6"), ("of healthy jobs", "#5a9e6f"), ("of hacking jobs", "#c53030"))
        ):
            bars = [changes[name][quantity]["change"] for name in changes]
            places = [place + 0.27 * (offset - 1) for place in range(len(bars))]
            values = [item["value"] for item in bars]
            errors = [[item["value"] - item["low"] for item in bars], [item["high"] - item["value"] for item in bars]]
            axis.bar(places, values, 0.25, color=color, label=quantity, yerr=errors, capsize=2, ecolor="#333333")
        axis.axhspan(-0.25, -0.09, color="#b7791f", alpha=0.12, label="the paper, all jobs: -9 to -25 %")
        axis.set_xticks(range(len(changes)), changes)
        show_percent(axis.yaxis)
        axis.set_ylabel("change of the mean time to completion")
        axis.legend(fontsize=8)
