"""Applies a function to many items on all cores or on a cluster, with a progress bar."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import joblib
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from evalstop_lab.arguments import import_library, positive_number

Item = TypeVar("Item")
Result = TypeVar("Result")
Work = Callable[[Sequence[Any]], list[Any]]

CHUNK = 25

LOCAL, DASK, RAY = BACKENDS = ("local", "dask", "ray")


def add_jobs_option(parser: argparse.ArgumentParser) -> None:
    text = "processes (default: one per core)"
    parser.add_argument("--jobs", type=positive_number, default=joblib.cpu_count(), help=text)


def sweep(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    title: str,
    jobs: int = 1,
    chunk: int = CHUNK,
    backend: str = LOCAL,
) -> list[Result]:
    """Apply `work` to each item in `jobs` processes, `chunk` items at a time; returns the results in order.

    `backend`: "local", "dask" for the Dask cluster at `DASK_SCHEDULER_ADDRESS`, or "ray" for the Ray cluster at
    `RAY_ADDRESS`; without an address a cluster of `jobs` processes is started on this machine. The results do not
    depend on the backend.
    """
    return sweep_chunks(partial(_apply_to_each, work), items, title, jobs, chunk, backend)


def sweep_chunks(
    work: Callable[[Sequence[Item]], list[Result]],
    items: Sequence[Item],
    title: str,
    jobs: int = 1,
    chunk: int = CHUNK,
    backend: str = LOCAL,
) -> list[Result]:
    """Like `sweep`, but `work` takes a chunk of items."""
    chunks = [items[start : start + chunk] for start in range(0, len(items), chunk)]
    results: list[Result] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=len(items))
        for of_chunk in _BACKENDS[backend](work, chunks, jobs):
            results.extend(of_chunk)
            progress.advance(task, len(of_chunk))
    return results


def _apply_to_each(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    return [work(item) for item in items]


def _run_locally(work: Work, chunks: Sequence[Sequence[Any]], jobs: int) -> Iterator[list[Any]]:
    if jobs == 1:
        yield from map(work, chunks)
    else:
        yield from joblib.Parallel(n_jobs=jobs, return_as="generator")(joblib.delayed(work)(chunk) for chunk in chunks)


def _run_on_dask(work: Work, chunks: Sequence[Sequence[Any]], jobs: int) -> Iterator[list[Any]]:
    distributed = import_library("distributed", DASK)
    address = os.environ.get("DASK_SCHEDULER_ADDRESS")
    local = {} if address else {"n_workers": jobs, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    with distributed.Client(address, **local), joblib.parallel_config(backend="dask"):
        yield from joblib.Parallel()(joblib.delayed(work)(chunk) for chunk in chunks)


def _run_on_ray(work: Work, chunks: Sequence[Sequence[Any]], jobs: int) -> Iterator[list[Any]]:
    ray, backend = import_library("ray", RAY), import_library("ray.util.joblib", RAY)
    local = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": jobs, "include_dashboard": False}
    ray.init(log_to_driver=False, logging_level="warning", **local)
    try:
        backend.register_ray()
        with joblib.parallel_config(backend="ray"):
            yield from joblib.Parallel(n_jobs=jobs)(joblib.delayed(work)(chunk) for chunk in chunks)
    finally:
        ray.shutdown()


_BACKENDS = {LOCAL: _run_locally, DASK: _run_on_dask, RAY: _run_on_ray}
