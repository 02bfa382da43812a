"""Draws the plot of a demo: the run up to its stop, and its course without the stop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evalstop_lab.figure import save_figure
from evalstop_lab.rlhf.trainer import Eval

EVAL, PROXY, STOP = "#b7791f", "#3b6fb6", "#c53030"


def draw_picture(path: Path, evals: Sequence[Eval], later_evals: Sequence[Eval], summary: dict[str, Any]) -> None:
    """Write a PNG of eval and proxy over steps: solid up to the stop, faint for the course without it."""
    with save_figure(path, (10, 4.6), dpi=150) as axes:
        eval_axis = axes[0, 0]
        proxy_axis = eval_axis.twinx()
        for series, alpha, style in ((evals, 1.0, "-"), ([*evals[-1:], *later_evals], 0.35, "--")):
            steps = [item.step for item in series]
            proxy_axis.plot(steps, [item.proxy for item in series], style, color=PROXY, alpha=alpha, linewidth=1.6)
            eval_axis.plot(steps, [item.gold for item in series], style, color=EVAL, alpha=alpha, linewidth=2)
            low = [item.gold - item.gold_stderr for item in series]
            high = [item.gold + item.gold_stderr for item in series]
            eval_axis.fill_between(steps, low, high, color=EVAL, alpha=0.15 * alpha, linewidth=0)
        best = summary["best_checkpoint"]
        eval_axis.axvline(summary["stop_step"], color=STOP, linewidth=1.5)
        eval_axis.annotate(
            f"stopped at step {summary['stop_step']}",
            (summary["stop_step"], 0.03),
            xycoords=("data", "axes fraction"),
            xytext=(6, 0),
            textcoords="offset points",
            color=STOP,
        )
        eval_axis.plot(best["step"], best["score"], "o", color=EVAL, markersize=9, markeredgecolor="white")
        eval_axis.annotate(
            f"best checkpoint: {best['score']:.2f}",
            (best["step"], best["score"]),
            xytext=(-2, 12),
            textcoords="offset points",
            ha="right",
        )
        final = later_evals[-1] if later_evals else evals[-1]
        eval_axis.annotate(
            f"without the stop: {final.gold:.2f}",
            (final.step, final.gold),
            xytext=(-12, -14),
            textcoords="offset points",
            ha="right",
            color=EVAL,
        )
        eval_axis.margins(y=0.12)
        eval_axis.set_xlabel("step")
        eval_axis.set_ylabel("eval (gold reward)", color=EVAL)
        proxy_axis.set_ylabel("proxy (training reward)", color=PROXY)
        for axis in (eval_axis, proxy_axis):
            axis.spines["top"].set_visible(False)
