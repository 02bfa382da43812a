"""Optuna, with trials that are compared: `python examples/optuna_search.py`.

EVALSTOP_URL and EVALSTOP_KEY say where the service is. Each trial is a run of one group, whose rule is `median`: one
that lags behind the median of the earlier trials, at the same step, is pruned.
"""

import time

import evalstop
import optuna

STEPS, PAUSE = 40, 0.25
RATES = [0.1, 0.09, 0.08, 0.001]


def objective(trial: optuna.Trial) -> float:
    rate = trial.suggest_float("rate", 1e-4, 1.0, log=True)
    with evalstop.init(
        f"optuna-{trial.number}",
        eval="score",
        group="optuna-search",
        population={"kind": "median", "mode": "enforce"},
        config=trial.params,
        mode="enforce",
        total_steps=STEPS,
    ) as run:
        for step in range(1, STEPS + 1):
            score = 1 - (1 - rate) ** step  # stands for a training step and an evaluation
            run.log({"score": score}, step=step)
            run.checkpoint(f"file:///checkpoints/{trial.number}/{step}", step=step)
            time.sleep(PAUSE)
            if run.should_stop:
                break
    print(f"rate {rate}: ended at step {step} of {STEPS}", flush=True)
    if step < STEPS:
        raise optuna.TrialPruned  # outside the block, which would report it as a failure
    return score


optuna.logging.set_verbosity(optuna.logging.WARNING)
study = optuna.create_study(direction="maximize", pruner=optuna.pruners.NopPruner())  # the group's rule prunes
for rate in RATES:
    study.enqueue_trial({"rate": rate})
study.optimize(objective, n_trials=len(RATES))
print("best", study.best_params)
