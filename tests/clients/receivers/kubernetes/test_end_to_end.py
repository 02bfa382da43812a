"""A stop in a cluster end to end: trainers in pods, a real service and receiver, and a job waiting for a GPU."""

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
from evalstop_lab.service_process import Service

from tests.acceptance.docs.connect_pages import read_block
from tests.clients.programs import wait_until
from tests.clients.receivers.kubernetes.admin import Json
from tests.clients.receivers.kubernetes.cluster import NAMESPACE, KubernetesCluster
from tests.clients.receivers.receiver_program import RECEIVER
from tests.fixtures.forked_service import running_service

pytestmark = [pytest.mark.real, pytest.mark.nightly]

STOP_SECONDS = 120.0
TRAIN = ["-m", "evalstop_lab.cli", "train", "--json", "--stop-by", "signal", "--policy", "paper", "--mode", "enforce"]


@contextmanager
def running_receiver(
    kubernetes: KubernetesCluster, service: Service, api: httpx.Client, folder: Path
) -> Iterator[None]:
    """`evalstop-receiver kubernetes` as the docs start it, with an endpoint of its own."""
    ready, secret, token, log = (folder / name for name in ("ready.json", "secret", "token", "log"))
    token.write_text(kubernetes.server.token)
    (documented,) = [line for line in read_block("outside a cluster").splitlines() if "evalstop-receiver" in line]
    documented = documented.replace("http://127.0.0.1:8001", kubernetes.server.url).replace(
        "127.0.0.1:9000", "127.0.0.1:0"
    )
    command = [*RECEIVER, *shlex.split(documented)[1:], "--token-file", str(token)]
    command += ["--secret-file", str(secret), "--ready-file", str(ready), "--state", str(folder / "state")]
    command += ["--url", service.url, "--poll-seconds", "0.2"]
    environment = {**os.environ, "EVALSTOP_KEY": service.key}
    environment |= {"SSL_CERT_FILE": str(kubernetes.server.ca_file)} if kubernetes.server.ca_file else {}
    with log.open("w") as errors:
        process = subprocess.Popen(command, stderr=errors, env=environment)
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None)
        body = {"url": json.loads(ready.read_text())["url"], "event_types": ["run.stop_requested"]}
        secret.write_text(api.post("/endpoints", json=body).raise_for_status().json()["secret"])
        yield
    finally:
        process.terminate()
        process.wait(30)
        print(log.read_text())


def test_stop_frees_a_gpu_for_a_waiting_job(kubernetes: KubernetesCluster, tmp_path: Path) -> None:
    """The overoptimizing run is stopped with a whole checkpoint, and its GPU goes to the waiting job."""
    kubernetes.node.gpus = 2
    with running_service(tmp_path / "service") as service:
        headers = {"Authorization": f"Bearer {service.key}"}
        with (
            httpx.Client(base_url=f"{service.url}/api/v1", headers=headers, timeout=30, trust_env=False) as api,
            running_receiver(kubernetes, service, api, tmp_path),
        ):
            hacking = submit_trainer(kubernetes, service, "hacking", "overoptimizes", 10_000, tmp_path)
            submit_trainer(kubernetes, service, "healthy", "healthy", 400, tmp_path)
            wait_until(lambda: find_run(api, "hacking") and find_run(api, "healthy"), STOP_SECONDS)
            waiting = kubernetes.create_workload("waiting", ["date"])
            decision = wait_until(lambda: find_confirmed_decision(api, "hacking"), STOP_SECONDS)
            wait_until(lambda: JOB.list_states(kubernetes.read_object(JOB, waiting)) == {"Complete"}, STOP_SECONDS)
            wait_until(lambda: (find_run(api, "healthy") or {}).get("status") == "completed", STOP_SECONDS)
            stopped, finished = find_run(api, "hacking"), find_run(api, "healthy")

    assert decision is not None
    details = decision["history"][-1]["details"]
    expected = {"job": f"{NAMESPACE}/hacking", "uid": hacking["metadata"]["uid"], "how": "cancelled"}
    assert details.items() >= expected.items()
    assert stopped is not None
    assert finished is not None
    assert (stopped["status"], finished["decision"]) == ("stopped", None)
    checkpoints = sorted((tmp_path / "hacking").iterdir())
    assert load_checkpoint(checkpoints[-1]).state.step >= stopped["last_step"]
    assert Path(stopped["best_checkpoint"]["uri"].removeprefix("file://")) in checkpoints


def submit_trainer(
    kubernetes: KubernetesCluster, service: Service, name: str, preset: str, steps: int, folder: Path
) -> Json:
    """A workload that runs the example trainer."""
    options = ["--hasten", "20", "--preset", preset, "--steps", str(steps), "--checkpoints", str(folder / name)]
    variables = {
        "EVALSTOP_URL": service.url,
        "EVALSTOP_KEY": service.key,
        "EVALSTOP_RUN_NAME": name,
        "EVALSTOP_SPOOL": str(folder / "spool"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *TRAIN, *options]
    return kubernetes.create_workload(name, command, kubernetes.kind, variables=variables, grace_seconds=30)


def find_run(api: httpx.Client, name: str) -> dict[str, Any] | None:
    """A run, as the service has it."""
    items = api.get("/runs", params={"name": name}).raise_for_status().json()["items"]
    return items[0] if items else None


def find_confirmed_decision(api: httpx.Client, name: str) -> dict[str, Any] | None:
    """The decision on a run once it is confirmed; a failed stop fails the test."""
    run = find_run(api, name)
    if not run or not run["decision"]:
        return None
    decision: dict[str, Any] = api.get(f"/decisions/{run['decision']['id']}").raise_for_status().json()
    assert decision["state"] != "failed", decision["history"]
    return decision if decision["state"] == "confirmed" else None
