"""Detectors over many runs on all cores, with a progress bar."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import joblib
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from evalstop_lab.errors import UnusableArguments

Item = TypeVar("Item")
Result = TypeVar("Result")

CHUNK = 25

LOCAL, DASK, RAY = BACKENDS = ("local", "dask", "ray")


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sweep(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    title: str,
    jobs: int = 1,
    chunk: int = CHUNK,
    backend: str = LOCAL,
) -> list[Result]:
    """What `work` makes of each item, in their order; a process takes a `chunk` of them at a time, one of `jobs`.

    `backend` "dask" has the workers of a Dask cluster do it: the one that `DASK_SCHEDULER_ADDRESS` names, else one of
    `jobs` processes on this machine. "ray" does so on a Ray cluster: the one that `RAY_ADDRESS` names, else one of
    `jobs` processes here. The results are the same.
    """
    return sweep_chunks(partial(_each, work), items, title, jobs, chunk, backend)


def sweep_chunks(
    work: Callable[[Sequence[Item]], list[Result]],
    items: Sequence[Item],
    title: str,
    jobs: int = 1,
    chunk: int = CHUNK,
    backend: str = LOCAL,
) -> list[Result]:
    """As `sweep`, where `work` takes a chunk of the items at once."""
    chunks = [items[start : start + chunk] for start in range(0, len(items), chunk)]
    results: list[Result] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=len(items))
        for found in _ON[backend](work, chunks, jobs):
            results.extend(found)
            progress.advance(task, len(found))
    return results


class _Rate(ProgressColumn):
    """How many items a second are done."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.0f}/s", style="progress.data.speed")


def _each(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    return [work(item) for item in items]


def _in_order(
    work: Callable[[Sequence[Item]], list[Result]], chunks: Sequence[Sequence[Item]], jobs: int
) -> Iterator[list[Result]]:
    if jobs == 1:
        yield from map(work, chunks)
    else:
        yield from joblib.Parallel(n_jobs=jobs, return_as="generator")(joblib.delayed(work)(chunk) for chunk in chunks)


def _on_dask(
    work: Callable[[Sequence[Item]], list[Result]], chunks: Sequence[Sequence[Item]], jobs: int
) -> Iterator[list[Result]]:
    distributed = _needed("distributed", DASK)
    address = os.environ.get("DASK_SCHEDULER_ADDRESS")
    local = {} if address else {"n_workers": jobs, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.Client(address, **local), joblib.parallel_config(backend="dask"):
        yield from joblib.Parallel()(joblib.delayed(work)(chunk) for chunk in chunks)


def _on_ray(
    work: Callable[[Sequence[Item]], list[Result]], chunks: Sequence[Sequence[Item]], jobs: int
) -> Iterator[list[Result]]:
    ray, backend = _needed("ray", RAY), _needed("ray.util.joblib", RAY)
    local = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": jobs, "include_dashboard": False}
    ray.init(log_to_driver=False, logging_level="warning", **local)
    try:
        backend.register_ray()
        with joblib.parallel_config(backend="ray"):
            yield from joblib.Parallel(n_jobs=jobs)(joblib.delayed(work)(chunk) for chunk in chunks)
    finally:
        ray.shutdown()


def _needed(module: str, backend: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UnusableArguments(
            f"The backend {backend} needs a library that is not installed; pip install 'evalstop-lab[{backend}]'."
        ) from error


_ON = {LOCAL: _in_order, DASK: _on_dask, RAY: _on_ray}
