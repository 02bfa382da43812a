"""A plain PyTorch loop, in one process or many: rank 0 reports, and all ranks stop at the same step.

    with DistributedRun(name="sft-7b") as run:
        for step, batch in enumerate(loader):
            ...
            run.log({"loss": loss}, step=step)
            if run.should_stop_at(step):
                break

Under DDP and FSDP every rank executes the same lines. Ranks other than 0 log nothing. If each rank read the service's
answer itself, they would see it at different steps, and those that continue would wait for the others forever: so rank
0 reads it and broadcasts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

import torch.distributed as dist

from evalstop_client.callbacks.arguments import CallbackArguments, end_earlier_run, filled, keep_numbers, latest_runs
from evalstop_client.latest_answer import Exploit
from evalstop_client.run import Run

AGREE_EVERY_STEPS = 10


def agreed(value: Any) -> Any:
    """Rank 0's value, on all ranks; every rank must call it equally often."""
    if not _is_distributed() or dist.get_world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


class DistributedRun(Run):
    """A run that rank 0 reports; on other ranks its methods do nothing, and its properties are empty.

    Takes the keyword arguments of `Run`. The ranks agree on stopping only once in `agree_every_steps` steps, since that
    takes a broadcast; a single process checks at each step. Create it after the process group.
    """

    def __init__(self, *, agree_every_steps: int = AGREE_EVERY_STEPS, **arguments: Unpack[CallbackArguments]) -> None:
        self._agree_every_steps = max(1, agree_every_steps) if _is_distributed() else 1
        self._stops = False
        self._last_period: int | None = None
        chosen = filled(arguments)
        end_earlier_run(chosen)
        super().__init__(**chosen)
        latest_runs[chosen["name"]] = self

    def _reports_here(self) -> bool:
        return not _is_distributed() or dist.get_rank() == 0

    def log(self, values: Mapping[str, Any], *, step: int, stderr: Mapping[str, Any] | None = None) -> None:
        """Report the numbers among `values` at `step`; waits for tensors on a GPU."""
        if self._reports_here():
            super().log(keep_numbers(values), step=step, stderr=stderr)

    def should_stop_at(self, step: int) -> bool:
        """Whether to stop after `step`: the same on every rank; each rank must call this at the same steps."""
        period = step // self._agree_every_steps  # a loop need not ask at multiples of it
        if not self._stops and period != self._last_period:
            self._last_period = period
            self._stops = agreed(self.should_stop)
        return self._stops

    def agree_on_exploit(self) -> Exploit | None:
        """The copy of another run to load, on every rank; each rank must call this at the same steps.

        Call `confirm` on every rank once all have loaded the checkpoint: that of rank 0 reports it.
        """
        exploit = self.exploit
        # The run cannot be sent to other ranks: `str` stands for what confirms there, and does nothing.
        told = agreed(None if exploit is None else replace(exploit, _confirm=str))
        return exploit or told


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
