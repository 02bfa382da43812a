"""Writes the page of a backtest: one self-contained HTML file with every run, plotted when it scrolls into view."""

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
from evalstop_service.domain.statuses import DecisionOutcome, RunOutcome
from plotly.offline import get_plotlyjs

from evalstop_lab.backtest.cases import Case, encode_case
from evalstop_lab.replay.runs import Run

MOST_POINTS = 160
"""Longer series are plotted as the means of blocks of equal length."""

MOST_DRAWN = 5_000
"""The maximum number of runs with curves: about 50 MB; larger pages are slow to open."""

_DIGITS = 4


def write_page(
    path: Path, report: Mapping[str, Any], cases: Sequence[Case], labels: Sequence[str], most_drawn: int = MOST_DRAWN
) -> None:
    """Write the page: the report on all runs, and the runs, sorted by `rank_harm` under the first of these policies.

    Every run is listed; `most_drawn` of them have curves.
    """
    ordered = sorted(cases, key=lambda case: rank_harm(case, labels[0]))
    parts = {
        "title": "Backtest of " + html.escape(" against ".join(labels)),
        "style": _read_resource("page.css"),
        "plotly": get_plotlyjs(),
        "report": _to_json(report),
        "runs": _to_json([_encode_run(case, labels[0], place < most_drawn) for place, case in enumerate(ordered)]),
        "script": _read_resource("page.js"),
    }
    text = _read_resource("page.html")
    for name, part in parts.items():
        text = text.replace(f"@@{name}@@", part)
    path.write_text(text, encoding="utf-8")


def rank_harm(case: Case, label: str) -> tuple[int, float]:
    """The sort key: worst case first.

    Wrong stops come first, by the lost steps, then missed turns by the wasted steps, stops of unknown outcome, right
    stops by their delay, healthy runs that were not stopped, and undecided runs that were not stopped.
    """
    result, last = case.outcomes[label], case.run.last_step or 1
    if result.stop_step is None:
        if case.assessment.run_outcome is RunOutcome.TURNED:
            return 1, (case.turn_step or 0) / last
        return (4 if case.assessment.run_outcome is RunOutcome.HEALTHY else 5), 0.0
    order = {DecisionOutcome.WRONG: 0, DecisionOutcome.UNKNOWN: 2, DecisionOutcome.RIGHT: 3}[result.outcome]
    return order, result.saved if result.outcome is DecisionOutcome.RIGHT else -result.saved


def _encode_run(case: Case, label: str, is_drawn: bool) -> dict[str, Any]:
    run = case.run
    drawn = {
        str(role): _thin_series(run, role)
        for role in (MetricRole.EVAL, MetricRole.PROXY, MetricRole.KL)
        if is_drawn and role in run.series
    }
    page_only = {"lower": run.roles.sign(MetricRole.EVAL) < 0, "group": rank_harm(case, label)[0], "series": drawn}
    return encode_case(case) | page_only


def _thin_series(run: Run, role: MetricRole) -> list[list[float | None]]:
    """The steps and logged values of at most `MOST_POINTS` blocks."""
    series = run.series[role]
    steps, values = np.frombuffer(series.steps, dtype=np.int64), np.frombuffer(series.values)
    length = -(-len(steps) // MOST_POINTS)
    if length > 1:
        starts = np.arange(0, len(steps), length)
        counts = np.diff(np.append(starts, len(steps)))
        steps = steps[starts + (counts - 1) // 2]
        values = np.add.reduceat(values, starts) / counts
    return [steps.tolist(), [_round_value(value) for value in values.tolist()]]


def _round_value(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


def _to_json(data: object) -> str:
    """Encode as JSON that is safe within a script element, whatever the names of runs."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028")


def _read_resource(name: str) -> str:
    return resources.files("evalstop_lab.backtest").joinpath(name).read_text(encoding="utf-8")
