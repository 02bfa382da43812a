"""Writes figures as PNG files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # needs no display

from matplotlib import pyplot as plt
from matplotlib.ticker import PercentFormatter


@contextmanager
def save_figure(
    path: Path, size: tuple[float, float], rows: int = 1, columns: int = 1, dpi: int = 130, **shared: Any
) -> Iterator[Any]:
    """Yield the axes of a figure of this size in inches; the figure is written at the end of the block."""
    figure, axes = plt.subplots(rows, columns, figsize=size, dpi=dpi, layout="constrained", squeeze=False, **shared)
    yield axes
    figure.savefig(path)
    plt.close(figure)


def show_percent(*axes: Any) -> None:
    """Format the tick labels of these axes as percentages."""
    for axis in axes:
        axis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
