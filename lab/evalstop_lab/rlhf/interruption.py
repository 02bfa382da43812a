"""Being told to end: SIGTERM and SIGINT become a question that the training loop can ask before every step."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """While entered, remembers the first of `SIGNALS` to arrive instead of dying of it; for the main thread only."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __call__(self) -> bool:
        """Say whether one has arrived."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """Return what a shell expects of a process that ended by the signal: 128 + its number, or 0."""
        return 128 + self.signal if self.signal is not None else 0

    def __enter__(self) -> Interruption:
        self._before = {number: signal.signal(number, self._remember) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)
