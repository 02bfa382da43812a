"""`evalstop-receiver kubernetes` as a program: obeying, killed in the middle of a stop, its ways to the API server."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from evalstop_client.errors import ConfigurationError, SchedulerUnavailable
from evalstop_client.receivers.kubernetes.access import load_in_cluster_access
from evalstop_client.receivers.kubernetes.api import Api
from evalstop_client.receivers.kubernetes.kinds import JOB
from evalstop_client.receivers.kubernetes.kubeconfig import PluginToken, load_kubeconfig

from tests.clients.fake_service import FakeServer, FakeService
from tests.clients.programs import wait_until
from tests.clients.receivers.fake_pull_endpoint import FakePullEndpoint
from tests.clients.receivers.kubernetes.cluster import NAMESPACE, KubernetesCluster
from tests.clients.receivers.kubernetes.conftest import TOKEN
from tests.clients.receivers.receiver_program import ReceiverProgram
from tests.clients.webhooks import make_stop_event, post_event


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def reports(service: FakeService) -> Iterator[FakeServer]:
    """Where a receiver reports to."""
    with FakeServer(service) as server:
        yield server


@pytest.fixture
def receiver(kubernetes: KubernetesCluster, reports: FakeServer, tmp_path: Path) -> Iterator[ReceiverProgram]:
    """`evalstop-receiver kubernetes` beside a cluster."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    command = ["kubernetes", "--api-server", kubernetes.server.url, "--token-file", str(token)]
    with ExitStack() as stack:
        yield ReceiverProgram(tmp_path, reports, stack, [*command, "--allow-namespace", NAMESPACE])


def test_stop_is_obeyed_and_proved(
    receiver: ReceiverProgram, kubernetes: KubernetesCluster, service: FakeService
) -> None:
    """From the webhook to the report: asked to save, suspended, gone, with what the cluster told of the end."""
    url = receiver.start("--checkpoint-annotation", "--checkpoint-grace-seconds", "0.5")
    item = kubernetes.start()
    labels = kubernetes.labels(item)
    assert post_event(url, make_stop_event(labels)).status_code == 202
    ((_, report),) = wait_until(lambda: service.reports)
    assert (report["state"], report["actor"]) == ("confirmed", "evalstop-receiver kubernetes")
    expected = {"namespace": NAMESPACE, "kind": "Job", "name": "train-1", "uid": item["metadata"]["uid"]}
    expected |= {"scheduler_state": "Suspended", "how": "cancelled", "exit_code": 7, "gpus_freed": 1}
    assert report["details"].items() >= expected.items()
    assert kubernetes.count_saves(item) == 1
    assert kubernetes.node.running() == 0


def test_receiver_that_is_killed_in_the_middle_is_followed_by_one_that_goes_on(
    receiver: ReceiverProgram, kubernetes: KubernetesCluster, service: FakeService
) -> None:
    """Suspended, and the pod still ending: the next receiver finds the end, and suspends nothing anew."""
    url = receiver.start("--checkpoint-grace-seconds", "0")
    item = kubernetes.start(ignores_sigterm=True)
    event = make_stop_event(kubernetes.labels(item))
    kubernetes.node.lost = True
    post_event(url, event)
    state = receiver.folder / "state" / "decision-1.json"
    wait_until(lambda: state.exists() and json.loads(state.read_text())["stop"]["cancelled_at"])
    receiver.end(signal.SIGKILL)
    assert service.reports == []
    kubernetes.node.lost = False
    wait_until(lambda: kubernetes.pods("train-1") == [])
    version = kubernetes.now(JOB, item)["metadata"]["annotations"]
    url = receiver.start()
    ((_, report),) = wait_until(lambda: service.reports)
    assert report["reason"] == "the job ended after it was cancelled"
    assert kubernetes.now(JOB, item)["metadata"]["annotations"] == version
    assert post_event(url, event).json() == {"repeat": "decision-1"}


def test_receiver_that_fetches_its_events(
    receiver: ReceiverProgram, kubernetes: KubernetesCluster, service: FakeService
) -> None:
    """The same for a cluster that no connection can come in to; the event is settled once it was remembered."""
    endpoint = FakePullEndpoint(receiver.folder / "state")
    service.intercept = endpoint.answer
    item = kubernetes.start()
    receiver.start("--pull", "e1")
    endpoint.add(make_stop_event(kubernetes.labels(item)))
    ((_, report),) = wait_until(lambda: service.reports)
    assert report["state"] == "confirmed"
    wait_until(lambda: endpoint.settlements)


def test_undo_lets_the_workload_go_on(
    receiver: ReceiverProgram, kubernetes: KubernetesCluster, service: FakeService
) -> None:
    """run.resume_requested after the stop: the job is resumed, and has a pod again."""
    url = receiver.start("--checkpoint-grace-seconds", "0")
    item = kubernetes.start()
    event = make_stop_event(kubernetes.labels(item))
    post_event(url, event)
    wait_until(lambda: service.reports)
    undo = {**event, "type": "run.resume_requested"}
    wait_until(lambda: post_event(url, undo, "msg_2").status_code == 202)
    wait_until(lambda: kubernetes.runs("train-1"))
    assert kubernetes.now(JOB, item)["spec"]["suspend"] is False


def test_in_a_pod_the_service_account_is_enough(tmp_path: Path) -> None:
    """Its token is read at every request, for it is replaced; outside of a pod there is none."""
    assert load_in_cluster_access({}, tmp_path) is None
    variables = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert load_in_cluster_access(variables, tmp_path) is None
    _, certificate = _certificate(tmp_path)
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


HELPER = {"apiVersion": "client.authentication.k8s.io/v1", "args": ["-c"], "command": "sh"}
USERS = {
    "token": {"token": TOKEN},
    "file": {"tokenFile": "token"},
    "exec": {"exec": {**HELPER, "args": ["-c", f'echo \'{{"status": {{"token": "{TOKEN}"}}}}\'']}},
    "failing": {"exec": {**HELPER, "args": ["-c", "echo no login >&2; exit 1"]}},
    "old": {"username": "ann", "password": "x"},
}


def kubeconfig(folder: Path, url: str, **cluster: Any) -> Path:
    """A kubeconfig with a context for each user."""
    (folder / "token").write_text(TOKEN)
    config = {
        "current-context": "token",
        "contexts": [{"name": name, "context": {"cluster": "a", "user": name}} for name in USERS],
        "clusters": [{"name": "a", "cluster": {"server": url, **cluster}}],
        "users": [{"name": name, "user": user} for name, user in USERS.items()],
    }
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.mark.parametrize("user", [None, "file", "exec"])
def test_kubeconfig_says_who_one_is(kubernetes: KubernetesCluster, tmp_path: Path, user: str | None) -> None:
    """By a token, by a file with one, or by a program that prints one."""
    item = kubernetes.start()
    api = Api(load_kubeconfig(kubeconfig(tmp_path, kubernetes.server.url), user, {"PATH": "/usr/bin:/bin"}))
    assert api.get(JOB, NAMESPACE, item["metadata"]["name"])
    api.close()


@pytest.mark.parametrize(("ends", "times"), [("2099-01-01T00:00:00Z", 1), ("2020-01-01T00:00:00Z", 3), (None, 1)])
def test_program_that_logs_in_is_asked_again_when_its_token_ends(tmp_path: Path, ends: str | None, times: int) -> None:
    """And not at every request: to log in takes seconds."""
    answer = json.dumps({"status": {"token": "a", "expirationTimestamp": ends}})
    token = PluginToken(["sh", "-c", f"echo >> {tmp_path}/asked; echo '{answer}'"], {"PATH": "/usr/bin:/bin"})
    assert [token() for _ in range(3)] == ["a"] * 3
    assert (tmp_path / "asked").read_text().count("\n") == times


def test_program_that_gives_no_token_is_away(tmp_path: Path) -> None:
    """A login that is over can be renewed; what the program said is told."""
    access = load_kubeconfig(kubeconfig(tmp_path, "http://127.0.0.1:1"), "failing", {"PATH": "/usr/bin:/bin"})
    with pytest.raises(SchedulerUnavailable, match="no login"):
        access.token()


@pytest.mark.parametrize(
    ("context", "cluster", "words"),
    [
        ("nobody", {}, "no context 'nobody'"),
        ("old", {}, "username"),
        (None, {"certificate-authority": "nowhere.crt"}, "nowhere.crt|No such file"),
        (None, {"certificate-authority-data": "%"}, "kubeconfig"),
    ],
)
def test_kubeconfig_that_cannot_be_used_is_explained(
    tmp_path: Path, context: str | None, cluster: dict[str, str], words: str
) -> None:
    """When the receiver starts, by file and by what is wrong in it."""
    with pytest.raises(ConfigurationError, match=words):
        load_kubeconfig(kubeconfig(tmp_path, "https://127.0.0.1:1", **cluster), context, {})


def test_certificates_of_a_kubeconfig_are_taken(tmp_path: Path) -> None:
    """An authority and a client's certificate with its key, as data or as files beside it."""
    key, certificate = _certificate(tmp_path)
    data = {name: base64.b64encode(file.read_bytes()).decode() for name, file in (("c", certificate), ("k", key))}
    for user, authority in (
        ({"client-certificate": "c.pem", "client-key": "k.pem"}, {"certificate-authority": "c.pem"}),
        (
            {"client-certificate-data": data["c"], "client-key-data": data["k"]},
            {"certificate-authority-data": data["c"]},
        ),
    ):
        file = kubeconfig(tmp_path, "https://127.0.0.1:1", **authority)
        config = yaml.safe_load(file.read_text())
        config["users"][0]["user"] = user
        file.write_text(yaml.safe_dump(config))
        access = load_kubeconfig(file, None, {})
        assert access.tls is not None
        assert len(access.tls.get_ca_certs()) == 1
        assert access.token() is None


def _certificate(folder: Path) -> tuple[Path, Path]:
    key, certificate = folder / "k.pem", folder / "c.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=a", "-days", "1"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return key, certificate
