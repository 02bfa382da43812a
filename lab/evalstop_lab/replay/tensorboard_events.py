"""TensorBoard event files: the scalars of one folder are one run. Needs the package `tensorboard`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.cells import add_row, number_of, step_of
from evalstop_lab.replay.runs import Roles, Runs, Troubles

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of its own dependencies
        from tensorboard.backend.event_processing import event_accumulator
        from tensorboard.util import tensor_util
except ImportError:
    event_accumulator = None


def metrics(path: Path, troubles: Troubles) -> set[str]:
    """The tags of the scalars."""
    try:
        tags = _loaded(path).Tags()
    except UnreadableInput as error:
        troubles.add(error)
        return set()
    return {*tags["scalars"], *tags["tensors"]}


def read(path: Path, name: str, runs: Runs, roles: Roles, troubles: Troubles) -> None:
    """Take in the scalars of a folder or an event file.

    A trainer that restarted from an earlier step has superseded what it had written after that step.
    """
    accumulator = _loaded(path)
    run = runs.run(name, roles)
    there = metrics(path, troubles)
    rows: dict[int, dict[str, float]] = {}
    moments: list[float] = []
    for tag in (tag for column in roles.columns.values() for tag in (column, f"{column}_stderr") if tag in there):
        for step, moment, value in _points(accumulator, tag):
            moments.append(moment)
            rows.setdefault(step, {}).setdefault(tag, value)
    if moments:
        run.seconds = max(moments) - min(moments)
    for step, row in rows.items():
        try:
            add_row(run, step_of(step), row, number_of)
        except ValueError as error:
            troubles.add(UnreadableInput(path, str(error)))


@lru_cache(maxsize=1)  # a log is looked at twice, for its metrics and for their values
def _loaded(path: Path) -> event_accumulator.EventAccumulator:
    if event_accumulator is None:
        raise UnreadableInput(
            path, "reading TensorBoard events needs the package tensorboard: pip install 'evalstop-lab[tensorboard]'"
        )
    everything = {event_accumulator.SCALARS: 0, event_accumulator.TENSORS: 0}
    accumulator = event_accumulator.EventAccumulator(str(path), size_guidance=everything)
    try:
        accumulator.Reload()
    except Exception as error:  # what is no event file fails in many ways, in its reader as in protobuf
        raise UnreadableInput(path, f"this is no TensorBoard event file ({error})") from error
    return accumulator


def _points(accumulator: event_accumulator.EventAccumulator, tag: str) -> Iterator[tuple[int, float, float]]:
    """Step, moment (seconds since 1970) and value of each point."""
    if tag in accumulator.Tags()["scalars"]:
        for event in accumulator.Scalars(tag):
            yield event.step, event.wall_time, float(event.value)
        return
    for event in accumulator.Tensors(tag):
        values = tensor_util.make_ndarray(event.tensor_proto)
        if values.size == 1 and values.dtype.kind in "fiu":
            yield event.step, event.wall_time, float(values.reshape(()))
