"""`evalstop-receiver kubernetes` as a program: stops, crashes and service accounts."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from evalstop_client.errors import SchedulerUnavailable
from evalstop_client.receivers.kubernetes.api import load_in_cluster_access

from tests.clients.fake_service import FakeServer, FakeService
from tests.clients.programs import wait_until
from tests.clients.receivers.fake_pull_endpoint import FakePullEndpoint
from tests.clients.receivers.kubernetes.cluster import NAMESPACE, KubernetesCluster
from tests.clients.receivers.kubernetes.conftest import TOKEN
from tests.clients.receivers.receiver_program import ReceiverProgram
from tests.clients.webhooks import make_event, make_stop_event, post_event

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
