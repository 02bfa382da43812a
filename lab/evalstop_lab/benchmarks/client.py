"""`make bench-client`: the time that importing the client and calling `log()` take, compared with MLflow's client.

MLflow's client logs to the same service, which implements MLflow's API.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evalstop_client import Limits, Run
from rich.console import Console
from rich.table import Table

from evalstop_lab.arguments import positive_number
from evalstop_lab.benchmarks.processes import describe_machine, format_machine
from evalstop_lab.service_process import Service, running_service

MODULES = ("evalstop_client", "httpx", "mlflow")
METRICS = {"eval": 0.5, "proxy": 0.25, "kl": 0.125, "loss": 2.0}
TIMED_IMPORT = """
import sys, time
started = time.perf_counter()
import {module}
sys.stdout.write(str(time.perf_counter() - started))
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-client", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=positive_number, default=10, help="number of times that each import is timed")
    parser.add_argument("--calls", type=positive_number, default=5_000, help="number of calls of each function")
    parser.add_argument("--pause-ms", type=float, default=1.0, help="pause between two calls, like a trainer's steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    report = {
        "machine": describe_machine("evalstop-client", "httpx"),
        "import_seconds": _time_imports(options.rounds),
        "log_seconds": _time_logs(options.calls, options.pause_ms / 1000),
    }
    if options.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        _print_tables(report)
    return 0


def _time_imports(rounds: int) -> dict[str, dict[str, float]]:
    modules = [module for module in MODULES if importlib.util.find_spec(module) is not None]
    seconds: dict[str, list[float]] = {module: [] for module in modules}
    for _ in range(rounds):
        for module in modules:
            completed = subprocess.run(
                [sys.executable, "-c", TIMED_IMPORT.format(module=module)], capture_output=True, text=True, check=True
            )
            seconds[module].append(float(completed.stdout))
    return {module: _summarize(times) for module, times in seconds.items()}


def _time_logs(calls: int, pause_seconds: float) -> dict[str, dict[str, float]]:
    times: dict[str, dict[str, float]] = {}
    logged: list[tuple[dict[str, float], int]] = []
    times["append to a list"] = _time_calls(lambda step: logged.append((METRICS, step)), calls, pause_seconds)
    with tempfile.TemporaryDirectory(prefix="evalstop-bench-") as name:
        folder = Path(name)
        with running_service(folder / "service") as service:
            options: dict[str, Any] = {"url": service.url, "key": service.key, "limits": Limits(flush_seconds=60)}
            with Run(name="bench-client", spool_folder=folder, **options) as run:
                times["evalstop: run.log()"] = _time_calls(
                    lambda step: run.log(METRICS, step=step), calls, pause_seconds
                )
            if importlib.util.find_spec("mlflow") is not None:
                times["mlflow: log_metrics(synchronous=False)"] = _time_mlflow(service, calls, pause_seconds)
        with Run(name="bench-unavailable", url=service.url, spool_folder=folder, flush_seconds=0.1) as run:
            times["evalstop, service unavailable"] = _time_calls(
                lambda step: run.log(METRICS, step=step), calls, pause_seconds
            )
    return times


def _time_mlflow(service: Service, calls: int, pause_seconds: float) -> dict[str, float]:
    import mlflow

    os.environ["MLFLOW_TRACKING_TOKEN"] = service.key
    mlflow.set_tracking_uri(f"{service.url}/mlflow")
    with mlflow.start_run():
        summary = _time_calls(
            lambda step: mlflow.log_metrics(METRICS, step=step, synchronous=False), calls, pause_seconds
        )
        mlflow.flush_async_logging()
    return summary


def _time_calls(call: Callable[[int], object], calls: int, pause_seconds: float) -> dict[str, float]:
    seconds = []
    for step in range(calls):
        started = time.perf_counter()
        call(step)
        seconds.append(time.perf_counter() - started)
        time.sleep(pause_seconds)
    return _summarize(seconds)


def _summarize(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
        "least": ordered[0],
    }


def _print_tables(report: dict[str, Any]) -> None:
    console = Console()
    for title, unit, scale, rows in (
        ("import in a new process", "ms", 1e3, report["import_seconds"]),
        (f"one call with {len(METRICS)} metrics", "us", 1e6, report["log_seconds"]),
    ):
        table = Table("", f"median {unit}", f"p99 {unit}", f"least {unit}", title=title, title_justify="left")
        for name, row in rows.items():
            table.add_row(name, *(f"{row[column] * scale:.1f}" for column in ("median", "p99", "least")))
        console.print(table)
    console.print(format_machine(report["machine"]), highlight=False)


if __name__ == "__main__":
    sys.exit(main())
