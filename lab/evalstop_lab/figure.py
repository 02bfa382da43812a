"""Figures as PNG files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a file, never a window

from matplotlib import pyplot as plt
from matplotlib.ticker import PercentFormatter


@contextmanager
def saved_figure(
    path: Path, size: tuple[float, float], rows: int = 1, columns: int = 1, dpi: int = 130, **shared: Any
) -> Iterator[Any]:
    """Rows of axes to draw on, of a figure of this size in inches, which is written at the end of the block."""
    figure, axes = plt.subplots(rows, columns, figsize=size, dpi=dpi, layout="constrained", squeeze=False, **shared)
    yield axes
    figure.savefig(path)
    plt.close(figure)


def show_percent(*axes: Any, decimals: int | None = None) -> None:
    """Write the numbers of these axes in percent."""
    for axis in axes:
        axis.set_major_formatter(PercentFormatter(1.0, decimals, symbol=" %"))
