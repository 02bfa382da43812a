"""Figures of the lab."""

from __future__ import annotations

from pathlib import Path

from evalstop_lab.report import save_figure, show_percent


def test_axes_show_shares_in_percent(tmp_path: Path) -> None:
    """A space separates the number from the percent sign, as in the tables."""
    with save_figure(tmp_path / "figure.svg", (2, 2)) as axes:
        show_percent(axes[0][0].yaxis)
        axes[0][0].plot([0, 1], [0.0, 1.0])
        assert axes[0][0].yaxis.get_major_formatter()(0.47) == "47 %"
