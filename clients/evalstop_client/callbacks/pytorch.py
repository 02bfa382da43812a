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

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self, Unpack

import torch.distributed as dist

from evalstop_client.callbacks.arguments import CallbackArguments, filled, keep_numbers, open_run
from evalstop_client.eval_request import EvalRequest
from evalstop_client.latest_answer import Exploit
from evalstop_client.run import Run

AGREE_EVERY_STEPS = 10


def rank() -> int:
    """The rank of this process, 0 if there is only one."""
    return dist.get_rank() if _is_distributed() else 0


def agreed(value: Any) -> Any:
    """Rank 0's value, on all ranks; every rank must call it equally often."""
    if not _is_distributed() or dist.get_world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


class DistributedRun:
    """A run that rank 0 reports, with the methods of `evalstop_client.Run`; on other ranks they do nothing.

    Takes the keyword arguments of `Run`. The ranks agree on stopping only once in `agree_every_steps` steps, since that
    takes a broadcast; a single process checks at each step. Create it after the process group.
    """

    def __init__(self, *, agree_every_steps: int = AGREE_EVERY_STEPS, **arguments: Unpack[CallbackArguments]) -> None:
        self._agree_every_steps = max(1, agree_every_steps) if _is_distributed() else 1
        self._stops = False
        self._last_period: int | None = None
        self.run: Run | None = open_run(filled(arguments)) if rank() == 0 else None

    def log(self, values: Mapping[str, Any], *, step: int, stderr: Mapping[str, Any] | None = None) -> None:
        """Report the numbers among `values` at `step`; waits for tensors on a GPU."""
        if self.run is not None:
            self.run.log(keep_numbers(values), step=step, stderr=stderr)

    def checkpoint(self, uri: str | os.PathLike[str], *, step: int) -> None:
        """Report that the checkpoint of `step` exists at `uri`: call it when the slowest rank has written its part."""
        if self.run is not None:
            self.run.checkpoint(uri, step=step)

    def resume(self, *, step: int) -> None:
        """Report that training resumes from the checkpoint of `step`."""
        if self.run is not None:
            self.run.resume(step=step)

    def eval_changed(self, *, step: int, why: str, version: str | None = None) -> None:
        """Report that the eval is measured differently from `step` on."""
        if self.run is not None:
            self.run.eval_changed(step=step, why=why, version=version)

    def eval_requests(self) -> Iterator[EvalRequest]:
        """The paired evaluations that the service requests; none on ranks other than 0."""
        if self.run is not None:
            yield from self.run.eval_requests()

    @property
    def best_checkpoint(self) -> Mapping[str, Any] | None:
        """The checkpoint to ship, as of the service's latest answer; None on ranks other than 0."""
        return self.run.best_checkpoint if self.run is not None else None

    def should_stop_at(self, step: int) -> bool:
        """Whether to stop after `step`: the same on every rank; each rank must call this at the same steps."""
        period = step // self._agree_every_steps  # a loop need not ask at multiples of it
        if not self._stops and period != self._last_period:
            self._last_period = period
            self._stops = agreed(self.run is not None and self.run.should_stop)
        return self._stops

    def agree_on_exploit(self) -> Exploit | None:
        """The copy of another run to load, on every rank; each rank must call this at the same steps.

        Call `confirm` on every rank once all have loaded the checkpoint: that of rank 0 reports it.
        """
        exploit = self.run.exploit if self.run is not None else None
        # The run cannot be sent to other ranks: `str` stands for what confirms there, and does nothing.
        told = agreed(None if exploit is None else replace(exploit, _confirm=str))
        return exploit or told

    def finish(self, status: Literal["completed", "failed"] = "completed") -> None:
        """Report how the run ended, and wait briefly for the service."""
        if self.run is not None:
            self.run.finish(status)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.run is not None:
            self.run.__exit__(kind, error, traceback)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
