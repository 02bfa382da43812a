"""The arguments that all callbacks pass to `evalstop_client.Run`, under its names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

from evalstop_client.observations import parse_number
from evalstop_client.run import Run
from evalstop_client.settings import RunArguments


class CallbackArguments(RunArguments, total=False):
    """The arguments of `Run`; `metrics` defaults to "auto", and `name` to the framework's name of the run."""

    name: str | None


EVAL_LABEL = "evalstop.eval"
"""The label that declares the eval: the metric that chooses the best checkpoint of a trainer."""


def filled(
    arguments: CallbackArguments,
    *,
    name: str | None = None,
    total_steps: int | None = None,
    resumes: bool = False,
    best_by: tuple[str | None, str] = (None, ""),
) -> CallbackArguments:
    """Complete `arguments` with what the framework knows; EVALSTOP_RUN_NAME takes precedence over the framework's name.

    `resumes`: whether the framework continues from a checkpoint, which may be that of a run that has ended. `best_by`:
    the metric that chooses its best checkpoint, and `maximize`, `minimize` or, if unknown, nothing.
    """
    chosen = arguments.get("name") or os.environ.get("EVALSTOP_RUN_NAME") or name
    resume: Literal["allow"] | None = "allow" if resumes else None
    merged = {"metrics": "auto", "total_steps": total_steps, "resume": resume, **arguments, "name": chosen}
    metric, direction = best_by
    if metric and merged["metrics"] == "auto" and EVAL_LABEL not in os.environ.get("EVALSTOP_LABELS", ""):
        declared = f"{metric}:{direction}" if direction else metric
        merged["labels"] = {EVAL_LABEL: declared, **(arguments.get("labels") or {})}
    return cast(CallbackArguments, merged)


def is_plan_meant(*, is_constant: bool, stops_early: bool) -> bool:
    """Whether a planned length is more than an upper bound: the learning rate decays towards it, or nothing else is to
    end the training. What a stop saves of an upper bound would not have been run."""
    return not (is_constant and stops_early)


def choose_monitor(monitors: Iterable[tuple[str | None, str]]) -> tuple[str | None, str]:
    """The first of these monitored metrics that is held out, with its direction from a mode `min`, `max` or `auto`."""
    directions = {"max": "maximize", "min": "minimize"}
    others = (None, "", "loss", "epoch", "step", "global_step")  # Lightning keeps the last checkpoints by their step
    held_out = ((metric, mode) for metric, mode in monitors if metric not in others and metric[:5] != "train")
    return next(((metric, directions.get(mode, "")) for metric, mode in held_out), (None, ""))


URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

RESTART_COUNTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


def repeats_steps(step: int) -> bool:
    """Whether a training that begins after `step` may repeat steps of its run: it continues from a checkpoint, or its
    job was started again and attaches to the run of the earlier start.

    Slurm and torchrun tell how often they did that. In a Kubernetes workload nothing does, and each start counts: the
    first has nothing to supersede.
    """
    if step > 0 or os.environ.get("EVALSTOP_KUBERNETES_NAME"):
        return True
    return any(os.environ.get(name, "") not in ("", "0") for name in RESTART_COUNTS)


latest_runs: dict[str | None, Run] = {}
"""The latest run of each name that a callback opened; it may have ended."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=latest_runs.clear)  # they go on in the parent


def open_run(arguments: CallbackArguments) -> Run:
    """Open the run of a training, which a framework begins."""
    end_earlier_run(arguments)
    run = latest_runs[arguments.get("name")] = Run(**arguments)
    return run


def end_earlier_run(arguments: CallbackArguments) -> None:
    """End the run of an earlier training of this name, unless it is to be continued.

    An earlier training of this name in this process has ended, perhaps by an exception, as when a failed notebook cell
    is run again. Most frameworks do not report an exception to callbacks. If the earlier run still counted as alive,
    the new one would attach to it.
    """
    earlier = latest_runs.pop(arguments.get("name"), None)
    if earlier is not None and arguments.get("resume") is None:
        earlier.finish("failed")  # has no effect on a run that was finished


def keep_numbers(values: Any) -> Any:
    """The numbers among the values that a framework logs; others are silently ignored.

    What is no mapping is returned as it is: `Run.log` says so.
    """
    if not isinstance(values, Mapping):
        return {} if values is None else values
    return {
        name: value for name, value in values.items() if not isinstance(value, bool) and parse_number(value) is not None
    }


def to_uri(path: str | os.PathLike[str]) -> str:
    """The URI of a file, without percent-encoding; a path that is a URI, such as one of an object store, as it is."""
    text = os.fspath(path)
    return text if URI.match(text) else f"file://{Path(text).absolute().as_posix()}"
