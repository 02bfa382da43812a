"""`make bench-stop`: the time from the eval that stops or parks a trainer to SIGTERM at the trainer.

Service, worker and `evalstop-receiver process` are real processes, without a grace period. The trainer measures the
time on its own clock.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import httpx
from evalstop_client import Run
from rich.console import Console
from rich.progress import Progress

from evalstop_lab.arguments import positive_number
from evalstop_lab.benchmarks.processes import (
    add_database_option,
    describe_machine,
    format_machine,
    parse_with_database,
    temporary_database,
)
from evalstop_lab.errors import ServiceUnavailable
from evalstop_lab.report import new_table
from evalstop_lab.service_process import START_SECONDS, Service, run_trainer, running_service

TARGET_MS = 250.0
TRAINER = "trainer"
"""The argument of the process that is stopped."""

RISING, FALLING = (1.0, 2.0, 3.0), (2.0, 1.0, 0.0)
PATIENCE_SECONDS = 30.0
VERSIONS = ("evalstop-service", "evalstop-client", "httpx2", "sqlalchemy", "psycopg")

PARKS = {
    "name": "parks",
    "action": "park",
    "members": [{"detector": "k_decline", "params": {"k": 3}, "suspect_at": 1, "stop_at": 3}],
    "stops_despite": ["no_checkpoint"],
}
POLICIES = {"stop": "paper", "park": "parks"}
"""The policy of the trainers, by the action that it requests."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-stop", description=__doc__)
    add_database_option(parser)
    parser.add_argument("--stops", type=positive_number, default=20, help="number of trainers per database and action")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parse_with_database(parser)
    console = Console(stderr=options.json)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="evalstop-bench-")))
        url = stack.enter_context(temporary_database(options.database_url, "stop"))
        services = {
            "SQLite": stack.enter_context(running_service(folder / "sqlite")),
            "PostgreSQL": stack.enter_context(running_service(folder / "postgres", {"EVALSTOP_DATABASE_URL": url})),
        }
        for service in services.values():
            with service.connect() as api:
                no_limits = {"stops_per_hour": None, "stops_share": None}
                api.patch("/project", json=no_limits).raise_for_status()
                api.post("/policies", json=PARKS).raise_for_status()
        times_ms: dict[tuple[str, str], list[float]] = {(name, action): [] for name in services for action in POLICIES}
        with Progress(console=console, transient=True) as progress:
            for _ in progress.track(range(options.stops), description="stopping trainers"):
                for name, action in times_ms:
                    times_ms[name, action].append(_time_stop(services[name], action, folder))
    figures = [
        {"median_ms": statistics.median(times), "p90_ms": sorted(times)[int(0.9 * len(times))]}
        for times in times_ms.values()
    ]
    machine = describe_machine(*VERSIONS)
    if options.json:
        keys = ({"database": name, "action": action} for name, action in times_ms)
        report = [key | row for key, row in zip(keys, figures, strict=True)]
        sys.stdout.write(json.dumps({"from_eval_to_sigterm": report, "machine": machine}) + "\n")
        return 0
    title = "milliseconds from posting an eval to SIGTERM at the trainer"
    table = new_table(title, "database", "action", "median", "90th percentile", "target", "")
    for cell, row in zip(times_ms, figures, strict=True):
        met = "met" if row["median_ms"] < TARGET_MS else "missed"
        table.add_row(*cell, f"{row['median_ms']:.0f}", f"{row['p90_ms']:.0f}", f"< {TARGET_MS:.0f}", met)
    console.print(table)
    console.print(format_machine(machine), highlight=False)
    return 0


def _time_stop(service: Service, action: str, folder: Path) -> float:
    """Start a trainer and wait for its end; returns the milliseconds from the eval to SIGTERM."""
    trainer = ["-m", "evalstop_lab.benchmarks.stop", TRAINER]
    environment = {"EVALSTOP_SPOOL": str(folder / "spool"), "EVALSTOP_RUN_NAME": f"ended-{time.time_ns()}"}
    environment |= {"EVALSTOP_POLICY": POLICIES[action]}
    with service.connect() as api, run_trainer(service, folder, trainer, action, ["--restartable"], environment) as job:
        assert job.stdout is not None
        line = job.stdout.readline()
        if not line:
            log = (folder / "receiver.log").read_text()
            raise ServiceUnavailable(f"The trainer was not stopped; its log ends with: {log[-500:]}")
        milliseconds: float = json.loads(line)["milliseconds"]
        if action == "stop":  # the receiver of a parked job waits until the job is resumed
            job.wait(START_SECONDS)
        for endpoint in api.get("/endpoints").raise_for_status().json()["items"]:
            api.delete(f"/endpoints/{endpoint['id']}").raise_for_status()
        return milliseconds


def train() -> int:
    """Post falling evals; print the `milliseconds` from just before the last one to SIGTERM as JSON."""
    posted_at: list[float] = []

    def end(_number: int, _frame: FrameType | None) -> None:
        sys.stdout.write(json.dumps({"milliseconds": (time.perf_counter() - posted_at[-1]) * 1000}) + "\n")
        sys.stdout.flush()
        os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    run = Run(policy=os.environ["EVALSTOP_POLICY"], mode="enforce")  # its labels identify the job for the receiver
    run.log({"eval": RISING[0]}, step=0)
    run.flush(PATIENCE_SECONDS)
    headers = {"Authorization": f"Bearer {os.environ['EVALSTOP_KEY']}"}
    with httpx.Client(base_url=f"{os.environ['EVALSTOP_URL']}/api/v1", headers=headers, trust_env=False) as api:
        for step, value in enumerate((*RISING[1:], *FALLING), 1):
            observation = {"metric": "eval", "step": step, "value": value}
            posted_at.append(time.perf_counter())
            api.post(f"/runs/{run.id}/observations", json={"observations": [observation]}).raise_for_status()
        time.sleep(PATIENCE_SECONDS)
    return 1


if __name__ == "__main__":
    sys.exit(train() if sys.argv[1:] == [TRAINER] else main())
