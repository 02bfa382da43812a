"""Applies a function to many items on all cores, with a progress bar."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import joblib
from rich.console import Console
from rich.progress import track

from evalstop_lab.arguments import positive_number

Item = TypeVar("Item")
Result = TypeVar("Result")


def add_jobs_option(parser: argparse.ArgumentParser) -> None:
    text = "processes (default: one per core)"
    parser.add_argument("--jobs", type=positive_number, default=joblib.cpu_count(), help=text)


def sweep(work: Callable[[Item], Result], items: Sequence[Item], title: str, jobs: int = 1) -> list[Result]:
    """Apply `work` to each item in `jobs` processes; returns the results in order."""
    in_turn: Iterable[Result] = map(work, items)
    if jobs > 1:
        in_turn = joblib.Parallel(n_jobs=jobs, return_as="generator")(joblib.delayed(work)(item) for item in items)
    return list(track(in_turn, title, total=len(items), console=Console(stderr=True), transient=True))
