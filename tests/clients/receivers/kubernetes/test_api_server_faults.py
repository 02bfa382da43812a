"""What the API server may answer at the worst time, and what the receiver makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest
from evalstop_client.errors import RequestRefused, SchedulerUnavailable
from evalstop_client.receivers import Job, Present
from evalstop_client.receivers.kubernetes.job_control import KubernetesJobControl
from evalstop_client.receivers.kubernetes.kinds import JOB, JOBSET, POD

from tests.clients.programs import wait_until
from tests.clients.receivers.conformance import find_job, make_stop_request, wait_until_gone
from tests.clients.receivers.kubernetes.admin import Json
from tests.clients.receivers.kubernetes.cluster import NAMESPACE, RECEIVER, KubernetesCluster
from tests.clients.receivers.kubernetes.fake_api_server import FakeApiServer
from tests.clients.receivers.kubernetes.fake_cluster import FakeCluster
from tests.clients.receivers.kubernetes.fake_requests import Request
from tests.clients.receivers.kubernetes.fake_storage import Answered

Fault = Callable[[Request], None]
COMPLETE = {"conditions": [{"type": "Complete", "status": "True"}]}


@dataclass
class Scene:
    """A job that runs, and was found."""

    world: KubernetesCluster
    job_control: KubernetesJobControl
    labels: dict[str, str]
    job: Job
    item: Json

    def cancel(self) -> None:
        self.job_control.cancel_job(self.job, make_stop_request(self.labels))


@pytest.fixture
def scene(kubernetes: KubernetesCluster) -> Scene:
    item = kubernetes.start()
    job_control, labels = kubernetes.job_control(), kubernetes.labels(item)
    return Scene(kubernetes, job_control, labels, find_job(job_control, labels), item)


def answering(code: int, reason: str = "Trouble", *, method: str = "", times: int = 10**6, **headers: str) -> Fault:
    """A fault: the receiver's requests of one method are answered so, the first few or all."""
    left = iter(range(times))

    def fault(asked: Request) -> None:
        if asked.user == RECEIVER and method in ("", asked.method) and next(left, None) is not None:
            answered = Answered(code, reason, f"{reason} for the test")
            answered.headers = {name.replace("_", "-"): value for name, value in headers.items()}
            raise answered

    return fault


@pytest.mark.parametrize("code", [401, 408, 429, 500, 502, 503, 504])
def test_server_that_cannot_answer_now_is_away(scene: Scene, cluster: FakeCluster, code: int) -> None:
    """It is asked again, whatever was asked, and nothing is taken for gone; when it is well again all goes on."""
    cluster.faults.append(answering(code))
    for ask in (
        lambda: scene.job_control.find_job(make_stop_request(scene.labels)),
        scene.cancel,
        lambda: scene.job_control.kill_job(scene.job),
        lambda: scene.job_control.request_checkpoint(scene.job, make_stop_request(scene.labels)),
        lambda: scene.job_control.check_job(scene.job),
        lambda: scene.job_control.resume_job(scene.job),
    ):
        with pytest.raises(SchedulerUnavailable, match=str(code)):
            ask()
    cluster.faults.clear()
    scene.cancel()
    wait_until_gone(scene.job_control, scene.job)


@pytest.mark.parametrize("code", [429, 503])
def test_patience_that_is_asked_for_is_kept(scene: Scene, cluster: FakeCluster, code: int) -> None:
    """With Retry-After nothing at all is sent until it is over."""
    cluster.faults.append(answering(code, times=1, retry_after="1"))
    with pytest.raises(SchedulerUnavailable):
        scene.cancel()
    cluster.requests.clear()
    with pytest.raises(SchedulerUnavailable, match="asked to retry"):
        scene.cancel()
    assert [one for one in cluster.requests if one[2] == RECEIVER] == []
    wait_until(lambda: _works(scene.cancel))


@pytest.mark.parametrize("code", [400, 405, 422])
def test_what_will_never_be_taken_is_refused(scene: Scene, cluster: FakeCluster, code: int) -> None:
    """It ends the stop as failed: asking again would change nothing."""
    cluster.faults.append(answering(code, "Invalid", method="PATCH"))
    with pytest.raises(RequestRefused, match="Invalid for the test"):
        scene.cancel()


def test_conflict_is_read_anew_and_tried_again(scene: Scene, cluster: FakeCluster) -> None:
    """Somebody else changes the job between reading and writing: for ever, and then twice."""
    count, most = 0, 10**6

    def meddle(asked: Request) -> None:
        nonlocal count
        if asked.method == "PATCH" and asked.user == RECEIVER and count < most:
            count += 1
            touched = {"metadata": {"annotations": {"touched": str(count)}}}
            with unlocked(cluster):
                scene.world.admin.patch(JOB, scene.item, touched)

    cluster.faults.append(meddle)
    with pytest.raises(SchedulerUnavailable, match="keeps being changed"):
        scene.cancel()
    most = count + 2
    scene.cancel()
    assert scene.world.now(JOB, scene.item)["spec"]["suspend"] is True


def test_pod_that_comes_before_the_word_of_its_controller_is_seen(scene: Scene, cluster: FakeCluster) -> None:
    """All pods have gone, one more is made, and then the controller says that it makes no more."""
    scene.job_control.check_job(scene.job)
    (pod,) = scene.world.pods("train-1")
    metadata = {name: pod["metadata"][name] for name in ("labels", "ownerReferences")}
    late = {"metadata": {**metadata, "name": "train-1-late"}, "spec": {**pod["spec"], "nodeName": "another-node"}}
    made: list[Json] = []

    def make(asked: Request) -> None:
        if asked.user == RECEIVER and asked.path.endswith("/jobs/train-1") and not made:
            with unlocked(cluster):
                made.append(scene.world.admin.create(POD, NAMESPACE, late))

    scene.cancel()
    wait_until(lambda: scene.world.pods("train-1") == [])
    wait_until(lambda: JOB.list_states(scene.world.now(JOB, scene.item)) == {"Suspended"})
    cluster.faults.append(make)
    assert all(isinstance(scene.job_control.check_job(scene.job), Present) for _ in range(3))


@pytest.mark.parametrize(
    ("verb", "plural", "do"),
    [
        ("get", "jobs", lambda scene: scene.job_control.find_job(make_stop_request(scene.labels))),
        ("list", "pods", lambda scene: scene.job_control.find_job(make_stop_request(scene.labels))),
        ("patch", "jobs", lambda scene: scene.cancel()),
        (
            "patch",
            "pods",
            lambda scene: scene.job_control.request_checkpoint(scene.job, make_stop_request(scene.labels)),
        ),
        ("delete", "pods", lambda scene: scene.job_control.kill_job(scene.job)),
    ],
)
def test_missing_permission_is_named(
    scene: Scene, cluster: FakeCluster, verb: str, plural: str, do: Callable[[Scene], None]
) -> None:
    """By verb, resource and namespace, as a Role has to grant it."""
    _revoke(cluster, verb, plural)
    if verb == "delete":  # what its controller has finished with, nobody else deletes
        scene.world.admin.status(JOB, scene.item, COMPLETE)
    full = f"{plural}.batch" if plural == "jobs" else plural
    with pytest.raises(RequestRefused, match=rf"verb '{verb}' on {full} in namespace {NAMESPACE} is not granted"):
        do(scene)


def test_permission_that_is_lost_while_it_looks_can_come_back(scene: Scene, cluster: FakeCluster) -> None:
    """The stop goes on then: a job that may not be looked at is not gone, and not given up."""
    scene.job_control.check_job(scene.job)
    _revoke(cluster, "watch", "pods")
    with pytest.raises(SchedulerUnavailable, match="verb 'watch' on pods"):
        scene.job_control.check_job(scene.job)
    scene.cancel()
    _revoke(cluster, "watch", "pods", grant=True)
    wait_until_gone(scene.job_control, scene.job)


def test_watch_that_is_cut_in_the_middle_is_gone_on_with(scene: Scene, cluster: FakeCluster) -> None:
    """Half a line is no event; the next watch tells it whole, and how the pod ended is known."""
    scene.job_control.check_job(scene.job)
    cluster.watch_cuts_after = 1
    scene.cancel()
    end = wait_until_gone(scene.job_control, scene.job)
    assert cluster.watch_cuts_after is None
    assert end.details["exit_code"] == 7


def test_watch_that_begins_too_late_begins_with_a_list(scene: Scene, cluster: FakeCluster) -> None:
    """What happened meanwhile is forgotten by the server: 410, and all is listed anew."""
    scene.job_control.check_job(scene.job)
    scene.cancel()
    wait_until(lambda: scene.world.pods("train-1") == [])
    cluster.storage.forget_the_past()
    assert wait_until_gone(scene.job_control, scene.job).state == "Suspended"


def test_server_that_is_restarted_in_the_middle(scene: Scene, api_server: FakeApiServer, cluster: FakeCluster) -> None:
    """While it is down it is away; when it is back the stop goes on from where it was."""
    scene.job_control.check_job(scene.job)
    port = api_server.server_address[1]
    api_server.__exit__()
    for ask in (scene.cancel, lambda: scene.job_control.check_job(scene.job)):
        with pytest.raises(SchedulerUnavailable):
            ask()
    with ExitStack() as stack:
        stack.enter_context(FakeApiServer(cluster, port))
        wait_until(lambda: _works(scene.cancel))
        assert wait_until_gone(scene.job_control, scene.job).details["exit_code"] == 7


def test_answer_that_is_no_object_is_no_answer(scene: Scene, cluster: FakeCluster) -> None:
    """What a proxy in between says with status 200 says nothing about a job."""

    def page(asked: Request) -> None:
        answered = Answered(200, "", "")
        answered.body = {}
        if asked.user == RECEIVER:
            raise answered

    cluster.faults.append(page)
    for ask in (
        lambda: scene.job_control.find_job(make_stop_request(scene.labels)),
        lambda: scene.job_control.check_job(scene.job),
    ):
        with pytest.raises(SchedulerUnavailable, match="no object"):
            ask()
    cluster.faults.clear()


def test_kind_that_the_cluster_does_not_know_is_refused(scene: Scene, cluster: FakeCluster) -> None:
    """Without the definition there is nothing to stop, and it is said which one is missing."""
    cluster.resources = [one for one in cluster.resources if one.kind != "JobSet"]
    with pytest.raises(RequestRefused, match=r"knows no jobsets\.jobset\.x-k8s\.io"):
        scene.job_control.find_job(make_stop_request({**scene.labels, "kubernetes_kind": "JobSet"}))


def test_definition_that_is_served_otherwise_is_found_again(
    kubernetes: KubernetesCluster, cluster: FakeCluster
) -> None:
    """An operator is upgraded in the middle of a stop: the version of its API is discovered anew."""
    item = kubernetes.start(JOBSET)
    job_control, labels = kubernetes.job_control(), kubernetes.labels(item)
    job = find_job(job_control, labels)
    (resource,) = [one for one in cluster.resources if one.kind == "JobSet"]
    resource.version = "v1"
    with pytest.raises(SchedulerUnavailable, match="404"):
        job_control.cancel_job(job, make_stop_request(labels))
    job_control.cancel_job(job, make_stop_request(labels))
    resource.version = "v1alpha2"
    wait_until(lambda: kubernetes.pods("train-1") == [])


@contextmanager
def unlocked(cluster: FakeCluster) -> Iterator[None]:
    """Let others be answered in the middle of a fault."""
    cluster.storage.changed.release()
    try:
        yield
    finally:
        cluster.storage.changed.acquire()


def _revoke(cluster: FakeCluster, verb: str, plural: str, grant: bool = False) -> None:
    """Take a verb away from the receiver, or give it back."""
    for (key, _, _), role in cluster.storage.objects.items():
        if key.endswith("/roles"):
            for rule in role["rules"]:
                if rule["resources"] == [plural] and rule["apiGroups"] in (["batch"], [""]):
                    rule["verbs"] = [one for one in rule["verbs"] if one != verb] + ([verb] if grant else [])


def _works(do: Callable[[], object]) -> bool:
    try:
        do()
    except SchedulerUnavailable:
        return False
    return True
