"""TensorBoard event files: the scalars of one folder are one run. Needs the package `tensorboard`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.cells import add_row, number_of, step_of
from evalstop_lab.replay.runs import Runs

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of its own dependencies
        from tensorboard.backend.event_processing import event_accumulator
        from tensorboard.util import tensor_util
except ImportError:
    event_accumulator = None


def read(path: Path, name: str, runs: Runs) -> set[str]:
    """Take in the scalars of a folder or an event file; returns their tags.

    A trainer that restarted from an earlier step has superseded what it had written after that step.
    """
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
    tags = accumulator.Tags()
    run = runs.run(name)
    wanted = [tag for column in runs.roles.columns.values() for tag in (column, f"{column}_stderr")]
    rows: dict[int, dict[str, float]] = {}
    for tag in wanted:
        if tag in tags["scalars"] or tag in tags["tensors"]:
            for step, value in _points(accumulator, tag):
                rows.setdefault(step, {}).setdefault(tag, value)
    try:
        for step, row in rows.items():
            add_row(run, step_of(step), row, runs.roles, number_of)
    except ValueError as error:
        raise UnreadableInput(path, str(error)) from error
    return {*tags["scalars"], *tags["tensors"]}


def _points(accumulator: event_accumulator.EventAccumulator, tag: str) -> Iterator[tuple[int, float]]:
    if tag in accumulator.Tags()["scalars"]:
        for event in accumulator.Scalars(tag):
            yield event.step, float(event.value)
        return
    for event in accumulator.Tensors(tag):
        values = tensor_util.make_ndarray(event.tensor_proto)
        if values.size == 1 and values.dtype.kind in "fiu":
            yield event.step, float(values.reshape(()))
