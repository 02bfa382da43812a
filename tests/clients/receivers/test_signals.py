"""Signals come in between any two steps of the main thread: no handler of ours, or that calls us, locks up with it."""

from __future__ import annotations

import pytest

from tests.clients.fake_service import KEY, FakeServer, FakeService
from tests.clients.programs import running_script

WAITS = """
import random, signal
from evalstop_client.receivers.stop.signals import ShutdownSignal
chance = random.Random(1)
for _ in range(300):
    ending = ShutdownSignal()
    signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGTERM))
    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 50e-6))
    assert ending.wait(20) and ending.wait(0) and ending.is_set
print("through")
"""

LOGS = """
import signal, time
from itertools import count
from evalstop_client import Run
asides, under_way = count(), []

def log_aside(*_):
    if not under_way:  # or handlers that are slower than the timer would pile up on the stack
        under_way.append(True)
        run.log({"gold": 0.0}, step=1_000_000 + next(asides))
        under_way.clear()

signal.signal(signal.SIGALRM, log_aside)
for name in "abcdefghij":
    with Run(name=name, metrics={"gold": {"role": "eval"}}) as run:
        signal.setitimer(signal.ITIMER_REAL, 50e-6, 50e-6)
        for step in range(300):  # with the first of which threads are started
            run.log({"gold": 1.0}, step=step)
        signal.setitimer(signal.ITIMER_REAL, 0)
        time.sleep(0.01)  # for the last one
    assert run.dropped == 0
print(next(asides))
"""


def test_to_be_told_to_end_at_any_moment() -> None:
    """The signal that ends a wait may come before it, in it, or in the middle of its beginning."""
    with running_script(WAITS) as child:
        assert child.communicate(timeout=60)[0] == "through\n"


@pytest.mark.usefixtures("ended_runs")
def test_a_handler_logs_while_its_trainer_logs(server: FakeServer, service: FakeService) -> None:
    """What a trainer logs in a signal's handler arrives, as does what it was about to log just then."""
    with running_script(LOGS, EVALSTOP_URL=server.url, EVALSTOP_KEY=KEY) as child:
        asides = int(child.communicate(timeout=60)[0])
    assert asides > 100
    assert sum(len(service.find_run(name).observations) for name in "abcdefghij") == 3_000 + asides
