"""Trainers that fork: the workers of data loaders, and processes that report themselves."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from evalstop_client import Run
from evalstop_client.callbacks.arguments import CallbackArguments
from evalstop_client.callbacks.arguments import open_run as open_callback_run

from tests.clients.fake_service import KEY, FakeServer, FakeService
from tests.clients.programs import wait_until
from tests.clients.runs import FAST_LIMITS, open_run

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks where there is fork")

FORKS_DURING_AN_IMPORT = """
import faulthandler, os, sys, threading, time
from evalstop_client import Run

importing, forking = threading.Event(), threading.Event()

class SlowFinder:
    def find_spec(self, name, path=None, target=None):
        if name == "httpx":
            importing.set()
            forking.wait()
            time.sleep(0.2)

sys.meta_path.insert(0, SlowFinder())
Run("a run", url="http://127.0.0.1:9", spool_folder=sys.argv[1])
importing.wait()
forking.set()
child = os.fork()
if child == 0:
    faulthandler.dump_traceback_later(20, exit=True)
    import httpx
    os._exit(0)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_child_reports_and_does_not_finish_the_run(server: FakeServer, service: FakeService) -> None:
    """A forked child sends its own observations once, and leaving the block there does not finish the run."""
    with open_run(server) as run:
        run.log({"score": 1.0}, step=1)
        assert run.flush()
        child = os.fork()
        if child == 0:
            try:
                run.log({"score": 2.0}, step=2)
                run.__exit__(None, None, None)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert service.find_run("a run").status == "running"
        run.log({"score": 3.0}, step=3)
    stored = service.find_run("a run")
    assert {step: value for (_, _, step), value in stored.observations.items()} == {1: 1.0, 2: 2.0, 3: 3.0}
    assert stored.duplicates == 0
    assert stored.status == "completed"


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_process_of_multiprocessing_sends_what_it_logged(server: FakeServer, service: FakeService) -> None:
    """Such a child ends by os._exit, which runs no atexit; what it has logged arrives all the same."""
    with open_run(server) as run:
        run.log({"score": 1.0}, step=1)
        child = multiprocessing.get_context("fork").Process(target=lambda: run.log({"score": 2.0}, step=2))
        child.start()
        child.join()
    assert sorted(service.find_run("a run").observations.values()) == [1.0, 2.0]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_child_that_trains_under_its_parents_name_does_not_end_its_run(
    server: FakeServer, service: FakeService
) -> None:
    """A callback in a forked child attaches to the run of a training that goes on in the parent."""
    arguments: CallbackArguments = {"url": server.url, "key": KEY, "name": "a run", "limits": FAST_LIMITS}
    with open_callback_run(arguments) as run:
        assert run.flush()
        child = os.fork()
        if child == 0:
            try:
                in_child = open_callback_run(arguments)
                in_child.log({"score": 2.0}, step=2)
                in_child.flush()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert service.find_run("a run").status == "running"
    assert [(run.name, run.status) for run in service.runs.values()] == [("a run", "completed")]
    assert list(service.find_run("a run").observations.values()) == [2.0]


def test_a_process_forked_at_once_can_import_what_the_client_uses(tmp_path: Path) -> None:
    """A worker that a trainer forks while the client still imports its HTTP library can import the same library."""
    command = [sys.executable, "-c", FORKS_DURING_AN_IMPORT, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def log_and_die(run: Run, step: int) -> None:
    run.log({"score": float(step)}, step=step)
    os.kill(os.getpid(), signal.SIGKILL)


def log_and_exit(run: Run, step: int) -> None:
    run.log({"score": float(step)}, step=step)
    os._exit(0)


def log_in_pool(run: Run, step: int) -> None:
    """Log in a worker, which the end of the block terminates."""
    with multiprocessing.get_context("fork").Pool(1, lambda: run.log({"score": float(step)}, step=step)) as pool:
        pool.apply(abs, (1,))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("ends", [log_and_die, log_and_exit, log_in_pool])
def test_values_of_a_killed_child_arrive(
    server: FakeServer, service: FakeService, ends: Callable[[Run, int], None]
) -> None:
    """The parent sends what a forked child has logged, however the child ended: on a flush, and before the run ends."""
    with open_run(server) as run:
        for step in range(3):
            if ends is log_in_pool:
                ends(run, step)
            else:
                child = multiprocessing.get_context("fork").Process(target=ends, args=(run, step))
                child.start()
                child.join()
            if step == 1:
                assert run.flush()
                assert sorted(service.find_run("a run").observations.values()) == [0.0, 1.0]
    stored = service.find_run("a run")
    assert sorted(stored.observations.values()) == [0.0, 1.0, 2.0]
    assert stored.status == "completed"
    assert run.dropped == 0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_values_of_a_killed_child_arrive_while_its_parent_trains(server: FakeServer, service: FakeService) -> None:
    """A parent that only logs sends what killed children left, too: their evals may have to stop the run."""
    with open_run(server) as run:
        child = multiprocessing.get_context("fork").Process(target=log_and_die, args=(run, 7))
        child.start()
        child.join()
        wait_until(lambda: 7.0 in service.find_run("a run").observations.values())
