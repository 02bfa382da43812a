"""The fake API server answers like a real one: the same requests to both get the same answers."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.clients.programs import wait_until
from tests.clients.receivers.kubernetes.admin import MERGE, make_definitions
from tests.clients.receivers.kubernetes.cluster import RECEIVER, ApiServer, load_manifest
from tests.clients.receivers.kubernetes.fake_api_server import FakeApiServer
from tests.clients.receivers.kubernetes.fake_cluster import ADMIN, FakeCluster
from tests.clients.receivers.kubernetes.real.control_plane import TOKEN

pytestmark = pytest.mark.real

Json = dict[str, Any]
PODS = "/api/v1/namespaces/compared/pods"
JOBS = "/apis/batch/v1/namespaces/compared/jobs"
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/compared/jobsets"
CONTAINER = {"name": "a", "image": "none", "command": ["sleep", "60"]}
POD_SPEC = {"containers": [CONTAINER], "restartPolicy": "Never"}
TIMES = ("creationTimestamp", "deletionTimestamp", "resourceVersion", "uid", "managedFields", "selfLink", "continue")


class Client:
    """Sends requests to one server, and drops from the answers what depends on time and server."""

    def __init__(self, url: str, verify: Any) -> None:
        headers = {"authorization": f"Bearer {ADMIN}"}
        self.http = httpx.Client(base_url=url, headers=headers, verify=verify, timeout=30, trust_env=False)
        self.uids: dict[str, str] = {}

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        content = None if body is None else json.dumps(body).encode()
        if content is not None:
            headers = {
                "content-type": "application/json",
                **{name.replace("_", "-"): value for name, value in headers.items()},
            }
        response = self.http.request(method, path, content=content, headers=headers)
        try:
            body = response.json()
        except ValueError:
            return response.status_code, "no JSON"
        return response.status_code, normalize(body)

    def merge(self, path: str, change: Json) -> tuple[int, Any]:
        return self("PATCH", path, change, **{"content_type": MERGE["content-type"]})

    def raw(self, path: str) -> Json:
        return dict(self.http.get(path).raise_for_status().json())


def normalize(body: Any) -> Any:
    """An error by its reason and object; an object by its requested and defaulted fields."""
    if not isinstance(body, dict):
        return type(body).__name__
    if body.get("kind") == "Status":
        details = body.get("details") or {}
        return {"reason": body.get("reason"), "name": details.get("name"), "kind": details.get("kind")}
    metadata = {name: value for name, value in (body.get("metadata") or {}).items() if name not in TIMES}
    metadata["is_being_deleted"] = "deletionTimestamp" in body.get("metadata", {})
    metadata.pop("labels", None)
    spec = body.get("spec") or {}
    fields = {name: spec[name] for name in ("parallelism", "suspend", "nodeName", "note") if name in spec}
    return {"metadata": metadata, "spec": fields, "has_status": bool((body.get("status") or {}).get("note"))}


@pytest.fixture(scope="module")
def clients(server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Client]]:
    """The fake server with the real one's version, and the real one."""
    fake = FakeCluster(tokens={ADMIN: "admin", TOKEN: RECEIVER}, knows_suspend=False)
    with FakeApiServer(fake) as running:
        both = [Client(running.url, True), Client(server.url, server.tls)]
        for client in both:
            client(
                "POST",
                "/api/v1/namespaces",
                {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "compared"}},
            )
            for definition in make_definitions():
                client("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
            wait_until(lambda client=client: client("GET", JOBSETS)[0] == 200)  # type: ignore[misc]
        yield both
        real, options = both[1], {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}
        for path in (JOBS, JOBSETS, PODS):  # the nodes of later tests would run them
            real("DELETE", path, options)
        wait_until(lambda: not real.raw(PODS)["items"])
        for client in both:
            client.http.close()


def job(name: str, **spec: Any) -> Json:
    template = {"metadata": {"labels": {"app": "a"}}, "spec": POD_SPEC}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": {"template": template, **spec}}


def pod(name: str, **spec: Any) -> Json:
    metadata = {"name": name, "labels": {"app": "a"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**POD_SPEC, **spec}}


def jobset(name: str) -> Json:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {"note": "a"},
    }


def create_bound_pod(call: Client, name: str, grace: int = 30) -> Iterator[Any]:
    """A pod bound to a node."""
    yield call("POST", PODS, pod(name, terminationGracePeriodSeconds=grace))[0]
    target = {"apiVersion": "v1", "kind": "Node", "name": "node-1"}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
    yield call("POST", f"{PODS}/{name}/binding", binding)[0]


def missing(call: Client) -> Iterator[Any]:
    """Objects, kinds and groups that do not exist."""
    yield call("GET", f"{JOBS}/nobody")
    yield call("PATCH", f"{JOBS}/nobody", {}, content_type=MERGE["content-type"])
    yield call("DELETE", f"{JOBS}/nobody")
    yield call("GET", "/apis/nobody.example/v1/namespaces/compared/things")[0]
    yield call("GET", "/apis/nobody.example")[0]
    yield call("GET", "/apis/batch/v1/namespaces/compared/nothings")[0]
    yield call("POST", "/apis/batch/v1/namespaces/nowhere/jobs", job("a"))[0]


def unauthorized(call: Client) -> Iterator[Any]:
    """An unknown token, and a user without permissions."""
    yield call("GET", JOBS, authorization="Bearer wrong")
    yield call("GET", f"{JOBS}/nobody", authorization=f"Bearer {TOKEN}")
    yield call("GET", PODS, authorization=f"Bearer {TOKEN}")
    yield call("POST", JOBS, job("a"), authorization=f"Bearer {TOKEN}")


def granted(call: Client) -> Iterator[Any]:
    """The permissions of the manifest of deploy/, and no more."""
    for item in load_manifest("kubernetes/receiver-role.yaml"):
        kind = f"{item['kind'].lower()}s"
        namespaced = {**item, "metadata": {**item["metadata"], "namespace": "compared"}}
        yield call("POST", f"/apis/rbac.authorization.k8s.io/v1/namespaces/compared/{kind}", namespaced)[0]
    receiver = {"authorization": f"Bearer {TOKEN}"}
    wait_until(lambda: call("GET", PODS, **receiver)[0] == 200)
    yield call("GET", f"{JOBS}/nobody", **receiver)[0]
    yield call("DELETE", f"{JOBS}/nobody", **receiver)[0]
    yield call("GET", JOBS, **receiver)[0]
    yield call("GET", "/api/v1/namespaces/compared/secrets/key", **receiver)[0] in (403, 404)
    yield call("DELETE", f"{PODS}/nobody", **receiver)[0]


def patches(call: Client) -> Iterator[Any]:
    """Merge patches of a Job: dropped fields, preconditions, wrong types and nulls."""
    yield call("POST", JOBS, job("patched"))
    yield call("POST", JOBS, job("patched"))
    here = f"{JOBS}/patched"
    before = call.raw(here)["metadata"]
    yield call.merge(here, {"spec": {"suspend": True}})
    yield call.merge(here, {"metadata": {"annotations": {"a": "1", "b": "2"}}})
    yield call.merge(here, {"metadata": {"annotations": {"a": None}}})
    yield call.merge(here, {"metadata": {"resourceVersion": before["resourceVersion"], "annotations": {"c": "3"}}})
    yield call.merge(here, {"metadata": {"uid": str(uuid.uuid4()), "annotations": {"c": "3"}}})
    yield call.merge(here, {"spec": {"parallelism": 0}, "metadata": {"uid": before["uid"]}})
    yield call("PATCH", here, {"spec": {"parallelism": 0}}, content_type="text/plain")[0]
    yield call("POST", JOBS, {**job("x"), "kind": "Pod"})[0]
    yield call("POST", JOBS, [1])[0]


def custom(call: Client) -> Iterator[Any]:
    """Custom resources: undescribed fields are kept, and the status is written separately."""
    yield call("POST", JOBSETS, jobset("one"))
    here = f"{JOBSETS}/one"
    yield call.merge(here, {"spec": {"suspend": True}, "status": {"note": "a"}})
    yield call.merge(f"{here}/status", {"spec": {"suspend": False}, "status": {"note": "a"}})
    before = call.raw(here)["metadata"]
    yield call.merge(here, {"metadata": {"labels": {"a": "b"}}})[0]
    yield call.merge(here, {"metadata": {"resourceVersion": before["resourceVersion"]}, "spec": {"note": "b"}})
    yield call.merge(here, {"metadata": {"uid": str(uuid.uuid4())}, "spec": {"note": "b"}})
    options = {"apiVersion": "v1", "kind": "DeleteOptions"}
    yield call("DELETE", here, {**options, "preconditions": {"uid": str(uuid.uuid4())}})
    yield call("DELETE", here, {**options, "preconditions": {"uid": before["uid"]}})[0]
    yield call("GET", here)


def graces(call: Client) -> Iterator[Any]:
    """A pod on a node is marked for deletion, and deleted by its node or after a shorter grace period."""
    options = {"apiVersion": "v1", "kind": "DeleteOptions"}
    yield list(create_bound_pod(call, "graced"))
    here = f"{PODS}/graced"
    yield call("DELETE", here, options)[0]
    yield call("GET", here)
    yield call("DELETE", here, {**options, "gracePeriodSeconds": 60})[0]
    yield call.raw(here)["metadata"]["deletionGracePeriodSeconds"]
    yield call("DELETE", here, {**options, "gracePeriodSeconds": 5})[0]
    yield call.raw(here)["metadata"]["deletionGracePeriodSeconds"]
    yield call("DELETE", here, {**options, "preconditions": {"uid": str(uuid.uuid4())}, "gracePeriodSeconds": 0})
    yield call("DELETE", here, {**options, "gracePeriodSeconds": 0})[0]
    yield call("GET", here)[0]
    yield call("POST", PODS, pod("unbound"))[0]
    yield call("DELETE", f"{PODS}/unbound", options)[0]
    yield call("GET", f"{PODS}/unbound")[0]


EXCHANGES = [missing, unauthorized, granted, patches, custom, graces]


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: str(exchange.__name__))
def test_fake_answers_like_the_real_server(clients: list[Client], exchange: Callable[[Client], Iterator[Any]]) -> None:
    """Status, reason and object of errors, and the defaulted, dropped and kept fields of objects, are the same."""
    fake, real = (list(exchange(client)) for client in clients)
    assert fake == real
