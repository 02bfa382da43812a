"""The whole story in a cluster: trainers in pods, a real service, a real receiver, a job that waits for a GPU."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from evalstop_client.receivers.kubernetes.kinds import JOB
from evalstop_lab.rlhf.checkpoint import load_checkpoint
from evalstop_lab.service_process import Service, running_service

from tests.acceptance.docs.connect_pages import read_block
from tests.clients.programs import wait_until
from tests.clients.receivers.kubernetes.admin import Json
from tests.clients.receivers.kubernetes.cluster import NAMESPACE, KubernetesCluster
from tests.clients.receivers.receiver_program import RECEIVER

pytestmark = pytest.mark.real

PATIENCE_SECONDS = 120.0
TRAIN = ["-m", "evalstop_lab.cli", "train", "--json", "--stop-by", "signal", "--policy", "paper", "--mode", "enforce"]


@contextmanager
def receiver(world: KubernetesCluster, service: Service, api: httpx.Client, folder: Path) -> Iterator[None]:
    """`evalstop-receiver kubernetes`, listening, and known to the service."""
    ready, secret, token, log = (folder / name for name in ("ready.json", "secret", "token", "log"))
    token.write_text(world.server.token)
    _, shown = read_block("outside a cluster").splitlines()  # the first line is for a kubeconfig
    shown = shown.replace("http://127.0.0.1:8001", world.server.url).replace("127.0.0.1:9000", "127.0.0.1:0")
    command = [*RECEIVER, *shlex.split(shown)[1:], "--token-file", str(token)]
    command += ["--ca-file", str(world.server.ca_file)] if world.server.ca_file else []
    command += ["--secret-file", str(secret), "--ready-file", str(ready), "--state", str(folder / "state")]
    command += ["--url", service.url, "--poll-seconds", "0.2"]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stderr=errors, env={**os.environ, "EVALSTOP_KEY": service.key})
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None)
        body = {"url": json.loads(ready.read_text())["url"], "event_types": ["run.stop_requested"]}
        secret.write_text(api.post("/endpoints", json=body).raise_for_status().json()["secret"])
        yield
    finally:
        process.terminate()
        process.wait(30)
        print(log.read_text())


def test_hacking_run_is_stopped_and_its_gpu_goes_to_the_job_that_waits(
    kubernetes: KubernetesCluster, tmp_path: Path
) -> None:
    """Its checkpoint is whole, the decision is confirmed by what the cluster says, and the healthy run finishes."""
    kubernetes.node.gpus = 2
    with running_service(tmp_path / "service") as service:
        headers = {"Authorization": f"Bearer {service.key}"}
        with (
            httpx.Client(base_url=f"{service.url}/api/v1", headers=headers, timeout=30, trust_env=False) as api,
            receiver(kubernetes, service, api, tmp_path),
        ):
            hacking = train(kubernetes, service, "hacking", "overoptimizes", 10_000, tmp_path)
            train(kubernetes, service, "healthy", "healthy", 400, tmp_path)
            wait_until(lambda: run(api, "hacking") and run(api, "healthy"), PATIENCE_SECONDS)
            waiting = kubernetes.submit("waiting", ["date"])
            decision = wait_until(lambda: confirmed(api, "hacking"), PATIENCE_SECONDS)
            wait_until(lambda: JOB.list_states(kubernetes.now(JOB, waiting)) == {"Complete"}, PATIENCE_SECONDS)
            wait_until(lambda: (run(api, "healthy") or {}).get("status") == "completed", PATIENCE_SECONDS)
            stopped, finished = run(api, "hacking"), run(api, "healthy")

    assert decision is not None
    details = decision["history"][-1]["details"]
    expected = {"job": f"{NAMESPACE}/hacking", "uid": hacking["metadata"]["uid"], "gpus_freed": 1, "how": "cancelled"}
    assert details.items() >= expected.items()
    assert stopped is not None
    assert finished is not None
    assert (stopped["status"], finished["decision"]) == ("stopped", None)
    checkpoints = sorted((tmp_path / "hacking").iterdir())
    assert load_checkpoint(checkpoints[-1]).state.step >= stopped["last_step"]
    assert Path(stopped["best_checkpoint"]["uri"].removeprefix("file://")) in checkpoints


def train(world: KubernetesCluster, service: Service, name: str, preset: str, steps: int, folder: Path) -> Json:
    """A Job that runs the example trainer."""
    options = ["--hasten", "20", "--preset", preset, "--steps", str(steps), "--checkpoints", str(folder / name)]
    variables = {
        "EVALSTOP_URL": service.url,
        "EVALSTOP_KEY": service.key,
        "EVALSTOP_RUN_NAME": name,
        "EVALSTOP_SPOOL": str(folder / "spool"),
        "OMP_NUM_THREADS": "1",
    }
    return world.submit(name, [sys.executable, *TRAIN, *options], variables=variables, grace_seconds=30)


def run(api: httpx.Client, name: str) -> dict[str, Any] | None:
    """A run as the service knows it."""
    items = api.get("/runs", params={"name": name}).raise_for_status().json()["items"]
    return items[0] if items else None


def confirmed(api: httpx.Client, name: str) -> dict[str, Any] | None:
    """The decision on a run, once it is confirmed; a stop that failed fails the test."""
    found = run(api, name)
    if not found or not found["decision"]:
        return None
    decision: dict[str, Any] = api.get(f"/decisions/{found['decision']['id']}").raise_for_status().json()
    assert decision["state"] != "failed", decision["history"]
    return decision if decision["state"] == "confirmed" else None
