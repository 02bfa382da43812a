"""`make bench-detectors`: the time that each detector needs for an eval.

Every step of a turning run is timed several times and the fastest time counts, which reduces the effect of other load.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from evalstop_detectors import DETECTORS, Detector, MetricRole, Observation
from rich.console import Console
from rich.table import Table

from evalstop_lab.arguments import positive_number
from evalstop_lab.stopbench.libraries import LIBRARIES

# non_finite watches faults that the run doesn't have, and sudden_change no evals; river's detectors are listed with
# those of other libraries.
_NOT_RUN = frozenset({"non_finite", "river_drift", "sudden_change"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--evals", type=positive_number, default=400, help="evals of the run (default: 400)")
    parser.add_argument("--rounds", type=positive_number, default=3, help="rounds; the fastest counts")
    options = parser.parse_args(arguments)
    run = draw_turning_run(options.evals)
    console = Console() if sys.stdout.isatty() else Console(width=120)
    table = Table("detector", "mean", "median", "99th percentile", "maximum", title="microseconds per eval")
    for name, detector in list_detectors().items():
        costs = time_detector(detector, run, options.rounds)
        table.add_row(name, *(f"{cost:.1f}" for cost in (np.mean(costs), *np.quantile(costs, (0.5, 0.99, 1.0)))))
    console.print(table)
    return 0


def list_detectors() -> dict[str, Detector[Any]]:
    """The detectors of the catalog with their default parameters, and those of other libraries, by name."""
    own = {name: detector() for name, detector in DETECTORS.items() if name not in _NOT_RUN}
    return own | {name: detector for name, (detector, _) in LIBRARIES.items()}


def draw_turning_run(evals: int) -> list[Observation]:
    """Draw observations of all roles at every step; the eval score rises, stays, and falls from the middle on, with
    noise of 10 % of the gain."""
    rng, observations = np.random.default_rng(1), []
    eval_scores = np.interp(np.arange(evals), [0, evals / 5, evals / 2, evals], [0, 1, 1, 0.4])
    eval_scores += 0.1 * rng.standard_normal(evals)
    proxy = np.linspace(0, 2, evals) + 0.1 * rng.standard_normal(evals)
    for step in range(evals):
        values = {
            MetricRole.KL: 0.02 * step,
            MetricRole.LOSS: -1.0,
            MetricRole.PROXY: proxy[step],
            MetricRole.EVAL: eval_scores[step],
        }
        observations += [Observation(role, step, value) for role, value in values.items()]
    return observations


def time_detector(detector: Detector[Any], run: Sequence[Observation], rounds: int) -> list[float]:
    """Microseconds of each eval."""
    observations = [item for item in run if item.role in detector.roles]
    costs = _take_fastest(lambda: _time_steps(detector.start(), detector.step, observations), rounds)
    return [cost for cost, item in zip(costs, observations, strict=True) if item.role is MetricRole.EVAL]


def _time_steps(state: Any, step: Callable[[Any, Any], Any], items: Sequence[Any]) -> list[float]:
    costs = []
    for item in items:
        started = time.perf_counter()
        state, _ = step(state, item)
        costs.append(time.perf_counter() - started)
    return costs


def _take_fastest(timed: Callable[[], list[float]], rounds: int) -> list[float]:
    return [1e6 * min(costs) for costs in zip(*(timed() for _ in range(rounds)), strict=True)]


if __name__ == "__main__":
    sys.exit(main())
