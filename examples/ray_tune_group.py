"""Ray Tune, with trials that are compared: `python examples/ray_tune_group.py`.

EVALSTOP_URL and EVALSTOP_KEY say where the service is. Each trial is a run of one group, whose rule is `median`: one
that lags behind the median of the others, at the same step, is ended.
"""

import time
from pathlib import Path

import evalstop
from ray import init, tune

STEPS = 40


def train(config: dict[str, float]) -> None:
    trial = tune.get_context().get_trial_id()
    with evalstop.init(
        f"ray-group-{trial}",
        eval="score",
        group="ray-search",
        population={"kind": "median", "mode": "enforce"},
        config=config,
        mode="enforce",
        total_steps=STEPS,
        resume="allow",  # Tune may restore the trial
    ) as run:
        for step in range(1, STEPS + 1):
            score = 1 - (1 - config["rate"]) ** step  # stands for a training step and an evaluation
            run.log({"score": score}, step=step)
            run.checkpoint(f"file:///checkpoints/{trial}/{step}", step=step)
            tune.report({"score": score})
            time.sleep(0.25)
            if run.should_stop:
                break


init(num_cpus=1, object_store_memory=100_000_000, include_dashboard=False, log_to_driver=False)
tuner = tune.Tuner(
    train,
    tune_config=tune.TuneConfig(reuse_actors=True),  # the next trial need not import everything again
    param_space={"rate": tune.grid_search([0.1, 0.09, 0.08, 0.001])},
    run_config=tune.RunConfig(storage_path=str(Path("checkpoints").absolute()), verbose=0),
)
for result in tuner.fit():
    print(f"rate {result.config['rate']}: ended at step {result.metrics['training_iteration']} of {STEPS}")
