"""Applies a function to many items on all cores, with a progress bar."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import joblib
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from evalstop_lab.arguments import positive_number

Item = TypeVar("Item")
Result = TypeVar("Result")

CHUNK = 25


def add_jobs_option(parser: argparse.ArgumentParser) -> None:
    text = "processes (default: one per core)"
    parser.add_argument("--jobs", type=positive_number, default=joblib.cpu_count(), help=text)


def sweep(
    work: Callable[[Item], Result], items: Sequence[Item], title: str, jobs: int = 1, chunk: int = CHUNK
) -> list[Result]:
    """Apply `work` to each item in `jobs` processes, `chunk` items at a time; returns the results in order."""
    chunks = [items[start : start + chunk] for start in range(0, len(items), chunk)]
    work_on = partial(_apply_to_each, work)
    in_turn: Iterable[list[Result]] = map(work_on, chunks)
    if jobs > 1:
        in_turn = joblib.Parallel(n_jobs=jobs, return_as="generator")(joblib.delayed(work_on)(part) for part in chunks)
    results: list[Result] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=len(items))
        for of_chunk in in_turn:
            results.extend(of_chunk)
            progress.advance(task, len(of_chunk))
    return results


def _apply_to_each(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    return [work(item) for item in items]
