"""Several processes of PyTorch, with the fake service."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
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
            assert run.flush()
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
    assert run.flush()
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


def test_values_that_are_no_mapping_do_not_end_the_training(
    connection: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """DistributedRun drops with a warning what Run drops with a warning."""
    from evalstop_client.callbacks.pytorch import DistributedRun

    odd: Any = [0.5]
    with DistributedRun(name="r", **connection) as run:
        run.log(odd, step=1)
        assert run.dropped == 1
    assert "takes a mapping" in list_messages(caplog)[0]
