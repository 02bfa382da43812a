"""The fake API server answers as a real one does: the same requests to both, the same answers from both."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.programs import wait_until
from tests.clients.receivers.kubernetes.admin import MERGE, definitions
from tests.clients.receivers.kubernetes.cluster import RECEIVER, Server, manifests
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


class Speaker:
    """Sends requests to one server, and keeps of the answers what does not depend on when and where."""

    def __init__(self, url: str, verify: Any) -> None:
        headers = {"authorization": f"Bearer {ADMIN}"}
        self.http = httpx.Client(base_url=url, headers=headers, verify=verify, timeout=30, trust_env=False)
        self.uids: dict[str, str] = {}

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        content = None if body is None else json.dumps(body).encode()
        if content is not None:
            headers = {
                "content-type": "application/json",
                **{name.replace("_", "-"): one for name, one in headers.items()},
            }
        response = self.http.request(method, path, content=content, headers=headers)
        try:
            found = response.json()
        except ValueError:
            return response.status_code, "no JSON"
        return response.status_code, _stripped(found)

    def merge(self, path: str, change: Json) -> tuple[int, Any]:
        return self("PATCH", path, change, **{"content_type": MERGE["content-type"]})

    def raw(self, path: str) -> Json:
        return dict(self.http.get(path).raise_for_status().json())

    def watched(self, path: str, version: str) -> list[tuple[str, str]]:
        """What a watch tells: type and name, or type and code."""
        told = []
        params = {"watch": "1", "resourceVersion": version, "timeoutSeconds": "1", "labelSelector": "app=a"}
        with self.http.stream("GET", path, params=params) as response:
            if not response.is_success:
                return [("ERROR", str(response.status_code))]
            for line in response.iter_lines():
                event = json.loads(line)
                thing = event["object"]
                told.append((event["type"], str(thing.get("code") or thing["metadata"].get("name"))))
        return told


def _stripped(found: Any) -> Any:
    """A refusal by its code, reason and what it is about; an object by what was asked for and what was filled in."""
    if not isinstance(found, dict):
        return type(found).__name__
    if found.get("kind") == "Status":
        details = found.get("details") or {}
        return {"reason": found.get("reason"), "name": details.get("name"), "kind": details.get("kind")}
    metadata = {name: value for name, value in (found.get("metadata") or {}).items() if name not in TIMES}
    metadata["is_being_deleted"] = "deletionTimestamp" in found.get("metadata", {})
    metadata.pop("labels", None)
    spec = found.get("spec") or {}
    told = {name: spec[name] for name in ("parallelism", "suspend", "nodeName", "note") if name in spec}
    return {"metadata": metadata, "spec": told, "has_status": bool((found.get("status") or {}).get("note"))}


@pytest.fixture(scope="module")
def speakers(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Speaker]]:
    """The fake one as old as the real one, and the real one."""
    fake = FakeCluster(tokens={ADMIN: "admin", TOKEN: RECEIVER}, knows_suspend=False)
    with FakeApiServer(fake) as running:
        both = [Speaker(running.url, True), Speaker(server.url, server.tls)]
        for one in both:
            one(
                "POST",
                "/api/v1/namespaces",
                {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "compared"}},
            )
            for definition in definitions():
                one("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
            wait_until(lambda one=one: one("GET", JOBSETS)[0] == 200)  # type: ignore[misc]
        yield both
        for one in both:
            one.http.close()


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


def bound(say: Speaker, name: str, grace: int = 30) -> Iterator[Any]:
    """A pod on a node."""
    yield say("POST", PODS, pod(name, terminationGracePeriodSeconds=grace))[0]
    target = {"apiVersion": "v1", "kind": "Node", "name": "node-1"}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
    yield say("POST", f"{PODS}/{name}/binding", binding)[0]
    yield say("POST", f"{PODS}/{name}/binding", binding)[0]


def missing(say: Speaker) -> Iterator[Any]:
    """Objects, kinds and groups that are not there."""
    yield say("GET", f"{JOBS}/nobody")
    yield say("PATCH", f"{JOBS}/nobody", {}, content_type=MERGE["content-type"])
    yield say("DELETE", f"{JOBS}/nobody")
    yield say("GET", "/apis/nobody.example/v1/namespaces/compared/things")[0]
    yield say("GET", "/apis/nobody.example")[0]
    yield say("GET", "/apis/batch/v1/namespaces/compared/nothings")[0]
    yield say("POST", "/apis/batch/v1/namespaces/nowhere/jobs", job("a"))[0]


def strangers(say: Speaker) -> Iterator[Any]:
    """Who is not known, and who may not."""
    yield say("GET", JOBS, authorization="Bearer wrong")
    yield say("GET", f"{JOBS}/nobody", authorization=f"Bearer {TOKEN}")
    yield say("GET", PODS, authorization=f"Bearer {TOKEN}")
    yield say("POST", JOBS, job("a"), authorization=f"Bearer {TOKEN}")


def granted(say: Speaker) -> Iterator[Any]:
    """What the manifest of deploy/ grants is granted, and no more."""
    for one in manifests("kubernetes/receiver-role.yaml"):
        kind = f"{one['kind'].lower()}s"
        one = {**one, "metadata": {**one["metadata"], "namespace": "compared"}}
        yield say("POST", f"/apis/rbac.authorization.k8s.io/v1/namespaces/compared/{kind}", one)[0]
    mine = {"authorization": f"Bearer {TOKEN}"}
    wait_until(lambda: say("GET", PODS, **mine)[0] == 200)
    yield say("GET", f"{JOBS}/nobody", **mine)[0]
    yield say("DELETE", f"{JOBS}/nobody", **mine)[0]
    yield say("GET", JOBS, **mine)[0]
    yield say("GET", "/api/v1/namespaces/compared/secrets/key", **mine)[0] in (403, 404)
    yield say("DELETE", f"{PODS}/nobody", **mine)[0]


def patches(say: Speaker) -> Iterator[Any]:
    """Merge patches of a Job: dropped fields, preconditions, wrong types, nulls."""
    yield say("POST", JOBS, job("patched"))
    yield say("POST", JOBS, job("patched"))
    here = f"{JOBS}/patched"
    before = say.raw(here)["metadata"]
    yield say.merge(here, {"spec": {"suspend": True}})
    yield say.merge(here, {"metadata": {"annotations": {"a": "1", "b": "2"}}})
    yield say.merge(here, {"metadata": {"annotations": {"a": None}}})
    yield say.merge(here, {"metadata": {"resourceVersion": before["resourceVersion"], "annotations": {"c": "3"}}})
    yield say.merge(here, {"metadata": {"uid": str(uuid.uuid4()), "annotations": {"c": "3"}}})
    yield say.merge(here, {"spec": {"parallelism": -1}})
    yield say.merge(here, {"spec": {"parallelism": 0}, "metadata": {"uid": before["uid"]}})
    yield say("PATCH", here, {"spec": {"parallelism": 0}}, content_type="text/plain")[0]
    yield say("POST", JOBS, {**job("x"), "kind": "Pod"})[0]
    yield say("POST", JOBS, [1])[0]


def custom(say: Speaker) -> Iterator[Any]:
    """Objects of a definition: fields that nobody described are kept, status is written apart."""
    yield say("POST", JOBSETS, jobset("one"))
    here = f"{JOBSETS}/one"
    yield say.merge(here, {"spec": {"suspend": True}, "status": {"note": "a"}})
    yield say.merge(f"{here}/status", {"spec": {"suspend": False}, "status": {"note": "a"}})
    before = say.raw(here)["metadata"]
    yield say.merge(here, {"metadata": {"labels": {"a": "b"}}})[0]
    yield say.merge(here, {"metadata": {"resourceVersion": before["resourceVersion"]}, "spec": {"note": "b"}})
    yield say.merge(here, {"metadata": {"uid": str(uuid.uuid4())}, "spec": {"note": "b"}})
    options = {"apiVersion": "v1", "kind": "DeleteOptions"}
    yield say("DELETE", here, {**options, "preconditions": {"uid": str(uuid.uuid4())}})
    yield say("DELETE", here, {**options, "preconditions": {"uid": before["uid"]}})[0]
    yield say("GET", here)


def graces(say: Speaker) -> Iterator[Any]:
    """A pod on a node is asked to go, and goes when its node says so or nobody waits for it any more."""
    options = {"apiVersion": "v1", "kind": "DeleteOptions"}
    yield list(bound(say, "graced"))
    here = f"{PODS}/graced"
    yield say.merge(here, {"spec": {"nodeName": "node-2"}})[0]
    yield say("DELETE", here, options)[0]
    yield say("GET", here)
    yield say("DELETE", here, {**options, "gracePeriodSeconds": 60})[0]
    yield say.raw(here)["metadata"]["deletionGracePeriodSeconds"]
    yield say("DELETE", here, {**options, "gracePeriodSeconds": 5})[0]
    yield say.raw(here)["metadata"]["deletionGracePeriodSeconds"]
    yield say("DELETE", here, {**options, "preconditions": {"uid": str(uuid.uuid4())}, "gracePeriodSeconds": 0})
    yield say("DELETE", here, {**options, "gracePeriodSeconds": 0})[0]
    yield say("GET", here)[0]
    yield say("POST", PODS, pod("unbound"))[0]
    yield say("DELETE", f"{PODS}/unbound", options)[0]
    yield say("GET", f"{PODS}/unbound")[0]


def foreground(say: Speaker) -> Iterator[Any]:
    """What is deleted in the foreground stays until what belongs to it has gone."""
    yield say("POST", JOBSETS, jobset("owner"))[0]
    here = f"{JOBSETS}/owner"
    owner = say.raw(here)
    reference = {"apiVersion": owner["apiVersion"], "kind": "JobSet", "name": "owner", "uid": owner["metadata"]["uid"]}
    owned = pod("owned", terminationGracePeriodSeconds=30)
    owned["metadata"]["ownerReferences"] = [{**reference, "controller": True, "blockOwnerDeletion": True}]
    yield say("POST", PODS, owned)[0]
    target = {"apiVersion": "v1", "kind": "Node", "name": "node-1"}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "owned"}, "target": target}
    yield say("POST", f"{PODS}/owned/binding", binding)[0]
    options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
    yield say("DELETE", here, options)[0]
    yield say("GET", here)[1]["metadata"]["is_being_deleted"]
    wait_until(lambda: say("GET", f"{PODS}/owned")[1]["metadata"]["is_being_deleted"])
    yield say("GET", here)[0]
    yield say("DELETE", f"{PODS}/owned", {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0})[0]
    wait_until(lambda: say("GET", here)[0] == 404)


def watches(say: Speaker) -> Iterator[Any]:
    """What a watch with a selector tells, and what it says of a version that is too old or none."""
    version = say.raw(PODS)["metadata"]["resourceVersion"]
    yield list(bound(say, "seen"))
    here = f"{PODS}/seen"
    yield say.merge(here, {"metadata": {"annotations": {"a": "1"}}})[0]
    yield say.merge(here, {"metadata": {"labels": {"app": "b"}}})[0]
    yield say.merge(here, {"metadata": {"labels": {"app": "a"}}})[0]
    yield say("POST", PODS, {**pod("unseen"), "metadata": {"name": "unseen", "labels": {"app": "b"}}})[0]
    yield say("DELETE", here, {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0})[0]
    yield say.watched(PODS, version)


EXCHANGES = [missing, strangers, granted, patches, custom, graces, foreground, watches]


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda one: str(one.__name__))
def test_fake_and_real_answer_the_same(
    speakers: list[Speaker], exchange: Callable[[Speaker], Iterator[Any]], tmp_path: Path
) -> None:
    """Status, reason and what it is about; of objects what is filled in, dropped, kept and counted."""
    fake, real = (list(exchange(one)) for one in speakers)
    assert fake == real
