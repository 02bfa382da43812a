"""The suites of StopBench. A suite never changes: a suite with other runs gets another number.

docs/stopbench.md describes them. Develop a rule on the seeds `public`; report once on the seeds `held-out`, which the
recorded suites, all but the first two, don't have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from evalstop_lab.worlds import World, add_planned_steps, draw_world, plan_worlds, second_suite
from evalstop_lab.worlds.recorded import read_runs

_plan_runs, _read_recorded = lru_cache(maxsize=2)(plan_worlds), lru_cache(maxsize=5)(read_runs)

SEEDS = {"public": 40_000_000, "held-out": 60_000_000}
TRAINED = Path(__file__).with_name("runs-1.jsonl.gz")
LANGUAGE = Path(__file__).with_name("language-1.jsonl.gz")
CAREFUL = Path(__file__).with_name("language-2.jsonl.gz")
PAIRED = Path(__file__).with_name("language-3.jsonl.gz")
DRAWN_RUNS = 2000
PLANNED_SHARE = 0.5


@dataclass(frozen=True)
class Suite:
    """Runs by number: `draw(seeds, number)` gives the same run on every machine with the same version of numpy."""

    runs: int
    draw: Callable[[str, int], World]
    held_out: bool = True


def _draw_first(seeds: str, number: int) -> World:
    return add_planned_steps(draw_world(*_plan_runs(DRAWN_RUNS, SEEDS[seeds])[number]), PLANNED_SHARE)


def _draw_second(seeds: str, number: int) -> World:
    kinds = list(second_suite.SECOND_SUITE)
    return second_suite.draw_world(kinds[number % len(kinds)], SEEDS[seeds] + number)


def _draw_recorded(file: Path, small: bool, seeds: str, number: int) -> World:
    return _read_recorded(file, small)[number]


SUITES: Mapping[str, Suite] = {
    "drawn-1": Suite(DRAWN_RUNS, _draw_first),
    "second-1": Suite(DRAWN_RUNS, _draw_second),
    "trained-1": Suite(400, partial(_draw_recorded, TRAINED, False), held_out=False),
    "trained-1-small": Suite(400, partial(_draw_recorded, TRAINED, True), held_out=False),
    "language-1": Suite(72, partial(_draw_recorded, LANGUAGE, False), held_out=False),
    "language-2": Suite(40, partial(_draw_recorded, CAREFUL, False), held_out=False),
    "language-3": Suite(50, partial(_draw_recorded, PAIRED, False), held_out=False),
}
