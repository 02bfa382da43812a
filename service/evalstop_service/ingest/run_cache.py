"""The run cache: the states of recently saved runs, so that their next messages need no reads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from uuid import UUID

from evalstop_service.ingest.run_state import RunState


class RunCache:
    """The `most` most recently used run states. Only states that were saved or loaded are put here."""

    def __init__(self, most: int = 10_000) -> None:
        self._most = most
        self._states: OrderedDict[UUID, RunState] = OrderedDict()

    def find_state(self, run_id: UUID) -> RunState | None:
        """The cached state of a run; its row may be newer."""
        return self._states.get(run_id)

    def put_states(self, states: Iterable[RunState]) -> None:
        """Cache these states; the least recently used ones are evicted."""
        for state in states:
            self._states[state.run.id] = state
            self._states.move_to_end(state.run.id)
        while len(self._states) > self._most:
            self._states.popitem(last=False)

    def drop_states(self, run_ids: Iterable[UUID]) -> None:
        """Evict these runs."""
        for run_id in run_ids:
            self._states.pop(run_id, None)

    def __len__(self) -> int:
        return len(self._states)
