"""The Slurm commands and the batch script of the documentation on a real Slurm."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import evalstop
import pytest
from evalstop_lab.service_process import Service

from tests.acceptance.docs.connect_pages import read_block
from tests.acceptance.examples.programs import EXAMPLES, find_run
from tests.clients.programs import running_program, wait_until
from tests.clients.receivers.slurm.deployment import STOP_SECONDS
from tests.fixtures.forked_service import running_service
from tests.fixtures.slurm import SlurmCluster

pytestmark = [pytest.mark.real, pytest.mark.nightly]

TRAINER = """
import signal
import evalstop

with evalstop.Run(policy="paper", mode="enforce", labels={"gpus": 1}, total_steps=1000) as run:
    for step, value in enumerate((0.5, 0.9, 0.8, 0.7, 0.6)):
        run.checkpoint(f"file:///checkpoints/{step}", step=step)
        run.log({"eval": value}, step=step)
    run.flush(60)
    signal.pause()
"""


@pytest.fixture(scope="module")
def page_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """`evalstop up`."""
    with running_service(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.mark.parametrize("name", ["slurm", "slurm pull"])
def test_documented_commands_stop_a_job(
    name: str, cluster: SlurmCluster, page_service: Service, tmp_path: Path
) -> None:
    """The page's commands, with the addresses of this machine, end a job that does not poll, and confirm its end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    path = f"{Path(sys.executable).parent}{os.pathsep}{cluster.environment['PATH']}"
    variables = {"EVALSTOP_URL": page_service.url, "EVALSTOP_KEY": page_service.key, "PATH": path}
    environment = {**os.environ, **cluster.environment, **variables}
    script = re.sub(r"(login-node|0\.0\.0\.0):9000", listen, read_block(name))
    *setup_commands, receiver = script.strip().splitlines()
    setup = "\n".join([*setup_commands, "printenv -0 > exported"])
    subprocess.run(["bash", "-euc", setup], env=environment, cwd=tmp_path, check=True)
    exported = dict(entry.split("=", 1) for entry in (tmp_path / "exported").read_text().split("\0")[:-1])
    listed = subprocess.run(
        ["evalstop", "endpoint", "ls", "--json"], env=environment, capture_output=True, text=True, check=True
    )
    (endpoint,) = json.loads(listed.stdout)
    receiver = re.sub(r"--pull \S+", f"--pull {endpoint['id']}", receiver)
    command = f"cd {tmp_path}; exec {receiver} --state {tmp_path}/state --poll-seconds 0.2"
    (tmp_path / "train.py").write_text(TRAINER)
    run = f"page-{name.replace(' ', '-')}"
    with ExitStack() as stack:
        remove = ["evalstop", "endpoint", "rm", endpoint["id"]]
        stack.callback(subprocess.run, remove, env=environment, check=True)
        stack.enter_context(running_program(["bash", "-c", command], **exported))
        job = cluster.submit_job(
            f"exec python {tmp_path}/train.py",
            "--gres=gpu:1",
            f"--output={tmp_path}/output",
            EVALSTOP_RUN_NAME=run,
            EVALSTOP_SPOOL=str(tmp_path / "spool"),
            **variables,
        )
        api = evalstop.Api(page_service.url, page_service.key)
        wait_until(lambda: [item for item in api.decisions(state="confirmed") if item.run_name == run], STOP_SECONDS)
    assert cluster.get_job_state(job) in ("CANCELLED", "FAILED", "COMPLETED")


def test_batch_script_run_has_the_jobs_labels(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Its run is named after the job, has the job's labels, and is stopped by the service."""
    with running_service(tmp_path / "service") as service:
        job = cluster.submit_job(
            (EXAMPLES / "slurm.sh").read_text().partition("\n")[2],
            "--gres=gpu:1",
            "--job-name=watched",
            f"--chdir={tmp_path}",
            f"--output={tmp_path}/output",
            EVALSTOP_URL=service.url,
            EVALSTOP_KEY=service.key,
            EVALSTOP_SPOOL=str(tmp_path / "spool"),
            TRAINER=str(EXAMPLES / "plain_loop.py"),
            PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin",
        )
        wait_until(lambda: cluster.get_job_state(job) == "COMPLETED", STOP_SECONDS)
        run = find_run(service, f"watched-{job}")
        assert run["labels"]["slurm_job_id"] == job
        assert run["labels"]["job_kind"] == "sft"
        assert run["decision"] is not None, (tmp_path / "output").read_text()
