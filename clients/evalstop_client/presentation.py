"""Renders a run: as one line, and in a notebook with a sparkline of its evals. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, MARGIN = 160, 36, 3


@dataclass(frozen=True)
class ShownRun:
    """The facts shown of a run; None if the service has not answered yet."""

    name: str
    mode: str | None
    policy: str | None
    verdict: str | None
    decision: str | None
    reason: str
    url: str | None


def describe_run(run: ShownRun) -> str:
    """The run as one line.

    >>> describe_run(ShownRun("ppo-7b", "shadow", "default@1", "continue", None, "", "http://localhost:8787/runs/1"))
    'ppo-7b: shadow, policy default@1, verdict continue, http://localhost:8787/runs/1'
    """
    facts = [
        run.mode,
        run.policy and f"policy {run.policy}",
        run.verdict and f"verdict {run.verdict}",
        run.decision and f"decision {run.decision}",
        run.url,
    ]
    return f"{run.name}: {', '.join(filter(None, facts)) or 'no answer yet'}"


def draw_run(run: ShownRun, evals: Sequence[tuple[int, float]]) -> str:
    """The run as HTML for a notebook; `evals` by step."""
    facts = [html.escape(fact) for fact in (run.mode, run.policy, run.verdict, run.decision) if fact]
    name = f"<b>{html.escape(run.name)}</b>"
    if run.url is not None and run.url.startswith(("http://", "https://")):
        name = f'<a href="{html.escape(run.url, quote=True)}" target="_blank" rel="noopener">{name}</a>'
    reason = f"<br><small>{html.escape(run.reason)}</small>" if run.reason else ""
    return f"<div>{' &middot; '.join([name, *facts])} {draw_sparkline(evals)}{reason}</div>"


def draw_sparkline(points: Sequence[tuple[int, float]]) -> str:
    """The points as an SVG; empty if fewer than two are finite.

    >>> draw_sparkline([(0, 1.0)])
    ''
    """
    finite = sorted((step, value) for step, value in points if math.isfinite(value))
    if len(finite) < 2:
        return ""
    first, last = finite[0][0], finite[-1][0]
    lowest, highest = min(value for _, value in finite), max(value for _, value in finite)

    def share(value: float, low: float, high: float) -> float:
        # Halved, because the difference of two doubles may overflow.
        return (value / 2 - low / 2) / (high / 2 - low / 2) if high / 2 > low / 2 else 0.5

    corners = " ".join(
        f"{MARGIN + share(step, first, last) * (WIDTH - 2 * MARGIN):.1f},"
        f"{HEIGHT - MARGIN - share(value, lowest, highest) * (HEIGHT - 2 * MARGIN):.1f}"
        for step, value in finite
    )
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{len(finite)} evals" '
        f'style="vertical-align: middle"><polyline points="{corners}" fill="none" stroke="currentColor" '
        'stroke-width="1.5"/></svg>'
    )
