"""Messages that wait for their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from uuid import UUID

from opentelemetry.trace import SpanContext

from evalstop_service.ingest.messages import Answer, Message, Receipt


class Entry:
    """A message that waits for its answer."""

    __slots__ = ("future", "is_answered", "message", "size", "span_context")

    def __init__(self, message: Message, future: asyncio.Future[Receipt], size: int, context: SpanContext) -> None:
        self.message, self.future, self.size, self.span_context = message, future, size, context
        self.is_answered = False

    def answer(self, answer: Answer | Exception) -> None:
        """Answer the message; only the first answer counts."""
        if self.is_answered:
            return
        self.is_answered = True
        if self.future.done():  # the client disconnected
            return
        if isinstance(answer, Exception):
            self.future.set_exception(answer)
        else:
            self.future.set_result(answer)


Group = dict[UUID, list[Entry]]
"""Messages by run, in order of arrival."""


def take_group(waiting: Group, run_ids: Iterable[UUID], requests: int, observations: int) -> Group:
    """Take from the waiting messages of these runs as many as one commit may hold, at least one."""
    group: Group = {}
    for run_id in run_ids:
        entries = waiting[run_id]
        for count, entry in enumerate(entries):
            requests, observations = requests - 1, observations - entry.size
            if group and (requests < 0 or observations < 0):
                if count:
                    waiting[run_id] = entries[count:]
                return group
            group.setdefault(run_id, []).append(entry)
        del waiting[run_id]
    return group
