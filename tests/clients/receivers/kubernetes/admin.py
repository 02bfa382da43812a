"""An administrator of a cluster by plain HTTP, for tests, controllers and nodes."""

from __future__ import annotations

import ssl
from typing import Any

import httpx
from evalstop_client.receivers.kubernetes.kinds import KINDS, POD, WORKLOAD, Kind

from tests.fixtures.certificates import get_ssl_context

Json = dict[str, Any]
VERSIONS = {
    "": "v1",
    "batch": "v1",
    "jobset.x-k8s.io": "v1alpha2",
    "trainer.kubeflow.org": "v1alpha1",
    "kubeflow.org": "v1",
    "ray.io": "v1",
    "kueue.x-k8s.io": "v1beta1",
}
MERGE = {"content-type": "application/merge-patch+json"}
JSON = {"content-type": "application/json"}


def api_version(kind: Kind) -> str:
    return f"{kind.group}/{VERSIONS[kind.group]}" if kind.group else "v1"


def build_path(kind: Kind, namespace: str | None = None, name: str | None = None, part: str | None = None) -> str:
    """The path of a kind's objects, in all namespaces unless one is named."""
    parts = ["apis" if kind.group else "api", api_version(kind)]
    parts += ["namespaces", namespace] if namespace is not None else []
    return "/" + "/".join([*parts, kind.resource, *(segment for segment in (name, part) if segment is not None)])


class Admin:
    """Sends requests as an administrator, and raises on errors."""

    def __init__(self, url: str, token: str, tls: ssl.SSLContext | None = None) -> None:
        headers = {"authorization": f"Bearer {token}"}
        trusted = tls or get_ssl_context()
        self.http = httpx.Client(base_url=url, headers=headers, timeout=30, verify=trusted, trust_env=False)

    def close(self) -> None:
        self.http.close()

    def get(self, kind: Kind, namespace: str, name: str) -> Json | None:
        response = self.http.get(build_path(kind, namespace, name))
        return None if response.status_code == 404 else dict(response.raise_for_status().json())

    def list(self, kind: Kind, namespace: str | None = None) -> list[Json]:
        items: list[Json] = self.http.get(build_path(kind, namespace)).raise_for_status().json()["items"]
        return items

    def read_version(self) -> str:
        """The version of the whole cluster's state: every change of an object gives it another one."""
        return str(self.http.get(build_path(POD)).raise_for_status().json()["metadata"]["resourceVersion"])

    def create(self, kind: Kind, namespace: str, item: Json) -> Json:
        body = {"apiVersion": api_version(kind), "kind": kind.name, **item}
        return dict(self.http.post(build_path(kind, namespace), json=body).raise_for_status().json())

    def patch(self, kind: Kind, item: Json, change: Json, part: str | None = None) -> Json | None:
        """None if the object is gone."""
        path = build_path(kind, item["metadata"]["namespace"], item["metadata"]["name"], part)
        response = self.http.patch(path, json=change, headers=MERGE)
        return None if response.status_code == 404 else dict(response.raise_for_status().json())

    def set_status(self, kind: Kind, item: Json, status: Json) -> None:
        """Replace an object's status."""
        self.patch(kind, item, {"status": status}, "status")

    def delete(self, kind: Kind, item: Json, **options: Any) -> None:
        path = build_path(kind, item["metadata"]["namespace"], item["metadata"]["name"])
        response = self.http.request("DELETE", path, json={"apiVersion": "v1", "kind": "DeleteOptions", **options})
        if response.status_code != 404:
            response.raise_for_status()

    def apply(self, item: Json) -> None:
        """Create an object of a manifest unless it exists."""
        kind, group = item["kind"], item["apiVersion"].rpartition("/")[0]
        root = f"/apis/{item['apiVersion']}" if group else "/api/v1"
        namespace = item["metadata"].get("namespace")
        where = f"/namespaces/{namespace}" if namespace else ""
        response = self.http.post(f"{root}{where}/{kind.lower()}s", json=item)
        if response.status_code != 409:
            response.raise_for_status()

    def bind(self, pod: Json, node: str) -> None:
        metadata = {"name": pod["metadata"]["name"], "namespace": pod["metadata"]["namespace"]}
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
        response = self.http.post(build_path(POD, metadata["namespace"], metadata["name"], "binding"), json=body)
        if response.status_code not in (404, 409):
            response.raise_for_status()


def make_definitions() -> list[Json]:
    """A minimal definition, with a status, of each kind that is not built into Kubernetes."""
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    items = []
    for kind in (*KINDS, WORKLOAD):
        if kind.group == "batch":
            continue
        version: Json = {
            "name": VERSIONS[kind.group],
            "served": True,
            "storage": True,
            "schema": {"openAPIV3Schema": anything},
            "subresources": {"status": {}},
        }
        names = {"plural": kind.resource, "singular": kind.name.lower(), "kind": kind.name}
        items.append(
            {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": {"name": f"{kind.resource}.{kind.group}"},
                "spec": {"group": kind.group, "scope": "Namespaced", "names": names, "versions": [version]},
            }
        )
    return items
