r"""A trainer with a deep dip that heals, parked meanwhile: `python examples/park_and_resume.py`.

EVALSTOP_URL and EVALSTOP_KEY say where the service is. Half-way the learning rate is raised, as by a warm restart: the
eval falls for long, and comes back better than before. A policy that stops early would have ended it for good; under
`reversible` it is parked. Alone it is not parked: run it under a receiver that can end it and start it again, whose
address is registered as docs/park.md says:

    evalstop-receiver process --listen 127.0.0.1:9000 --restartable --job-key-env TRAINER_KEY -- \
      python examples/park_and_resume.py
"""

import json
import os
import random
import time
from pathlib import Path

import evalstop

WEIGHTS, POINTS, STEPS, EVAL_EVERY = 20, 60, 1_500, 10
RESTART = range(500, 730)  # steps at the raised learning rate
PAUSE = float(os.environ.get("EXAMPLE_PAUSE", "0.1"))  # seconds an eval, as if it took some
random.seed(1)
truth = [random.gauss(0, 1) for _ in range(WEIGHTS)]


def draw(count: int) -> list[tuple[list[float], float]]:
    points = [[random.gauss(0, 1) for _ in range(WEIGHTS)] for _ in range(count)]
    return [(x, sum(a * b for a, b in zip(truth, x, strict=True))) for x in points]


def errors(weights: list[float], data: list[tuple[list[float], float]]) -> list[float]:
    return [sum(a * b for a, b in zip(weights, x, strict=True)) - y for x, y in data]


def mean_square(values: list[float]) -> float:
    return sum(value * value for value in values) / len(values)


training, held_out = draw(POINTS), draw(100)
folder = Path("checkpoints/park-and-resume")
folder.mkdir(parents=True, exist_ok=True)

# Started again it goes on where its last checkpoint was.
saved = sorted(folder.glob("*.json"))
first_step = int(saved[-1].stem) if saved else 0
weights = json.loads(saved[-1].read_text()) if saved else [0.0] * WEIGHTS

with evalstop.init(
    os.environ.get("EVALSTOP_RUN_NAME", "park-and-resume"),
    metrics={"held_out_loss": {"role": "eval", "direction": "minimize"}},
    policy="reversible",
    mode="enforce",
    total_steps=STEPS,
    resume="allow" if saved else None,
) as run:
    if saved:
        run.resume(step=first_step)
        print(f"resumed at step {first_step}", flush=True)
    for step in range(first_step + 1, STEPS + 1):
        wrong = errors(weights, training)
        heat = 0.05 if step in RESTART else 0.0  # what too large steps do to the weights
        for i in range(WEIGHTS):
            gradient = sum(e * x[i] for e, (x, _) in zip(wrong, training, strict=True)) / POINTS
            weights[i] += random.gauss(0, heat) - 0.004 * gradient
        if step % EVAL_EVERY == 0:
            checkpoint = folder / f"{step:06d}.json"
            unfinished = checkpoint.with_suffix(".part")  # it may be ended at any time, while it writes, too
            unfinished.write_text(json.dumps(weights))
            unfinished.replace(checkpoint)
            run.log({"held_out_loss": mean_square(errors(weights, held_out))}, step=step)
            run.checkpoint(checkpoint.absolute().as_uri(), step=step)
            time.sleep(PAUSE)

print(f"completed, held-out loss {mean_square(errors(weights, held_out)):.3f}", flush=True)
