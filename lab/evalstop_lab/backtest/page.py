"""The page of a backtest: one self-contained HTML file with every run, drawn when it scrolls into view."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from evalstop_detectors import MetricRole
from evalstop_service.rules.statuses import DecisionOutcome, RunOutcome
from plotly.offline import get_plotlyjs

from evalstop_lab.backtest.cases import Case, Passed
from evalstop_lab.replay.runs import Run

MOST_POINTS = 160
"""Longer series are drawn as the means of blocks of equal length."""

MOST_DRAWN = 5_000
"""Maximum number of runs with curves: some 50 MB; a larger page is slow to open."""

_DIGITS = 4


def write(
    path: Path, report: Mapping[str, Any], cases: Sequence[Case], labels: Sequence[str], most_drawn: int = MOST_DRAWN
) -> None:
    """Write the page: the report on all runs, and the runs, worst first for the first of these policies.

    Every run is listed; `most_drawn` of them have curves.
    """
    ordered = sorted(cases, key=lambda case: harm(case, labels[0]))
    parts = {
        "title": "Backtest of " + html.escape(" against ".join(labels)),
        "style": _file("page.css"),
        "plotly": get_plotlyjs(),
        "report": _json(report),
        "runs": _json([_run(case, labels, place < most_drawn) for place, case in enumerate(ordered)]),
        "script": _file("page.js"),
    }
    text = _file("page.html")
    for name, part in parts.items():
        text = text.replace(f"@@{name}@@", part)
    path.write_text(text, encoding="utf-8")


def harm(case: Case, label: str) -> tuple[int, float]:
    """The sort key: worst case first.

    Wrong stops come first, by what they cut off, then missed turns by what was wasted after them, stops of unknown
    outcome, right stops by their delay, healthy runs that were not stopped, and undecided runs that were not stopped.
    """
    passed, last = case.passed[label], case.run.last_step or 1
    if passed.stop_step is None:
        if case.found.run_outcome is RunOutcome.TURNED:
            return 1, (case.turn_step or 0) / last
        return (4 if case.found.run_outcome is RunOutcome.HEALTHY else 5), 0.0
    order = {DecisionOutcome.WRONG: 0, DecisionOutcome.UNKNOWN: 2, DecisionOutcome.RIGHT: 3}[passed.said]
    return order, passed.saved if passed.said is DecisionOutcome.RIGHT else -passed.saved


def _run(case: Case, labels: Sequence[str], is_drawn: bool) -> dict[str, Any]:
    run = case.run
    drawn = {
        str(role): _series(run, role)
        for role in (MetricRole.EVAL, MetricRole.PROXY, MetricRole.KL)
        if is_drawn and role in run.series
    }
    return {
        "name": run.name,
        "truth": case.found.run_outcome,
        "why": case.found.reason,
        "turn": case.turn_step,
        "last": run.last_step,
        "lower": run.roles.sign(MetricRole.EVAL) < 0,
        "group": harm(case, labels[0])[0],
        "series": drawn,
        "passed": [_passed(case.passed[label]) for label in labels],
    }


def _passed(passed: Passed) -> dict[str, Any]:
    return {
        "stop": passed.stop_step,
        "suspect": passed.judged.suspect_step,
        "best": passed.judged.best_step,
        "said": passed.said,
        "saved": _short(passed.saved),
        "hours": _short(passed.gpu_hours),
        "later": _short(passed.later),
        "reason": passed.judged.reason,
    }


def _series(run: Run, role: MetricRole) -> list[list[float | None]]:
    """Steps and logged values."""
    series = run.series[role]
    steps, values = np.frombuffer(series.steps, dtype=np.int64), np.frombuffer(series.values)
    length = -(-len(steps) // MOST_POINTS)
    if length > 1:
        starts = np.arange(0, len(steps), length)
        counts = np.diff(np.append(starts, len(steps)))
        steps = steps[starts + (counts - 1) // 2]
        values = np.add.reduceat(values, starts) / counts
    return [steps.tolist(), [_short(value) for value in values.tolist()]]


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{_DIGITS}g}")


def _json(data: object) -> str:
    """JSON that is safe in a script of a page, whatever a run is called."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028")


def _file(name: str) -> str:
    return resources.files("evalstop_lab.backtest").joinpath(name).read_text(encoding="utf-8")
