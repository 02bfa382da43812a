"""`evalstop-lab cluster reproduce`: the table of EvalStop (arXiv 2606.04145) beside ours, on seeds that nothing was
fitted on."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from evalstop_lab.report import format_change, format_percent, new_table
from evalstop_lab.simulator import options, plots
from evalstop_lab.simulator.metrics import Figures
from evalstop_lab.simulator.paired import Change, holm, relative_change
from evalstop_lab.simulator.schedulers import SCHEDULERS
from evalstop_lab.simulator.setting import PAPER, Setting
from evalstop_lab.simulator.stopping import RULES
from evalstop_lab.simulator.study import NONE, ORACLE, Rows, cells
from evalstop_lab.worlds.scoring import Figure

SEEDS = 12
JOBS = 3000
BASELINE = "SRTF-Est"
COUNTED_ON = "FIFO-Skip"  # where only flags are counted, the cheapest scheduler will do,
FEWER = 5  # and a fifth of the jobs
POLICIES = tuple(RULES[name] for name in ("paper", "default", "fixed-progress", "loss-plateau"))
STOPPING = (*(policy.name for policy in POLICIES), ORACLE)
NOISES = (0.01, 0.02, 0.03, 0.04, 0.05)
HACKING = (0.2, 0.35, 0.5, 0.65, 0.8)
TOLERANCE = 0.02

CHANGES: Mapping[str, Callable[[Figures], float]] = {
    "mean time": lambda found: found.jct,
    "of healthy jobs": lambda found: found.jct_healthy,
    "of hacking jobs": lambda found: found.jct_hacking,
    "p95": lambda found: found.jct_p95,
    "wasted": lambda found: found.wasted,
    "hacking jobs' GPU-hours": lambda found: found.hacking,
    "all GPU-hours": lambda found: found.gpu_hours,
}

FITTED = """Stated by the paper: 64 GPUs, 80 % RLHF jobs, k = 3. Chosen so that its table comes out: peaks at .5 to .7
of the plan, 10 evals a job, noise .03 on a score that gains .6, half of the RLHF jobs hacking, durations lognormal with
sd .8 and medians of 6, 3 and 1.5 h (RLHF, DPO, LoRA), estimates with sd .4, gang sizes. Of these fitted here, on seeds
0 to 9: how fast a healthy eval score saturates (false stops), how far the eval score falls (recall, waste), load
(times), noise of the loss (loss plateau)."""


@dataclass(frozen=True)
class Line:
    """One figure of the paper beside ours; `bound` says whether the paper gives a value ("=") or a limit."""

    what: str
    paper: float
    bound: str
    ours: Figure

    @property
    def matches(self) -> bool:
        """Whether ours is within two points of the value, or keeps the limit."""
        if self.bound == ">=":
            return self.ours.value >= self.paper
        if self.bound == "<":
            return self.ours.value < self.paper
        return abs(self.ours.value - self.paper) <= TOLERANCE + 1e-9


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `reproduce` to `evalstop-lab cluster`."""
    parser = subparsers.add_parser("reproduce", help="the paper's table beside ours, with intervals")
    options.add(parser, seeds=SEEDS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `evalstop-lab cluster reproduce`; return its exit code."""
    setting = replace(PAPER, jobs=args.cluster_jobs or JOBS)
    seeds = options.seeds(args)
    rows = Rows(options.sweep_cells(args, _cells(setting, seeds), "reproducing"))
    lines, changes = table(rows), by_scheduler(rows)
    report = {
        "lines": [asdict(line) | {"matches": line.matches} for line in lines],
        "changes": {rule: {name: _document(of) for name, of in found.items()} for rule, found in changes.items()},
        "rules": {rule: asdict(rows.counts("paper", rule)) for rule in STOPPING},
        "gpu_hours": {rule: _gpu_hours(rows, rule) for rule in (NONE, *STOPPING)},
        "setting": options.setting_document(setting, seeds),
        "fitted": " ".join(FITTED.split()),
    }
    return options.print_report(args, report, lambda console: _print(console, rows, lines, changes), plots.reproduce)


def table(rows: Rows) -> list[Line]:
    """The paper's figures beside ours."""
    counts = rows.counts("paper", "paper")
    straw, loss = rows.counts("paper", "fixed-progress"), rows.counts("paper", "loss-plateau")
    changed = [relative_change(*_pair(rows, "paper", name, CHANGES["mean time"])).change for name in SCHEDULERS]
    baseline = {
        what: relative_change(*_pair(rows, "paper", BASELINE, CHANGES[what])).change for what in ("mean time", "wasted")
    }
    return [
        Line("precision", 0.98, "=", options.share(*_flagged(counts))),
        Line("recall", 0.99, "=", options.share(round(counts.recall() * counts.hacking), counts.hacking)),
        Line(
            "false stops of healthy jobs", 0.015, "=", options.share(counts.wrong + counts.late_healthy, counts.healthy)
        ),
        Line(f"mean time to completion, {BASELINE}", -0.09, "=", baseline["mean time"]),
        Line(f"wasted GPU-hours, {BASELINE}", -0.22, "=", baseline["wasted"]),
        Line("mean time, the scheduler that gains least", -0.09, "=", max(changed, key=lambda item: item.value)),
        Line("mean time, the scheduler that gains most", -0.25, "=", min(changed, key=lambda item: item.value)),
        Line("least precision, noise up to .05", 0.91, ">=", _least_precision(rows, [_noise(one) for one in NOISES])),
        Line(
            "least precision, 20 to 80 % hacking", 0.89, ">=", _least_precision(rows, [_share_of(s) for s in HACKING])
        ),
        Line("fixed progress: false stops", 0.65, "=", options.share(straw.wrong + straw.late_healthy, straw.healthy)),
        Line("loss plateau: recall", 0.5, "<", options.share(round(loss.recall() * loss.hacking), loss.hacking)),
    ]


def by_scheduler(rows: Rows) -> dict[str, dict[str, dict[str, Change]]]:
    """By rule and scheduler what changed beside no stops, p-values corrected for the number of schedulers."""
    found: dict[str, dict[str, dict[str, Change]]] = {}
    for rule in STOPPING:
        found[rule] = {name: {} for name in SCHEDULERS}
        for what, figure in CHANGES.items():
            changes = [relative_change(*_pair(rows, rule, name, figure)) for name in SCHEDULERS]
            corrected = holm([change.p_value for change in changes])
            for name, change, p_value in zip(SCHEDULERS, changes, corrected, strict=True):
                found[rule][name][what] = Change(change.change, p_value)
    return found


def _cells(setting: Setting, seeds: Sequence[int]) -> list[Any]:
    fewer = replace(setting, jobs=math.ceil(setting.jobs / FEWER))
    noises = {_noise(sd): replace(fewer, noise_sd=sd) for sd in NOISES}
    shares = {_share_of(share): replace(fewer, hacking_share=share) for share in HACKING}
    return cells({"paper": setting}, seeds, POLICIES, tuple(SCHEDULERS)) + cells(
        noises | shares, seeds, (RULES["paper"],), (COUNTED_ON,)
    )


def _noise(sd: float) -> str:
    return f"noise {sd:g}"


def _share_of(share: float) -> str:
    return f"hacking {share:g}"


def _pair(rows: Rows, rule: str, scheduler: str, figure: Callable[[Figures], float]) -> tuple[list[float], list[float]]:
    return rows.numbers("paper", NONE, scheduler, figure), rows.numbers("paper", rule, scheduler, figure)


def _flagged(counts: Any) -> tuple[int, int]:
    right = counts.right + counts.premature + counts.late_hacking
    return right, right + counts.wrong + counts.late_healthy


def _least_precision(rows: Rows, worlds: Sequence[str]) -> Figure:
    return min((options.share(*_flagged(rows.counts(world, "paper"))) for world in worlds), key=lambda item: item.value)


def _gpu_hours(rows: Rows, rule: str) -> dict[str, float]:
    """What went into what under the baseline, as shares of all GPU-hours without stops; and the eval score lost at the
    kept checkpoint."""
    whole = sum(rows.numbers("paper", NONE, BASELINE, lambda found: found.gpu_hours))
    found = rows.figures("paper", rule, BASELINE)
    names = ("gpu_hours", "post_peak", "false_stop", "evals", "pauses", "hacking")
    shares = {name: sum(getattr(item, name) for item in found) / whole for name in names}
    return shares | {"eval_lost": sum(item.eval_lost for item in found) / len(found)}


def _document(changes: Mapping[str, Change]) -> dict[str, Any]:
    return {what: asdict(change) for what, change in changes.items()}


def _print(
    console: Console, rows: Rows, lines: Sequence[Line], changes: Mapping[str, Mapping[str, Mapping[str, Change]]]
) -> None:
    console.print(_paper_table(lines))
    console.print(_rules_table(rows))
    console.print(_waste_table(rows))
    console.print(_changes_table(changes["paper"]))
    console.print(" ".join(FITTED.split()))


def _paper_table(lines: Sequence[Line]) -> Table:
    table = new_table("the paper's table (late flags counted)", "", "paper", "ours", "95 %", "within 2 points")
    for line in lines:
        paper = f"{'' if line.bound == '=' else line.bound + ' '}{format_percent(line.paper)}"
        interval = f"{format_percent(line.ours.low)} to {format_percent(line.ours.high)}"
        table.add_row(line.what, paper, format_percent(line.ours.value), interval, "yes" if line.matches else "no")
    return table


def _rules_table(rows: Rows) -> Table:
    table = new_table(
        "flags, with those at the last eval and without: these save nothing",
        "rule",
        "precision",
        "recall",
        "false stops",
        "before the peak",
        "the eval score lost at the kept checkpoint",
    )
    for rule in STOPPING:
        counts = rows.counts("paper", rule)
        both = [
            f"{format_percent(of())} / {format_percent(of(late=False))}" if not math.isnan(of()) else "-"
            for of in (counts.precision, counts.recall, counts.false_stops)
        ]
        table.add_row(
            rule,
            *both,
            format_percent(counts.premature / counts.hacking),
            format_percent(_gpu_hours(rows, rule)["eval_lost"]),
        )
    return table


def _waste_table(rows: Rows) -> Table:
    shares = ("held", "after the peak", "false stops", "hacking jobs", "pauses")
    wastes = ("waste", "waste (all hacking)")
    table = new_table(f"shares of all GPU-hours without stops, {BASELINE}", "rule", *shares, *wastes)
    before = _gpu_hours(rows, NONE)
    for rule in (NONE, *STOPPING):
        found = _gpu_hours(rows, rule)
        wasted = (found["post_peak"] + found["false_stop"]) / before["post_peak"] - 1
        of_all = [found[name] for name in ("gpu_hours", "post_peak", "false_stop", "hacking", "pauses")]
        table.add_row(
            rule,
            *(format_percent(share) for share in of_all),
            format_percent(wasted, sign=True),
            format_percent((found["hacking"] + found["false_stop"]) / before["hacking"] - 1, sign=True),
        )
    return table


def _changes_table(changes: Mapping[str, Mapping[str, Change]]) -> Table:
    table = new_table(
        "paper beside no stops, by scheduler (Wilcoxon, Holm over schedulers)",
        "scheduler",
        *list(CHANGES)[:5],
        "p, mean time",
    )
    for name, found in changes.items():
        cells = [format_change(change.change) for change in list(found.values())[:5]]
        table.add_row(name, *cells, f"{found['mean time'].p_value:.1g}")
    return table
