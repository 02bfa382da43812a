"""API errors and permissions that are missing or revoked, at the start and during a stop: how the receiver reacts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from evalstop_client.errors import RequestRefused, SchedulerUnavailable
from evalstop_client.receivers.cli import USAGE, main
from evalstop_client.receivers.kubernetes.api import check_permissions
from evalstop_client.receivers.kubernetes.kinds import JOB, JOBSET, POD
from evalstop_client.receivers.stop.job_control import Present

from tests.clients.programs import wait_until
from tests.clients.receivers.kubernetes.admin import Json
from tests.clients.receivers.kubernetes.cluster import NAMESPACE, RECEIVER, FoundJob, KubernetesCluster
from tests.clients.receivers.kubernetes.conftest import TOKEN
from tests.clients.receivers.kubernetes.fake_api_server import FakeApiServer
from tests.clients.receivers.kubernetes.fake_cluster import FakeCluster
from tests.clients.receivers.kubernetes.fake_requests import Request
from tests.clients.receivers.kubernetes.fake_storage import StatusError

Fault = Callable[[Request], None]
COMPLETE = {"conditions": [{"type": "Complete", "status": "True"}]}


@pytest.fixture
def running(kubernetes: KubernetesCluster) -> FoundJob:
    """A running job that the receiver has found."""
    return kubernetes.find_job(kubernetes.start_workload())


def make_fault(code: int, reason: str = "Trouble", *, method: str = "") -> Fault:
    """A fault: the receiver's requests by this method get this status."""

    def fault(request: Request) -> None:
        if request.user == RECEIVER and method in ("", request.method):
            raise StatusError(code, reason, f"{reason} for the test")

    return fault


@pytest.mark.parametrize(
    "code", [401, 503, *(pytest.param(code, marks=pytest.mark.nightly) for code in (408, 429, 500, 502, 504))]
)
def test_temporary_errors_are_unavailable(running: FoundJob, cluster: FakeCluster, code: int) -> None:
    """A temporary error makes the scheduler unavailable to every call, and the stop continues afterwards."""
    cluster.faults.append(make_fault(code))
    for call in (running.find, running.cancel, running.kill, running.check, running.resume):
        with pytest.raises(SchedulerUnavailable, match=str(code)):
            call()
    cluster.faults.clear()
    running.cancel()
    running.wait_until_gone()


@pytest.mark.parametrize("code", [400, 405, 422])
def test_permanent_errors_are_refused(running: FoundJob, cluster: FakeCluster, code: int) -> None:
    """A 400, 405 or 422 refuses the stop, since a retry would get the same answer."""
    cluster.faults.append(make_fault(code, "Invalid", method="PATCH"))
    with pytest.raises(RequestRefused, match="Invalid for the test"):
        running.cancel()


@pytest.mark.nightly
def test_late_pod_keeps_the_job_present(kubernetes: KubernetesCluster, running: FoundJob, cluster: FakeCluster) -> None:
    """A pod created after the others are gone, before the controller reports the suspension, is noticed."""
    running.check()
    (pod,) = kubernetes.list_pods("train-1")
    metadata = {name: pod["metadata"][name] for name in ("labels", "ownerReferences")}
    late_pod = {
        "metadata": {**metadata, "name": "train-1-late"},
        "spec": {**pod["spec"], "nodeName": "another-node"},
    }
    created: list[Json] = []

    def create_late_pod(request: Request) -> None:
        if request.user == RECEIVER and request.path.endswith("/jobs/train-1") and not created:
            with unlocked(cluster):
                created.append(kubernetes.admin.create(POD, NAMESPACE, late_pod))

    running.cancel()
    wait_until(lambda: kubernetes.list_pods("train-1") == [])
    wait_until(lambda: JOB.list_states(kubernetes.read_object(JOB, running.item)) == {"Suspended"})
    cluster.faults.append(create_late_pod)
    assert all(isinstance(running.check(), Present) for _ in range(3))


@pytest.mark.parametrize(
    ("verb", "plural", "call"),
    [
        ("get", "jobs", FoundJob.find),
        ("list", "pods", FoundJob.find),
        ("patch", "jobs", FoundJob.cancel),
        ("delete", "pods", FoundJob.kill),
    ],
)
def test_missing_permission_is_named(
    kubernetes: KubernetesCluster,
    running: FoundJob,
    cluster: FakeCluster,
    verb: str,
    plural: str,
    call: Callable[[FoundJob], object],
) -> None:
    """The refusal names the verb, resource and namespace that a Role has to grant."""
    cluster.revoke_verb(verb, plural)
    if verb == "delete":  # the receiver deletes pods only if their controller does not
        kubernetes.admin.set_status(JOB, running.item, COMPLETE)
    full_name = f"{plural}.batch" if plural == "jobs" else plural
    with pytest.raises(RequestRefused, match=rf"verb '{verb}' on {full_name} in namespace {NAMESPACE} is not granted"):
        call(running)


def test_revoked_permission_is_unavailable_until_granted(running: FoundJob, cluster: FakeCluster) -> None:
    """A job whose pods can no longer be listed is neither gone nor given up, and the stop continues once it can."""
    running.check()
    cluster.revoke_verb("list", "pods")
    with pytest.raises(SchedulerUnavailable, match="verb 'list' on pods"):
        running.check()
    running.cancel()
    cluster.revoke_verb("list", "pods", grant=True)
    running.wait_until_gone()


def test_stop_continues_after_an_api_server_restart(
    running: FoundJob, api_server: FakeApiServer, cluster: FakeCluster
) -> None:
    """While the API server is down it is unavailable; afterwards the stop continues."""
    running.check()
    port = api_server.server_address[1]
    api_server.__exit__()
    for call in (running.cancel, running.check):
        with pytest.raises(SchedulerUnavailable):
            call()
    with ExitStack() as stack:
        stack.enter_context(FakeApiServer(cluster, port))
        wait_until(lambda: _works(running.cancel))
        running.wait_until_gone()


@pytest.mark.nightly
def test_unexpected_body_is_unavailable(running: FoundJob, cluster: FakeCluster) -> None:
    """A proxy's answer with status 200 says nothing about a job."""

    def answer_with_empty_object(request: Request) -> None:
        status = StatusError(200, "", "")
        status.body = {}
        if request.user == RECEIVER:
            raise status

    cluster.faults.append(answer_with_empty_object)
    for call in (running.find, running.check):
        with pytest.raises(SchedulerUnavailable, match="no object"):
            call()
    cluster.faults.clear()


def test_unknown_kind_is_refused(running: FoundJob, cluster: FakeCluster) -> None:
    """A kind without a definition in the cluster is refused by name."""
    cluster.resources = [resource for resource in cluster.resources if resource.kind != "JobSet"]
    running.labels["kubernetes_kind"] = "JobSet"
    with pytest.raises(RequestRefused, match=r"knows no jobsets\.jobset\.x-k8s\.io"):
        running.find()


@pytest.mark.nightly
def test_changed_api_version_is_discovered_again(kubernetes: KubernetesCluster, cluster: FakeCluster) -> None:
    """After an operator's upgrade during a stop the new version of its API is discovered."""
    job = kubernetes.find_job(kubernetes.start_workload(JOBSET))
    (resource,) = [resource for resource in cluster.resources if resource.kind == "JobSet"]
    resource.version = "v1"
    with pytest.raises(SchedulerUnavailable, match="404"):
        job.cancel()
    job.cancel()
    resource.version = "v1alpha2"
    wait_until(lambda: kubernetes.list_pods("train-1") == [])


@contextmanager
def unlocked(cluster: FakeCluster) -> Iterator[None]:
    """Let the server answer other requests during a fault."""
    cluster.storage.changed.release()
    try:
        yield
    finally:
        cluster.storage.changed.acquire()


def _works(call: Callable[[], object]) -> bool:
    try:
        call()
    except SchedulerUnavailable:
        return False
    return True


LACKS = f"in namespace {NAMESPACE} this receiver's Role lacks "


@pytest.mark.parametrize(
    ("verb", "resources", "rule"),
    [
        ("list", "pods", '{apiGroups: [""], resources: [pods], verbs: [list]}.'),
        ("patch", "", '{apiGroups: ["batch"], resources: [jobs], verbs: [get, patch]}, or the same for another kind.'),
    ],
)
def test_receiver_that_could_stop_nothing_does_not_start(
    kubernetes: KubernetesCluster,
    cluster: FakeCluster,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    resources: str,
    rule: str,
) -> None:
    """Without a verb on pods, or on any kind of workload, it ends and names the rule to add."""
    cluster.revoke_verb(verb, resources)
    cluster.revoke_verb("get", "jobs" if not resources else "secrets")
    (tmp_path / "token").write_text(TOKEN)
    connection = ["--api-server", kubernetes.server.url, "--token-file", str(tmp_path / "token")]
    assert main(["kubernetes", *connection, "--allow-namespace", NAMESPACE]) == USAGE
    assert LACKS + rule in capsys.readouterr().err


def test_verbs_that_some_stops_need_are_logged(
    kubernetes: KubernetesCluster, cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """A kind that is granted in part is named in the log; a kind that the Role leaves out is not."""
    check_permissions(kubernetes.connect(), {NAMESPACE})
    assert caplog.messages == []
    for verb, resource in (("patch", "jobs"), ("get", "jobsets"), ("patch", "jobsets")):
        cluster.revoke_verb(verb, resource)
    check_permissions(kubernetes.connect(), {NAMESPACE})
    assert caplog.messages == [LACKS + '{apiGroups: ["batch"], resources: [jobs], verbs: [patch]}']


@pytest.mark.parametrize("answers", [True, False])
def test_receiver_starts_where_it_cannot_know(
    kubernetes: KubernetesCluster, cluster: FakeCluster, caplog: pytest.LogCaptureFixture, answers: bool
) -> None:
    """It only warns while the API server does not answer, and for any namespace, where RoleBindings may grant it."""
    cluster.faults += [] if answers else [make_fault(503)]
    check_permissions(kubernetes.connect(), None if answers else {NAMESPACE})
    warning = "in all namespaces this receiver's Role lacks" if answers else "permissions are not checked: "
    assert caplog.messages[0].startswith(warning)
