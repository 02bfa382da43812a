"""The picture of a demo: what the run was, and what it would have been."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from evalstop_lab.rlhf.trainer import Eval

matplotlib.use("Agg")  # a file, never a window

from matplotlib import pyplot as plt

GOLD, PROXY, STOP = "#b7791f", "#3b6fb6", "#c53030"


def draw(path: Path, evals: Sequence[Eval], rest: Sequence[Eval], story: dict[str, Any]) -> None:
    """Write a PNG of gold and proxy over steps: solid as it was trained, faint as it would have gone on."""
    figure, gold_axis = plt.subplots(figsize=(10, 4.6), dpi=150, layout="constrained")
    proxy_axis = gold_axis.twinx()
    for series, alpha, style in ((evals, 1.0, "-"), ([*evals[-1:], *rest], 0.35, "--")):
        steps = [item.step for item in series]
        proxy_axis.plot(steps, [item.proxy for item in series], style, color=PROXY, alpha=alpha, linewidth=1.6)
        gold_axis.plot(steps, [item.gold for item in series], style, color=GOLD, alpha=alpha, linewidth=2)
        low = [item.gold - item.gold_stderr for item in series]
        high = [item.gold + item.gold_stderr for item in series]
        gold_axis.fill_between(steps, low, high, color=GOLD, alpha=0.15 * alpha, linewidth=0)
    best = story["best_checkpoint"]
    gold_axis.axvline(story["stop_step"], color=STOP, linewidth=1.5)
    gold_axis.annotate(
        f"stopped at step {story['stop_step']}",
        (story["stop_step"], 0.03),
        xycoords=("data", "axes fraction"),
        xytext=(6, 0),
        textcoords="offset points",
        color=STOP,
    )
    gold_axis.plot(best["step"], best["score"], "o", color=GOLD, markersize=9, markeredgecolor="white")
    gold_axis.annotate(
        f"best checkpoint kept: {best['score']:.2f}",
        (best["step"], best["score"]),
        xytext=(-2, 12),
        textcoords="offset points",
        ha="right",
    )
    final = rest[-1] if rest else evals[-1]
    gold_axis.annotate(
        f"left to run: {final.gold:.2f}",
        (final.step, final.gold),
        xytext=(-12, -14),
        textcoords="offset points",
        ha="right",
        color=GOLD,
    )
    gold_axis.margins(y=0.12)
    gold_axis.set_xlabel("step")
    gold_axis.set_ylabel("gold, what people want", color=GOLD)
    proxy_axis.set_ylabel("proxy, what is optimized", color=PROXY)
    for axis in (gold_axis, proxy_axis):
        axis.spines["top"].set_visible(False)
    figure.savefig(path)
    plt.close(figure)
