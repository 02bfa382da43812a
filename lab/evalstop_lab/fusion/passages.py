"""What the members of fusion made of labeled runs: the features at every eval, and whether the turn was behind."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from evalstop_detectors import Kind, MetricRole, Observation
from evalstop_detectors.detectors.fusion import FEATURES, FusionState, features, with_members
from numpy.typing import NDArray

from evalstop_lab.calibrate.evidence import Records
from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay import read
from evalstop_lab.replay.lines import lines
from evalstop_lab.worlds import Label, World, make

Matrix = NDArray[np.float64]
Recipe = tuple[str, int, bool]


@dataclass(frozen=True, eq=False)
class Passage:
    """One run. `steps` are those of its finite evals, `values` holds a row of `FEATURES` for each, and `past` says
    whether the turn lay before it. `last` is the last step of any role, `group` the family or the source."""

    group: str
    last: int
    steps: NDArray[np.int64]
    values: Matrix
    past: NDArray[np.bool_]

    def records(self, kind: Kind, alarms: Matrix) -> Records:
        """The records of evidence that had these values at the evals."""
        alarms = alarms[self.steps < self.last]
        rises = np.flatnonzero(alarms > np.concatenate([[-np.inf], np.maximum.accumulate(alarms)[:-1]]))
        return Records(kind, tuple(self.steps[rises].tolist()), tuple(alarms[rises].tolist()))


def over_worlds(recipes: Sequence[Recipe]) -> list[Passage]:
    """Make these worlds, by family, seed and whether gold is all that is seen, and pass through them."""
    found = []
    for family, seed, gold_only in recipes:
        world = make(family, seed)
        shown = (item for item in world.observations() if item.role is MetricRole.EVAL or not gold_only)
        found.append(passage(family, shown, int(world.steps[-1]), turn_of(world)))
    return found


def over_runs(runs: Sequence[tuple[str, Sequence[Observation], int | None]]) -> list[Passage]:
    """Pass through runs of one's own, each with its source and the step of its turn, None of a run without one."""
    return [passage(source, run, run[-1].step, turn) for source, run, turn in runs]


def passage(group: str, observations: Iterable[Observation], last: int, turn_step: int | None) -> Passage:
    """Pass through one run, given in order."""
    state, steps, rows = FusionState(), [], []
    for item in observations:
        state = with_members(state, item)
        if item.role is MetricRole.EVAL and item.finite:
            steps.append(item.step)
            rows.append(features(state))
    at = np.asarray(steps, dtype=np.int64)
    past = np.zeros(len(at), dtype=np.bool_) if turn_step is None else at > turn_step
    return Passage(group, last, at, np.asarray(rows, dtype=float).reshape(-1, len(FEATURES)), past)


def turn_of(world: World) -> int | None:
    """The step of the last best of the noiseless gold, if the run never comes back to it."""
    return world.truth.peak_step if world.truth.label is Label.HACKING else None


def labeled_runs(paths: Sequence[Path], labels: Path) -> list[tuple[str, Sequence[Observation], int | None]]:
    """The runs of these files of which `labels` says where they turned; raises UnreadableInput naming file and line.

    A line of `labels` is `{"run": "a", "turn_step": 120}`, with null for a run that never turned.
    """
    runs = read(paths)
    runs.settle()
    found: dict[str, tuple[str, Sequence[Observation], int | None]] = {}
    for number, line in lines(labels):
        try:
            row = json.loads(line)
            name, turn = str(row["run"]), row["turn_step"]
        except (ValueError, KeyError, TypeError) as error:
            raise UnreadableInput(
                labels, 'a line is {"run": "a", "turn_step": 120}, or null for none', number
            ) from error
        if turn is not None and type(turn) is not int:
            raise UnreadableInput(
                labels, f"turn_step is {turn!r}; give a step, or null for a run without a turn", number
            )
        if name not in runs.by_name:
            raise UnreadableInput(labels, f"there is no run {name!r} in the files", number)
        if observed := runs.by_name[name].observations():
            found[name] = (name, observed, turn)
    return list(found.values())
