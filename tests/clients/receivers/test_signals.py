"""Signals may arrive between any two steps of the main thread; no handler that uses the client may deadlock."""

from __future__ import annotations

import pytest
from evalstop_client.spool.run_log import WarningLog

from tests.clients.fake_service import KEY, FakeServer, FakeService
from tests.clients.programs import running_script

LOGS = """
import signal, time
from itertools import count
from evalstop_client import Run
extra_steps, running = count(), []

def log_extra(*_):
    if not running:  # a handler slower than the timer would nest without end
        running.append(True)
        run.log({"score": 0.0}, step=1_000_000 + next(extra_steps))
        running.clear()

signal.signal(signal.SIGALRM, log_extra)
for name in "abcdefghij":
    with Run(name=name, metrics={"score": {"role": "eval"}}) as run:
        signal.setitimer(signal.ITIMER_REAL, 50e-6, 50e-6)
        for step in range(300):  # the first call starts the threads
            run.log({"score": 1.0}, step=step)
        signal.setitimer(signal.ITIMER_REAL, 0)
        time.sleep(0.01)  # for the last signal
    assert run.dropped == 0
print(next(extra_steps))
"""


@pytest.mark.real
@pytest.mark.usefixtures("ended_runs")
def test_signal_handler_may_log_during_a_log_call(server: FakeServer, service: FakeService) -> None:
    """What a signal handler logs arrives, as does what the interrupted call was logging."""
    with running_script(LOGS, EVALSTOP_URL=server.url, EVALSTOP_KEY=KEY) as child:
        extra = int(child.communicate(timeout=60)[0])
    assert extra > 100
    assert sum(len(service.find_run(name).observations) for name in "abcdefghij") == 3_000 + extra


def test_signal_handler_may_lose_an_observation_during_a_warning() -> None:
    """A handler that interrupts a warning, where it looks the kind up, can warn and count by itself."""
    warnings = WarningLog()

    class InterruptedKind(str):
        def __hash__(self) -> int:
            warnings.count_dropped("queue-full", 1, "the disk cannot keep up")
            return super().__hash__()

    warnings.warn_once(InterruptedKind("away"), "the service is away")
    assert warnings.dropped > 0
