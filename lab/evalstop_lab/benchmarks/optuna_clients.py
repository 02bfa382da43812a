"""Optuna's clients: processes that each report a value of a trial of their own and ask whether to prune it.

Run by the Python that has Optuna, so that it imports nothing of ours. One job a line in, one line of JSON out.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from typing import Any


def client(url: str, study_name: str, orders: Connection) -> None:
    """Report and ask for as many seconds as each order says; answers with the time that each took."""
    optuna: Any = importlib.import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.load_study(study_name=study_name, storage=url)
    orders.send(None)
    while True:
        seconds = orders.recv()
        trial = study.ask()
        orders.send(trial._trial_id)
        deadline = orders.recv() + seconds
        took = []
        step = 0
        while (begun := time.monotonic()) < deadline:
            trial.report(1 - math.exp(-step / 100), step)
            trial.should_prune()
            took.append(time.monotonic() - begun)
            step += 1
        orders.send(took)


def quiet_client(url: str, study_name: str, orders: Connection) -> None:
    """The same, ending without a word when whoever gives the orders is gone."""
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        client(url, study_name, orders)


def main() -> int:
    """Start the clients, then do one job after another; the arguments are the database and the number of clients."""
    url, count = sys.argv[1], int(sys.argv[2])
    optuna: Any = importlib.import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(storage=url, study_name="bench", direction="maximize")
    ours: list[Connection] = []
    context = multiprocessing.get_context("spawn")
    for _ in range(count):
        mine, theirs = context.Pipe()
        context.Process(target=quiet_client, args=(url, study.study_name, theirs), daemon=True).start()
        ours.append(mine)
    for pipe in ours:
        pipe.recv()
    for line in sys.stdin:
        for pipe in ours:
            pipe.send(json.loads(line)["seconds"])
        trials = [pipe.recv() for pipe in ours]
        begun = time.monotonic()
        for pipe in ours:
            pipe.send(begun)
        took = sorted(item for pipe in ours for item in pipe.recv())
        seconds = time.monotonic() - begun
        answer = {
            "observations": len(took),
            "requests": len(took),
            "refused": 0,
            "seconds": seconds,
            "p50_ms": took[len(took) // 2] * 1000,
            "p99_ms": took[math.ceil(0.99 * len(took)) - 1] * 1000,
            "generator_cpu": 0.0,
            "trials": trials,
        }
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
