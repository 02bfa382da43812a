"""What the benchmark of ingestion makes of its loads: medians, percentiles, targets, a report."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from evalstop_lab.benchmarks.generator import percentile
from evalstop_lab.benchmarks.ingest import finite
from evalstop_lab.benchmarks.ingest_charts import draw
from evalstop_lab.benchmarks.ingest_contenders import (
    ALONE,
    COPY,
    EMBEDDED,
    EVALSTOP,
    MLFLOW,
    MLFLOW_EMBEDDED,
    OFF,
    OPTUNA,
    SLOW,
    SLOW_ALONE,
)
from evalstop_lab.benchmarks.ingest_tables import print_tables
from evalstop_lab.benchmarks.rounds import ASKING, GRID, LARGEST_COPY, Cell, Shape, document
from evalstop_lab.benchmarks.targets import Cells, Target, flat, of_growth, of_ingestion
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_a_value_that_was_measured(values: list[float], share: float) -> None:
    """So large a share of the values does not exceed it, and no smaller value would do."""
    found = percentile(sorted(values), share)
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < share * len(values) or found == min(values)


def test_no_latency_has_no_percentile() -> None:
    """Of nothing, nothing is said."""
    assert math.isnan(percentile([], 0.5))
    assert finite({"p50": math.nan, "of": (1.0, math.inf)}) == {"p50": None, "of": [1.0, None]}


def cells(**rates: dict[Shape, float]) -> Cells:
    names = {
        "ours": EVALSTOP, "off": OFF, "alone": ALONE, "slow": SLOW, "slow_alone": SLOW_ALONE, "embedded": EMBEDDED,
        "mlflow": MLFLOW, "mlflow_embedded": MLFLOW_EMBEDDED, "optuna": OPTUNA, "copy": COPY,
    }  # fmt: skip
    return {
        (names[name], shape): Cell(names[name], shape, rate, rate, rate, 1000 / rate, 2000 / rate, 0, 0.1, (rate,))
        for name, by_shape in rates.items()
        for shape, rate in by_shape.items()
    }


def test_targets_are_ratios_of_the_cells() -> None:
    """Each target is computed from the two cells it compares, and is met or missed by its limit."""
    both = Shape(100, 8)
    found = of_ingestion(cells(ours={both: 1500.0, ASKING: 390.0}, mlflow={both: 100.0}, optuna={ASKING: 10.0}))
    by_name = {item.name: item for item in found}
    rate, p50 = by_name["100 a request, 8 clients, to MLflow"], by_name["the same, p50"]
    assert (rate.measured, rate.met) == (15.0, True)
    assert p50.measured == pytest.approx(1 / 15)
    assert p50.met is False
    assert by_name["report and ask, 8 clients, to Optuna"].met is False
    assert by_name["1 a request, 8 clients, to MLflow"].met is None


def test_the_worst_load_decides_whether_commits_in_groups_cost() -> None:
    """Against a transaction a request the smallest ratio of all loads counts, and the load is named."""
    ours = dict.fromkeys(GRID, 100.0) | {Shape(10, 1): 70.0}
    found = of_ingestion(cells(ours=ours, alone=dict.fromkeys(GRID, 100.0)))
    worst = next(item for item in found if item.name == "any load, to a transaction a request")
    assert (worst.measured, worst.met) == (0.7, False)
    assert "10 x 1" in worst.where


def test_the_limit_is_the_best_that_copy_reached() -> None:
    """COPY is compared with at whatever batch it was fastest."""
    found = of_ingestion(cells(ours={Shape(100, 64): 50.0}, copy={Shape(100, 8): 60.0, LARGEST_COPY: 200.0}))
    copied = next(item for item in found if "bare COPY" in item.name)
    assert (copied.measured, copied.met) == (0.25, False)
    assert "10000 rows" in copied.where


def test_flat_is_judged_from_end_to_end() -> None:
    """A cost is flat when the largest size costs hardly more than the smallest; a single size says nothing."""
    assert flat("x", [2.0, 9.0, 2.9]).met is True
    assert flat("x", [2.0, 3.1]).met is False
    assert flat("x", [2.0]).met is None
    series = of_growth({"reading": {"series of 10 points": {"p50_ms": 120.0, "worst_ms": 130.0}}})[-1]
    assert (series.measured, series.met) == (120.0, False)


def test_a_target_at_its_limit_is_met() -> None:
    """`>=` and `<=` take the limit in."""
    assert Target("x", 1.0, ">=", 1.0).met is True
    assert Target("x", 1.0, "<=", 1.0).met is True
    assert Target("x", 1.1, "<=", 1.0).met is False


def test_a_report_is_printed_and_drawn(tmp_path: Path) -> None:
    """Tables and plots come out of a report with all its sections, and out of one with none."""
    machine = {
        "cores": 2, "kernel": "6", "python": "3", "versions": {}, "postgresql": "15", "sync_ms": 0.3,
        "load_average_before": 0.0, "load_average_after": 0.0,
    }  # fmt: skip
    took = {"first_ms": 3.0, "p50_ms": 1.0, "worst_ms": 2.0}
    measured = cells(ours={Shape(1, 8): 9.0, ASKING: 9.0}, copy={LARGEST_COPY: 1e6})
    full = {
        "command": "make bench-ingest", "begun": "now", "setting": {"rounds": 1, "seconds": 1.0}, "machine": machine,
        "notes": ["no C compiler"], "failures": ["MLflow gave up"], "minutes": 1.0,
        "cells": [document(item) for item in measured.values()],
        "live_runs": [
            {"live_runs": n, "remembers_all": n < 100, "microseconds_first": 2.0, "p99_ms": 1.0}
            | {"microseconds": 1.0, "bytes_a_run": 9.0}
            for n in (10, 100)
        ],
        "points": [{"points": n, "first_ms": 1.0, "microseconds": 1.0} for n in (10, 100)],
        "recovery": {"to_first_accepted_ms": 1.0, "cold_verdict_ms": 1.0, "cold_verdict_rebuilt_ms": 1.0},
        "reading": {"series": took, "list": None},
        "targets": [vars(Target("a", 1.0, ">=", 2.0)) | {"met": False}],
    }  # fmt: skip
    console = Console(file=(tmp_path / "said").open("w"), width=200)
    print_tables(console, full)
    console.file.close()
    said = (tmp_path / "said").read_text()
    assert all(word in said for word in ("MISSED", "no such route", "no C compiler", "MLflow gave up", "1,000,000"))
    draw(tmp_path, full)
    assert {path.name for path in tmp_path.glob("*.*")} == {"ingest.png", "ingest.html", "growth.png", "growth.html"}
    draw(tmp_path / "none", {"cells": []})
