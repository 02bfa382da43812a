"""Several processes of PyTorch and several trials of Ray Tune, with the fake service."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.clients.fake_service import KEY, FakeServer, FakeService
from tests.clients.runs import FAST_LIMITS, METRICS, list_messages, list_posts

pytestmark = [
    pytest.mark.real,
    pytest.mark.usefixtures("ended_runs"),
    pytest.mark.nightly,
]  # importing a framework takes up to 30 s


@pytest.fixture
def connection(server: FakeServer) -> dict[str, Any]:
    """The arguments by which a callback reports to the fake service."""
    return {"url": server.url, "key": KEY, "metrics": METRICS, "limits": FAST_LIMITS}


def test_ranks_agree_whichever_steps_are_asked_for(
    connection: dict[str, Any], service: FakeService, tmp_path: Path
) -> None:
    """A loop that asks at steps none of which is a multiple of `agree_every_steps` is told to stop."""
    from evalstop_client.callbacks.pytorch import DistributedRun
    from torch import distributed as dist

    service.stop_at_step = 1
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        with DistributedRun(name="r", **connection) as run:
            assert not run.should_stop_at(9)
            run.log({"score": 1.0}, step=9)
            assert run.run is not None
            assert run.run.flush()
            assert [run.should_stop_at(step) for step in (12, 15, 19, 29)] == [True] * 4
            assert [run.should_stop_at(step) for step in (3, 4)] == [True] * 2
    finally:
        dist.destroy_process_group()


RANK_SCRIPT = """
import sys
from torch import distributed as dist
from evalstop_client import Limits
from evalstop_client.callbacks.pytorch import DistributedRun

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
with DistributedRun(name="r", limits=Limits(flush_seconds=60)) as run:
    if run.run is not None:
        assert run.run.flush()
    exploit = run.agree_on_exploit()
    print(exploit.source_checkpoint, exploit.hyperparameters)
    dist.barrier()
    exploit.confirm()
    assert run.agree_on_exploit() is None
"""


def test_ranks_make_the_same_copy(
    connection: dict[str, Any], server: FakeServer, service: FakeService, tmp_path: Path
) -> None:
    """Every rank is told what to load, and rank 0 confirms it once."""
    service.exploit = {
        "decision_id": "decision-7", "source_run": "run-9", "source_name": "b", "source_step": 20,
        "source_checkpoint": "file:///b/20", "hyperparameters": {"lr": 0.1},
    }  # fmt: skip
    environment = os.environ | {"EVALSTOP_URL": server.url, "EVALSTOP_KEY": KEY}
    command = [sys.executable, "-c", RANK_SCRIPT]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), f"file://{tmp_path / 'group'}"], env=environment, stdout=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    assert [rank.communicate(timeout=120)[0] for rank in ranks] == ["file:///b/20 {'lr': 0.1}\n"] * 2
    assert [kind for kind, _ in list_posts(service)].count("exploited") == 1


def test_trial_that_goes_back_resumes(connection: dict[str, Any], service: FakeService) -> None:
    """A trial resumes its run when Tune restores it from a checkpoint, in this driver or another, or starts it anew."""
    from evalstop_client.callbacks.ray_tune import EvalStop

    watch = EvalStop(name="tune", **connection)
    trial: Any = SimpleNamespace(trial_id="t1", last_result={"training_iteration": 6})  # begun by another driver
    for iteration, checkpoint in ((7, None), (8, None), (9, 7), (8, None), (1, None)):
        result = {"training_iteration": iteration, "score": 0.5}
        watch.on_trial_result(0, [trial], trial, result)
        trial.last_result = result if checkpoint is None else {"training_iteration": checkpoint}
    watch.on_trial_complete(0, [trial], trial)
    watch.on_experiment_end([trial])
    steps = [
        f"{kind} {body['step']}"
        for kind, body in list_posts(service)
        if kind == "resume" or body.get("metric") == "score"
    ]
    before, again, anew = ("resume 6", "7", "8", "9"), ("resume 7", "8"), ("resume 0", "1")
    assert [step.removeprefix("observations ") for step in steps] == [*before, *again, *anew]


def test_trial_without_a_step_does_not_end_the_search(
    connection: dict[str, Any], service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """A result that lacks the step, or whose step Tune has filled in as None, is dropped with a warning; what Tune adds
    to each result is no metric."""
    from evalstop_client.callbacks.ray_tune import EvalStop

    watch = EvalStop(step_key="timesteps_total", name="tune", **connection)
    trial: Any = SimpleNamespace(trial_id="t1", last_result={"training_iteration": 5})
    watch.on_trial_result(0, [trial], trial, {"training_iteration": 6, "score": 0.5, "timesteps_total": None})
    watch.on_trial_result(0, [trial], trial, {"training_iteration": 7, "score": 0.5})
    automatic = {"training_iteration": 8, "timesteps_total": 80, "pid": 4711, "time_total_s": 0.5}
    watch.on_trial_result(0, [trial], trial, {"score": 0.5, **automatic})
    watch.on_trial_complete(0, [trial], trial)
    watch.on_experiment_end([trial])
    assert service.find_run("tune-t1").observations == {(2, "score", 80): 0.5}
    assert len([message for message in list_messages(caplog) if "step None" in message]) == 1


def test_end_of_a_trial_does_not_wait_for_the_service(connection: dict[str, Any], service: FakeService) -> None:
    """While the service hangs, Tune goes on with the other trials; the end of the search waits for all runs."""
    from evalstop_client.callbacks.ray_tune import EvalStop

    may_answer = threading.Event()

    def hang(path: str, body: dict[str, Any]) -> None:
        may_answer.wait(60)

    service.scripted_answers.append(hang)
    watch = EvalStop(name="tune", **connection)
    trials: list[Any] = [SimpleNamespace(trial_id=name, last_result=None) for name in ("t1", "t2")]
    for trial in trials:
        watch.on_trial_result(0, trials, trial, {"training_iteration": 1, "score": 0.5})
        watch.on_trial_complete(0, trials, trial)
    assert service.runs == {}  # the first request still hangs
    may_answer.set()
    watch.on_experiment_end(trials)
    assert [run.status for run in service.runs.values()] == ["completed"] * 2


def test_values_that_are_no_mapping_do_not_end_the_training(
    connection: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """DistributedRun drops with a warning what Run drops with a warning."""
    from evalstop_client.callbacks.pytorch import DistributedRun

    odd: Any = [0.5]
    with DistributedRun(name="r", **connection) as run:
        run.log(odd, step=1)
        assert run.run is not None
        assert run.run.dropped == 1
    assert "takes a mapping" in list_messages(caplog)[0]
