"""A training loop of one's own, watched: `python examples/plain_loop.py`.

EVALSTOP_URL and EVALSTOP_KEY say where the service is. The model has more weights than data and learns the noise by
heart: its training loss falls for ever, the loss on held-out data turns, and the run is stopped.
"""

import json
import os
import random
from pathlib import Path

import evalstop

WEIGHTS, POINTS, STEPS, EVAL_EVERY = 40, 25, 100_000, 50
random.seed(1)
truth = [random.gauss(0, 1) for _ in range(WEIGHTS)]


def draw(count: int, noise: float) -> list[tuple[list[float], float]]:
    points = [[random.gauss(0, 1) for _ in range(WEIGHTS)] for _ in range(count)]
    return [(x, sum(a * b for a, b in zip(truth, x, strict=True)) + random.gauss(0, noise)) for x in points]


def errors(weights: list[float], data: list[tuple[list[float], float]]) -> list[float]:
    return [sum(a * b for a, b in zip(weights, x, strict=True)) - y for x, y in data]


training, held_out = draw(POINTS, noise=4.0), draw(200, noise=0.0)
weights = [0.0] * WEIGHTS
folder = Path("checkpoints")
folder.mkdir(exist_ok=True)

# The role of each metric that is to be watched: `eval` is the score that people care about; here lower is better.
metrics = {"held_out_loss": {"role": "eval", "direction": "minimize"}, "loss": {"role": "loss"}}

with evalstop.init(
    os.environ.get("EVALSTOP_RUN_NAME", "plain-loop"), metrics=metrics, policy="paper", mode="enforce"
) as run:
    for step in range(STEPS):
        wrong = errors(weights, training)
        for i in range(WEIGHTS):
            weights[i] -= 0.002 * sum(e * x[i] for e, (x, _) in zip(wrong, training, strict=True)) / POINTS
        if step % EVAL_EVERY == 0:
            held_out_loss = sum(e * e for e in errors(weights, held_out)) / len(held_out)
            # This does not wait for the network. If each eval drew new points, its standard error would be worth
            # telling (stderr={"held_out_loss": ...}); on the same points all evals err alike.
            run.log({"held_out_loss": held_out_loss, "loss": sum(e * e for e in wrong) / POINTS}, step=step)
            checkpoint = folder / f"{step}.json"
            checkpoint.write_text(json.dumps(weights))
            run.checkpoint(checkpoint.absolute().as_uri(), step=step)  # a checkpoint exists once it is said to
        if run.should_stop:  # as of the service's latest answer, which came in the background
            break

print(f"ended at step {step} of {STEPS}")
if run.best_checkpoint:
    print("ship", run.best_checkpoint["uri"])
