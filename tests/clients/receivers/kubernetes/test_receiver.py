"""`evalstop-receiver kubernetes` as a program: stops, crashes, kubeconfigs and service accounts."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from evalstop_client.errors import ConfigurationError, SchedulerUnavailable
from evalstop_client.receivers.kubernetes.access import PluginToken, load_in_cluster_access, load_kubeconfig
from evalstop_client.receivers.kubernetes.api import Api
from evalstop_client.receivers.kubernetes.kinds import JOB

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
    """The job is asked to save, suspended and gone, and the report has what the cluster says of its end."""
    url = receiver.start("--checkpoint-annotation", "--checkpoint-grace-seconds", "0.5")
    item = kubernetes.start_workload(grace_seconds=30)  # a busy machine may need more than the usual 2 to exit
    labels = kubernetes.get_run_labels(item)
    assert post_event(url, make_stop_event(labels)).status_code == 202
    ((_, report),) = wait_until(lambda: service.reports)
    assert (report["state"], report["actor"]) == ("confirmed", "evalstop-receiver kubernetes")
    expected = {"namespace": NAMESPACE, "kind": "Job", "name": "train-1", "uid": item["metadata"]["uid"]}
    expected |= {"scheduler_state": "Suspended", "how": "cancelled", "exit_code": 7, "gpus_freed": 1}
    assert report["details"].items() >= expected.items()
    assert kubernetes.count_saves(item) == 1
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
    _, certificate = create_certificate(tmp_path)
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


PLUGIN = {"apiVersion": "client.authentication.k8s.io/v1", "args": ["-c"], "command": "sh"}
USERS = {
    "token": {"token": TOKEN},
    "file": {"tokenFile": "token"},
    "exec": {"exec": {**PLUGIN, "args": ["-c", f'echo \'{{"status": {{"token": "{TOKEN}"}}}}\'']}},
    "failing": {"exec": {**PLUGIN, "args": ["-c", "echo no login >&2; exit 1"]}},
    "old": {"username": "ann", "password": "x"},
}


def write_kubeconfig(folder: Path, url: str, **cluster: Any) -> Path:
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
def test_kubeconfig_users_are_accepted(kubernetes: KubernetesCluster, tmp_path: Path, user: str | None) -> None:
    """A user has a token, a file with one, or a plugin that prints one."""
    item = kubernetes.start_workload()
    api = Api(load_kubeconfig(write_kubeconfig(tmp_path, kubernetes.server.url), user, {"PATH": "/usr/bin:/bin"}))
    assert api.get(JOB, NAMESPACE, item["metadata"]["name"])
    api.close()


@pytest.mark.parametrize(("expires", "calls"), [("2099-01-01T00:00:00Z", 1), ("2020-01-01T00:00:00Z", 3), (None, 1)])
def test_plugin_runs_again_when_its_token_expires(tmp_path: Path, expires: str | None, calls: int) -> None:
    """A plugin runs again only when its token has expired, since it may take seconds."""
    answer = json.dumps({"status": {"token": "a", "expirationTimestamp": expires}})
    token = PluginToken(["sh", "-c", f"echo >> {tmp_path}/calls; echo '{answer}'"], {"PATH": "/usr/bin:/bin"})
    assert [token() for _ in range(3)] == ["a"] * 3
    assert (tmp_path / "calls").read_text().count("\n") == calls


def test_failed_plugin_is_unavailable(tmp_path: Path) -> None:
    """A login can be renewed, so a failed plugin is retried; its output is in the error."""
    access = load_kubeconfig(write_kubeconfig(tmp_path, "http://127.0.0.1:1"), "failing", {"PATH": "/usr/bin:/bin"})
    with pytest.raises(SchedulerUnavailable, match="no login"):
        access.token()


@pytest.mark.parametrize(
    ("context", "cluster", "message"),
    [
        ("nobody", {}, "no context 'nobody'"),
        ("old", {}, "username"),
        (None, {"certificate-authority": "nowhere.crt"}, "nowhere.crt|No such file"),
        (None, {"certificate-authority-data": "%"}, "kubeconfig"),
    ],
)
def test_unusable_kubeconfig_is_an_error(
    tmp_path: Path, context: str | None, cluster: dict[str, str], message: str
) -> None:
    """An unknown context, user type or certificate is a ConfigurationError when the receiver starts."""
    with pytest.raises(ConfigurationError, match=message):
        load_kubeconfig(write_kubeconfig(tmp_path, "https://127.0.0.1:1", **cluster), context, {})


def test_kubeconfig_certificates_are_loaded(tmp_path: Path) -> None:
    """An authority and a client certificate with its key are loaded from data or from files beside the kubeconfig."""
    key, certificate = create_certificate(tmp_path)
    data = {name: base64.b64encode(file.read_bytes()).decode() for name, file in (("c", certificate), ("k", key))}
    for user, authority in (
        ({"client-certificate": "c.pem", "client-key": "k.pem"}, {"certificate-authority": "c.pem"}),
        (
            {"client-certificate-data": data["c"], "client-key-data": data["k"]},
            {"certificate-authority-data": data["c"]},
        ),
    ):
        file = write_kubeconfig(tmp_path, "https://127.0.0.1:1", **authority)
        config = yaml.safe_load(file.read_text())
        config["users"][0]["user"] = user
        file.write_text(yaml.safe_dump(config))
        access = load_kubeconfig(file, None, {})
        assert access.tls is not None
        assert len(access.tls.get_ca_certs()) == 1
        assert access.token() is None


def create_certificate(folder: Path) -> tuple[Path, Path]:
    key, certificate = folder / "k.pem", folder / "c.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=a", "-days", "1"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return key, certificate
