"""Renders a run: as one line, and in a notebook with a sparkline of its evals. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from evalstop_client.latest_answer import Verdict

WIDTH, HEIGHT, MARGIN = 160, 36, 3


def describe_run(
    name: str, mode: str | None, policy: str | None, verdict: Verdict | None, decision: object, url: str | None
) -> str:
    """The run as one line; what is None, as before the service's first answer, is left out.

    >>> describe_run("ppo-7b", "shadow", "default@1", None, None, "http://localhost:8787/runs/1")
    'ppo-7b: shadow, policy default@1, http://localhost:8787/runs/1'
    """
    named = {"policy": policy, "verdict": verdict, "decision": decision}
    facts = [mode, *(f"{fact} {value}" for fact, value in named.items() if value is not None), url]
    return f"{name}: {', '.join(filter(None, facts)) or 'no answer yet'}"


def draw_run(
    name: str,
    mode: str | None,
    policy: str | None,
    verdict: Verdict | None,
    decision: object,
    url: str | None,
    evals: Sequence[tuple[int, float]],
) -> str:
    """The run as HTML for a notebook; `evals` by step."""
    facts = [html.escape(str(fact)) for fact in (mode, policy, verdict, decision) if fact is not None]
    title = f"<b>{html.escape(name)}</b>"
    if url is not None and url.startswith(("http://", "https://")):
        title = f'<a href="{html.escape(url, quote=True)}" target="_blank" rel="noopener">{title}</a>'
    reason = f"<br><small>{html.escape(verdict.reason)}</small>" if verdict is not None and verdict.reason else ""
    return f"<div>{' &middot; '.join([title, *facts])} {draw_sparkline(evals)}{reason}</div>"


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
