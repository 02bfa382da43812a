"""transformers' Trainer, and with it TRL, Axolotl and LLaMA-Factory.

    trainer = Trainer(..., callbacks=[EvalStopCallback()])

It reports what the Trainer logs, registers what it saves, reports when it resumes from a checkpoint, and stops it when
the service requests that. Only rank 0 talks to the service; all ranks stop at the same step.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Unpack

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from evalstop_client.callbacks.arguments import CallbackArguments, filled, is_plan_meant, repeats_steps, to_uri
from evalstop_client.callbacks.pytorch import DistributedRun
from evalstop_client.eval_request import Evaluate, answer_requests

logger = logging.getLogger("evalstop_client")


class EvalStopCallback(TrainerCallback):
    """Reports a Trainer's run to EvalStop and ends it at a stop.

    Takes the keyword arguments of `evalstop_client.Run`. The run's name is EVALSTOP_RUN_NAME, else the training
    arguments' `run_name`, else the output folder. Unless `metrics` sets the roles, the service recognizes them by the
    metrics' names, and `metric_for_best_model` declares the eval. `evaluate` answers requests to evaluate now when a
    checkpoint is saved, on rank 0 while the others wait. Its arguments are a checkpoint's uri, a multiple of the usual
    number of prompts, and a seed.
    """

    def __init__(self, *, evaluate: Evaluate | None = None, **arguments: Unpack[CallbackArguments]) -> None:
        self._arguments = arguments if evaluate is None else {"evaluates": True, **arguments}
        self._evaluate = evaluate
        self._run: DistributedRun | None = None
        self._pins = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the run, and report a resume from a checkpoint."""
        name = getattr(args, "run_name", None) or args.output_dir
        resumes = state.global_step > 0
        best_by = _find_best_metric(args)
        schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
        is_constant = schedule.startswith("constant") or schedule == "reduce_lr_on_plateau"
        stops_early = "EarlyStoppingCallback" in (state.stateful_callbacks or {})
        is_meant = is_plan_meant(is_constant=is_constant, stops_early=stops_early)
        planned = state.max_steps or None if is_meant else None
        arguments = filled(self._arguments, name=name, total_steps=planned, resumes=resumes, best_by=best_by)
        self._run = DistributedRun(**arguments)
        self._pins = bool(args.save_total_limit) and args.metric_for_best_model is None
        if args.save_total_limit and not self._pins:
            logger.warning(
                "evalstop: save_total_limit=%d with metric_for_best_model keeps the Trainer's own best checkpoint, and "
                "may delete the one that EvalStop calls the best",
                args.save_total_limit,
            )
        if repeats_steps(state.global_step):
            self._run.resume(step=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Report logged values, including evals."""
        if self._pins and logs and "train_runtime" in logs:
            # The last log of a training. With save_total_limit=1 the Trainer then deletes all checkpoints but the best
            # one, also the newest, from which a training is continued.
            state.best_model_checkpoint = None
        if self._run is not None and logs:
            self._run.log(logs, step=state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._run is not None:
            folder = Path(args.output_dir or "") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            self._run.checkpoint(to_uri(folder), step=state.global_step)
            if self._evaluate is not None:
                answer_requests(self._run.eval_requests(), self._evaluate, to_uri(folder), state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """End the training when the service asks for it, and pin the best checkpoint before others are deleted."""
        if self._pins:
            self._pin_best(args, state)
        if self._run is not None and self._run.should_stop_at(state.global_step):
            control.should_training_stop = True

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Pin the best checkpoint again: the service may have named another during the eval, and a save follows."""
        if self._pins:
            self._pin_best(args, state)

    def _pin_best(self, args: TrainingArguments, state: TrainerState) -> None:
        """Protect the best checkpoint from `save_total_limit`, which keeps the one that the state names; that field is
        unused unless the Trainer tracks a best model itself."""
        best = self._run.best_checkpoint if self._run is not None else None
        if best is not None:
            folder = Path(args.output_dir or "") / f"{PREFIX_CHECKPOINT_DIR}-{best['step']}"
            if best["uri"] == to_uri(folder) and folder.is_dir():
                state.best_model_checkpoint = str(folder)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report that the run has ended; not called when training fails: the service then considers the run lost."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def _find_best_metric(args: TrainingArguments) -> tuple[str | None, str]:
    """The eval that chooses the Trainer's best model, and its direction."""
    metric = getattr(args, "metric_for_best_model", None)
    if not metric:
        return None, ""
    name = metric if metric.startswith("eval_") else f"eval_{metric}"
    return name, "maximize" if args.greater_is_better else "minimize"
