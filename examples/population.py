"""A population under `pbt`: `python examples/population.py`.

EVALSTOP_URL and EVALSTOP_KEY say where the service is. Five trainers learn the same task at learning rates from far too
small to about right. Those that lag continue from the checkpoint of a better one, at a learning rate near its own. Each
is a process of its own, as it would be a job of its own.
"""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import evalstop

WEIGHTS, POINTS, STEPS, EVAL_EVERY = 10, 30, 500, 10
RATES = [0.00001, 0.0001, 0.001, 0.003, 0.01]
PAUSE = float(os.environ.get("EXAMPLE_PAUSE", "0.5"))  # seconds an eval, as if it took some
RULE = {
    "kind": "pbt",
    "mode": "enforce",
    "ready_steps": 100,
    "hyperparameters": {"rate": {"factors": [0.8, 1.25], "high": 0.02}},
}
random.seed(1)  # the same task for all
truth = [random.gauss(0, 1) for _ in range(WEIGHTS)]
inputs = [[random.gauss(0, 1) for _ in range(WEIGHTS)] for _ in range(POINTS)]
data = [(x, sum(a * b for a, b in zip(truth, x, strict=True))) for x in inputs]


def errors(weights: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(weights, x, strict=True)) - y for x, y in data]


def train(name: str, config: dict[str, float]) -> None:
    folder = Path("checkpoints/population") / name
    folder.mkdir(parents=True, exist_ok=True)
    weights, step = [0.0] * WEIGHTS, 0
    metrics = {"held_out_loss": {"role": "eval", "direction": "minimize"}}
    with evalstop.init(
        name, metrics=metrics, group="population", population=RULE, config=config, mode="enforce", total_steps=STEPS
    ) as run:
        while step < STEPS and not run.should_stop:
            step += 1
            wrong = errors(weights)
            for i in range(WEIGHTS):
                weights[i] -= config["rate"] * sum(e * x[i] for e, (x, _) in zip(wrong, data, strict=True)) / POINTS
            if step % EVAL_EVERY == 0:
                run.log({"held_out_loss": sum(e * e for e in errors(weights)) / POINTS}, step=step)
                checkpoint = folder / f"{time.time_ns()}.json"  # after a copy, steps come again
                checkpoint.write_text(json.dumps(weights))
                run.checkpoint(checkpoint.absolute().as_uri(), step=step)
                time.sleep(PAUSE)
            if exploit := run.exploit:
                weights = json.loads(Path(exploit.source_checkpoint.removeprefix("file://")).read_text())
                config |= exploit.hyperparameters
                exploit.confirm()
                step = exploit.source_step
                print(f"{name}: continues {exploit.source_name} from step {step} at {config['rate']:.5f}", flush=True)
    loss = sum(e * e for e in errors(weights)) / POINTS
    print(f"{name}: ended at step {step} with a loss of {loss:.3f}", flush=True)


if len(sys.argv) == 1:
    members = [subprocess.Popen([sys.executable, __file__, str(rate)]) for rate in RATES]
    sys.exit(max(member.wait() for member in members))
train(f"population-{sys.argv[1]}", {"rate": float(sys.argv[1])})
