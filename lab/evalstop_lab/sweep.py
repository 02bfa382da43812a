"""Detectors over many runs on all cores, with a progress bar."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import joblib
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Item = TypeVar("Item")
Result = TypeVar("Result")

CHUNK = 25


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sweep(
    work: Callable[[Sequence[Item]], list[Result]],
    items: Sequence[Item],
    title: str,
    jobs: int = 1,
    chunk: int = CHUNK,
) -> list[Result]:
    """What `work` makes of the items, in their order; it is handed a `chunk` at a time, in `jobs` processes."""
    chunks = [items[start : start + chunk] for start in range(0, len(items), chunk)]
    results: list[Result] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=len(items))
        for found in _in_order(work, chunks, jobs):
            results.extend(found)
            progress.advance(task, len(found))
    return results


def _in_order(
    work: Callable[[Sequence[Item]], list[Result]], chunks: Sequence[Sequence[Item]], jobs: int
) -> Iterator[list[Result]]:
    if jobs == 1:
        yield from map(work, chunks)
    else:
        yield from joblib.Parallel(n_jobs=jobs, return_as="generator")(joblib.delayed(work)(chunk) for chunk in chunks)
