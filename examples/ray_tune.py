"""Ray Tune, watched: `python examples/ray_tune.py`.

Each trial is a run. The one whose score turns is ended, while the one that goes on rising has its time.
"""

import tempfile
import time
from pathlib import Path

from evalstop_client.callbacks.ray_tune import EvalStop
from ray import init, tune

STEPS = 100


def train(config: dict[str, float]) -> None:
    for step in range(1, STEPS + 1):
        score = step - config["fall"] * max(0, step - 20)  # stands for an evaluation
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "weights").write_text(str(step))
            tune.report({"score": score}, checkpoint=tune.Checkpoint.from_directory(folder))
        time.sleep(0.05)


watch = EvalStop(
    name="ray-tune", metrics={"score": {"role": "eval"}}, total_steps=STEPS, policy="paper", mode="enforce"
)
init(num_cpus=1, object_store_memory=100_000_000, include_dashboard=False, log_to_driver=False)
tuner = tune.Tuner(
    train,
    tune_config=tune.TuneConfig(reuse_actors=True),  # the second trial need not import everything again
    param_space={"fall": tune.grid_search([0.0, 3.0])},
    run_config=tune.RunConfig(
        stop=watch.stopper, callbacks=[watch], storage_path=str(Path("checkpoints").absolute()), verbose=0
    ),
)
for result in tuner.fit():
    print(f"fall {result.config['fall']}: ended at step {result.metrics['training_iteration']} of {STEPS}")
