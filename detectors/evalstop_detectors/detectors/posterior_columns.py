"""Converts the columns of a whole run to the posterior network's inputs at each eval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evalstop_detectors.checkpoint.noise import LARGEST
from evalstop_detectors.observation import Column, Columns, MetricRole
from evalstop_detectors.posterior.features import Given

Floats = NDArray[np.float64]

_NO_VALUES = Column((), ())
_FAR = 1e100
"""Values up to this far from zero can be added up without clipping."""


def list_given(columns: Columns) -> Given | None:
    """The inputs at each finite eval, as arrays; None for runs that only `Posterior.step` can process: with paired
    evaluations, without a finite eval, or with a proxy so large that its sums would be clipped.

    The proxy counts by its mean since the last eval, relative to its first value, KL by its latest value since then.
    """
    evals = columns.get(MetricRole.EVAL, _NO_VALUES)
    values = np.array(evals.values, dtype=np.float64)
    finite = np.isfinite(values)
    count = int(np.count_nonzero(finite))
    if MetricRole.PAIRED in columns or not count:
        return None
    steps = np.array(evals.steps)[finite]
    stderr, progress = (_to_floats(column, finite) for column in (evals.stderrs, evals.progress))
    has_stderr = (stderr > 0) & (stderr < np.inf)
    proxy_at, proxies = _place(columns.get(MetricRole.PROXY, _NO_VALUES), steps)
    if np.any(np.abs(proxies) > _FAR):
        return None
    waiting = np.bincount(proxy_at, minlength=count + 1)[:count]
    total = np.bincount(proxy_at, proxies - proxies[:1], minlength=count + 1)[:count]
    kl_at, kls = _place(columns.get(MetricRole.KL, _NO_VALUES), steps)
    kl, has_kl = np.zeros(count + 1), np.zeros(count + 1)
    kl[kl_at], has_kl[kl_at] = np.clip(kls, -LARGEST, LARGEST), 1.0  # of several at one index the last stays
    return Given(
        np.clip(values[finite], -LARGEST, LARGEST),
        np.where(has_stderr, np.minimum(stderr, LARGEST), 0.0),
        has_stderr.astype(float),
        total / np.maximum(waiting, 1),
        (waiting > 0).astype(float),
        kl[:count],
        has_kl[:count],
        np.nan_to_num(progress, nan=0.0),
        (~np.isnan(progress)).astype(float),
    )


def _to_floats(values: Sequence[float | None] | None, finite: NDArray[np.bool_]) -> Floats:
    """The values at finite evals; NaN where unknown."""
    if values is None:
        return np.full(int(np.count_nonzero(finite)), np.nan)
    return np.array(values, dtype=np.float64)[finite]


def _place(column: Column, eval_steps: NDArray[np.int64]) -> tuple[NDArray[np.intp], Floats]:
    """The finite values of a column, and the index of the eval that each precedes; past the last eval: their count."""
    values = np.array(column.values, dtype=np.float64)
    finite = np.isfinite(values)
    return np.searchsorted(eval_steps, np.array(column.steps, dtype=np.int64)[finite]), values[finite]
