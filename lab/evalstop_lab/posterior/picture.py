"""Draws forty runs of the prior in one figure: measurements, the true curve, and the turn."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from evalstop_lab.figure import save_figure
from evalstop_lab.posterior.prior import draw_run

ROWS, COLUMNS = 5, 8


def draw_picture(path: Path, seed: int) -> None:
    """Write a PNG of `ROWS` x `COLUMNS` runs; a red line marks the turn of a run that turns for good."""
    rng = np.random.default_rng(seed)
    with save_figure(path, (16, 8), ROWS, COLUMNS, dpi=90) as axes:
        for axis in axes.flat:
            run = draw_run(rng)
            axis.plot(run.scores, ".", markersize=2, color="0.6")
            axis.plot(run.truth, color="tab:red" if run.turned else "tab:blue", linewidth=1)
            if run.turned:
                axis.axvline(run.peak, color="tab:red", linewidth=0.6, linestyle=":")
            axis.set_title(f"{len(run.scores)} evals", fontsize=7, pad=2)
            axis.set_xticks([])
            axis.set_yticks([])
        axes[0, 0].figure.suptitle(
            "Forty runs of the prior: measured (grey), healthy (blue), turned for good (red)", fontsize=10
        )
