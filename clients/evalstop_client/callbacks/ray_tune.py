"""Ray Tune: each trial is a run; a trial whose run has turned ends while the others continue.

    watch = EvalStop(name="search-1")
    Tuner(train, run_config=RunConfig(stop=watch.stopper, callbacks=[watch]))

Everything runs in the driver, where Tune delivers the trials' results.
"""

from __future__ import annotations

import threading
from typing import Any, Unpack

from ray.air.constants import TRAINING_ITERATION
from ray.tune import Callback, Stopper
from ray.tune.experiment import Trial
from ray.tune.result import AUTO_RESULT_KEYS

from evalstop_client.callbacks.arguments import CallbackArguments, filled, keep_numbers
from evalstop_client.observations import parse_step
from evalstop_client.run import Run


class EvalStop(Callback):
    """Reports the trials of a Tuner to EvalStop; its `stopper` ends those that must stop.

    Takes the keyword arguments of `evalstop_client.Run`. The run of a trial is called `<name>-<trial id>`, its step
    is the result's `step_key`. Uses two threads per trial: meant for hundreds of trials, not tens of thousands.
    """

    def __init__(self, *, step_key: str = "training_iteration", **arguments: Unpack[CallbackArguments]) -> None:
        self._arguments = arguments
        self._step_key = step_key
        self._runs: dict[str, Run] = {}
        self._iterations: dict[str, int] = {}  # the last reported one of each trial
        self._endings: list[threading.Thread] = []
        self.stopper = EvalStopStopper(self)

    def should_stop(self, trial_id: str) -> bool:
        """Whether the service wants this trial to end."""
        return trial_id in self._runs and self._runs[trial_id].should_stop

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        """Report a result; the first one opens the run."""
        run = self._run_of(trial.trial_id)
        step: Any = result.get(self._step_key)
        iteration, reported = result[TRAINING_ITERATION], self._iterations.get(trial.trial_id, 0)
        # Tune restores a trial together with the result of its checkpoint. Without one the trial starts anew.
        restored = (trial.last_result or {}).get(TRAINING_ITERATION, 0) != reported
        if (restored or iteration <= reported) and (whole_step := parse_step(step)) is not None:
            run.resume(step=max(0, whole_step - 1))
        self._iterations[trial.trial_id] = iteration
        reported_values = {name: value for name, value in result.items() if name not in AUTO_RESULT_KEYS}
        run.log(keep_numbers(reported_values), step=step)  # without a step it is dropped with a warning

    def on_checkpoint(self, iteration: int, trials: list[Trial], trial: Trial, checkpoint: Any, **info: Any) -> None:
        """Register a checkpoint, which belongs to the latest result."""
        uri = f"{getattr(checkpoint.filesystem, 'type_name', 'file')}://{checkpoint.path}".replace(
            "local://", "file://"
        )
        self._run_of(trial.trial_id).checkpoint(uri, step=(trial.last_result or {}).get(self._step_key, 0))

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Report that a trial has ended, by itself or through the stopper."""
        self._finish(trial.trial_id, "completed")

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._finish(trial.trial_id, "failed")

    def on_experiment_end(self, trials: list[Trial], **info: Any) -> None:
        """Wait until the ends of all trials are reported."""
        for ending in self._endings:
            ending.join()
        self._endings.clear()

    def _run_of(self, trial_id: str) -> Run:
        if trial_id not in self._runs:
            # A restored Tuner continues the earlier trials, identified by their ids.
            arguments = filled(self._arguments, name="tune", resumes=True)
            self._runs[trial_id] = Run(**(arguments | {"name": f"{arguments['name']}-{trial_id}"}))
        return self._runs[trial_id]

    def _finish(self, trial_id: str, status: Any) -> None:
        """Finish a trial's run in the background: Tune calls this between the results of all other trials."""
        self._iterations.pop(trial_id, None)
        run = self._runs.pop(trial_id, None)
        if run is not None:
            ending = threading.Thread(target=run.finish, args=(status,), name=f"finish {trial_id}")
            ending.start()
            self._endings.append(ending)

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles its callbacks: the runs are left out, and another process opens them again by name."""
        return self.__dict__ | {"_runs": {}, "_iterations": {}, "_endings": []}


class EvalStopStopper(Stopper):
    """Ends the trials that the service wants to end."""

    def __init__(self, watch: EvalStop) -> None:
        self._watch = watch

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether to end this trial."""
        return self._watch.should_stop(trial_id)

    def stop_all(self) -> bool:
        """Never: trials end one by one."""
        return False
