"""`evalstop-receiver kubernetes` as a program: obeying, killed in the middle of a stop, its ways to the API server."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from evalstop_client.errors import ConfigurationError, SchedulerUnavailable
from evalstop_client.receivers.kubernetes.access import load_in_cluster_access
from evalstop_client.receivers.kubernetes.api import Api
from evalstop_client.receivers.kubernetes.kinds import JOB
from evalstop_client.receivers.kubernetes.kubeconfig import PluginToken, load_kubeconfig

from tests.clients.fake_service import KEY, FakeServer, FakeService
from tests.clients.programs import eventually, program
from tests.clients.receivers.kubernetes.cluster import NAMESPACE, World
from tests.clients.receivers.kubernetes.conftest import TOKEN
from tests.clients.receivers.test_pull import FakeMailbox
from tests.clients.webhooks import SECRET, send, stop_event

RECEIVER = [sys.executable, "-m", "evalstop_client.receivers.cli", "kubernetes"]


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def reports(service: FakeService) -> Iterator[FakeServer]:
    """Where a receiver reports to."""
    with FakeServer(service) as server:
        yield server


@dataclass
class LatestAnswer:
    """A receiver beside a cluster, started again as often as one likes."""

    folder: Path
    world: World
    reports: FakeServer
    stack: ExitStack
    process: subprocess.Popen[str] | None = None

    def start(self, *options: str) -> str:
        """Its address, if it listens."""
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        token = self.folder / "token"
        token.write_text(TOKEN)
        command = [*RECEIVER, "--api-server", self.world.server.url, "--token-file", str(token)]
        command += ["--allow-namespace", NAMESPACE, "--state", str(self.folder / "state"), "--ready-file", str(ready)]
        command += ["--url", self.reports.url, "--poll-seconds", "0.1", *options]
        if "--pull" not in options:
            command += ["--listen", "127.0.0.1:0"]
        environment = {"EVALSTOP_WEBHOOK_SECRET": SECRET, "EVALSTOP_KEY": KEY}
        self.process = process = self.stack.enter_context(program(command, **environment))
        eventually(lambda: ready.exists() or process.poll() is not None)
        return str(json.loads(ready.read_text()).get("url"))

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(20)


@pytest.fixture
def standing(kubernetes: World, reports: FakeServer, tmp_path: Path) -> Iterator[LatestAnswer]:
    with ExitStack() as stack:
        yield LatestAnswer(tmp_path, kubernetes, reports, stack)


def test_stop_is_obeyed_and_proved(standing: LatestAnswer, service: FakeService) -> None:
    """From the webhook to the report: asked to save, suspended, gone, with what the cluster told of the end."""
    url = standing.start("--checkpoint-annotation", "--checkpoint-grace-seconds", "0.5")
    item = standing.world.start()
    labels = standing.world.labels(item)
    assert send(url, stop_event(labels)).status_code == 202
    ((_, report),) = eventually(lambda: service.reports)
    assert (report["state"], report["actor"]) == ("confirmed", "evalstop-receiver kubernetes")
    expected = {"namespace": NAMESPACE, "kind": "Job", "name": "train-1", "uid": item["metadata"]["uid"]}
    expected |= {"scheduler_state": "Suspended", "how": "cancelled", "exit_code": 7, "gpus_freed": 1}
    assert report["details"].items() >= expected.items()
    assert standing.world.saves(item) == 1
    assert standing.world.node.running() == 0


def test_receiver_that_is_killed_in_the_middle_is_followed_by_one_that_goes_on(
    standing: LatestAnswer, service: FakeService
) -> None:
    """Suspended, and the pod still ending: the next receiver finds the end, and suspends nothing anew."""
    url = standing.start("--checkpoint-grace-seconds", "0")
    item = standing.world.start(deaf=True)
    event = stop_event(standing.world.labels(item))
    standing.world.node.lost = True
    send(url, event)
    state = standing.folder / "state" / "decision-1.json"
    eventually(lambda: state.exists() and json.loads(state.read_text())["stop"]["cancelled_at"])
    standing.kill()
    assert service.reports == []
    standing.world.node.lost = False
    eventually(lambda: standing.world.pods("train-1") == [])
    version = standing.world.now(JOB, item)["metadata"]["annotations"]
    url = standing.start()
    ((_, report),) = eventually(lambda: service.reports)
    assert report["reason"] == "the job ended after it was cancelled"
    assert standing.world.now(JOB, item)["metadata"]["annotations"] == version
    assert send(url, event).json() == {"repeat": "decision-1"}


def test_receiver_that_fetches_its_events(standing: LatestAnswer, service: FakeService) -> None:
    """The same for a cluster that no connection can come in to; the event is settled once it was remembered."""
    mailbox = FakeMailbox(folder=standing.folder / "state")

    def forced(path: str, body: Any) -> Any:
        answer = mailbox.answer(path, body)
        if answer is not None:
            service.forced.insert(0, forced)
        return answer

    service.forced = [forced]
    item = standing.world.start()
    standing.start("--pull", "e1")
    mailbox.put(stop_event(standing.world.labels(item)))
    ((_, report),) = eventually(lambda: service.reports)
    assert report["state"] == "confirmed"
    eventually(lambda: mailbox.settled)


def test_undo_lets_the_workload_go_on(standing: LatestAnswer, service: FakeService) -> None:
    """run.resume_requested after the stop: the job is resumed, and has a pod again."""
    url = standing.start("--checkpoint-grace-seconds", "0")
    item = standing.world.start()
    event = stop_event(standing.world.labels(item))
    send(url, event)
    eventually(lambda: service.reports)
    undo = {**event, "type": "run.resume_requested"}
    eventually(lambda: send(url, undo, "msg_2").status_code == 202)
    eventually(lambda: standing.world.runs("train-1"))
    assert standing.world.now(JOB, item)["spec"]["suspend"] is False


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
def test_kubeconfig_says_who_one_is(kubernetes: World, tmp_path: Path, user: str | None) -> None:
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
