"""`evalstop-receiver kubernetes` as a program: stops, crashes, service accounts; and a stop in a cluster end to end."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from evalstop_client.errors import SchedulerUnavailable
from evalstop_client.receivers.kubernetes.api import load_in_cluster_access
from evalstop_client.receivers.kubernetes.kinds import JOB
from evalstop_lab.rlhf.checkpoint import load_checkpoint
from evalstop_lab.service_process import Service

from tests.acceptance.docs.connect_pages import read_block
from tests.clients.fake_service import FakeServer, FakeService
from tests.clients.programs import wait_until
from tests.clients.receivers.fake_pull_endpoint import FakePullEndpoint
from tests.clients.receivers.kubernetes.admin import Json
from tests.clients.receivers.kubernetes.cluster import NAMESPACE, KubernetesCluster
from tests.clients.receivers.kubernetes.conftest import TOKEN
from tests.clients.receivers.receiver_program import RECEIVER, ReceiverProgram
from tests.clients.webhooks import make_event, make_stop_event, post_event
from tests.fixtures.forked_service import running_service

pytestmark = pytest.mark.real


@pytest.fixture
def receiver(kubernetes: KubernetesCluster, server: FakeServer, tmp_path: Path) -> Iterator[ReceiverProgram]:
    """`evalstop-receiver kubernetes` beside a cluster."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    command = ["kubernetes", "--api-server", kubernetes.server.url, "--token-file", str(token)]
    with ExitStack() as stack:
        yield ReceiverProgram(tmp_path, server, stack, [*command, "--allow-namespace", NAMESPACE])


def test_stop_is_confirmed_with_details(
    receiver: ReceiverProgram, kubernetes: KubernetesCluster, service: FakeService
) -> None:
    """The job is suspended and gone, and the report has what the cluster says of its end."""
    url = receiver.start()
    item = kubernetes.start_workload(grace_seconds=30)  # a busy machine may need more than the usual 2 to exit
    labels = kubernetes.get_run_labels(item)
    assert post_event(url, make_stop_event(labels)).status_code == 202
    ((_, report),) = wait_until(lambda: service.reports)
    assert report["state"] == "confirmed"
    expected = {"namespace": NAMESPACE, "kind": "Job", "name": "train-1", "uid": item["metadata"]["uid"]}
    expected |= {"scheduler_state": "Suspended", "how": "cancelled", "pods_total": 1}
    assert report["details"].items() >= expected.items()
    assert kubernetes.node.count_running() == 0


def test_parked_workload_runs_again_while_nobody_waits(
    receiver: ReceiverProgram, kubernetes: KubernetesCluster, service: FakeService
) -> None:
    """With --return-idle the suspended job is resumed without an event, and the service is told nothing of it."""
    url = receiver.start("--return-idle", "1", "--poll-seconds", "0.05", "--checkpoint-grace-seconds", "0")
    item = kubernetes.start_workload()
    assert post_event(url, make_event("run.park_requested", kubernetes.get_run_labels(item))).status_code == 202
    wait_until(lambda: service.reports)
    wait_until(lambda: kubernetes.is_running("train-1"))
    assert [report["state"] for _, report in service.reports] == ["parked"]


def test_pulling_receiver_settles_after_journaling(
    receiver: ReceiverProgram, kubernetes: KubernetesCluster, service: FakeService
) -> None:
    """A receiver that fetches its events stops the job, and settles the event."""
    endpoint = FakePullEndpoint(receiver.folder / "state")
    service.intercept = endpoint.answer
    item = kubernetes.start_workload()
    receiver.start("--pull", "e1")
    endpoint.add(make_stop_event(kubernetes.get_run_labels(item)))
    ((_, report),) = wait_until(lambda: service.reports)
    assert report["state"] == "confirmed"
    wait_until(lambda: endpoint.settlements)
    assert endpoint.journaled == [True]


def test_service_account_token_is_reread(tmp_path: Path) -> None:
    """In a pod the token is read at every request, since it is rotated; outside a pod there is none."""
    assert load_in_cluster_access({}, tmp_path) is None
    variables = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert load_in_cluster_access(variables, tmp_path) is None
    certificate = create_certificate(tmp_path)
    for name, text in (("token", "one\n"), ("namespace", "evalstop"), ("ca.crt", certificate.read_text())):
        (tmp_path / name).write_text(text)
    access = load_in_cluster_access(variables, tmp_path)
    assert access is not None
    assert (access.url, access.namespace, access.token()) == ("https://[fd00::1]:6443", "evalstop", "one")
    (tmp_path / "token").write_text("two\n")
    assert access.token() == "two"
    (tmp_path / "token").unlink()
    with pytest.raises(SchedulerUnavailable, match="no token"):
        access.token()


def create_certificate(folder: Path) -> Path:
    key, certificate = folder / "k.pem", folder / "c.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=a", "-days", "1"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate


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


@pytest.mark.nightly
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
