"""The answers of a fake Kubernetes API server, as strict as the real one.

fake_storage.py holds its objects; who may use them is at the end. The server implements resource versions,
merge patches, preconditions, grace periods, garbage collection and RBAC.
Controllers and nodes use it over HTTP, as in a cluster. real/test_fake_api_server.py compares its answers with a real
server's.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tests.clients.receivers.kubernetes.fake_requests import (
    JOB_FIELDS,
    SINCE_1_21,
    Request,
    Resource,
    apply_merge_patch,
    matches_fields,
    matches_selector,
)
from tests.clients.receivers.kubernetes.fake_storage import FakeStorage, Json, StatusError, format_time

ADMIN = "admin-token"
MERGE_PATCH = "application/merge-patch+json"


@dataclass
class FakeCluster:
    """The server's state. `faults` are called first, and may raise an error or an answer."""

    tokens: dict[str, str] = field(default_factory=lambda: {ADMIN: "admin"})
    knows_suspend: bool = True
    faults: list[Callable[[Request], None]] = field(default_factory=list)
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # verb, path, user

    def __post_init__(self) -> None:
        self.storage = FakeStorage()
        self.closing = False
        fields = JOB_FIELDS | (SINCE_1_21 if self.knows_suspend else frozenset())
        self.resources = [
            Resource("", "v1", "namespaces", "Namespace", namespaced=False),
            Resource("", "v1", "nodes", "Node", namespaced=False),
            Resource("", "v1", "pods", "Pod"),
            Resource("", "v1", "events", "Event", has_status=False),
            Resource("", "v1", "serviceaccounts", "ServiceAccount", has_status=False),
            Resource("batch", "v1", "jobs", "Job", fields=fields),
            Resource(ACCESS, "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview", namespaced=False),
            Resource("rbac.authorization.k8s.io", "v1", "roles", "Role", has_status=False),
            Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding", has_status=False),
            Resource(
                "rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole", namespaced=False, has_status=False
            ),
            Resource(
                "rbac.authorization.k8s.io",
                "v1",
                "clusterrolebindings",
                "ClusterRoleBinding",
                namespaced=False,
                has_status=False,
            ),
            Resource(
                "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
            ),
        ]

    def answer(self, request: Request) -> tuple[int, Json | str]:
        with self.storage.changed:
            self.route(request)
            for fault in list(self.faults):
                fault(request)
            if request.resource is None:
                return 200, self._describe_api(request.path)
            verb = self.verb(request)
            self.requests.append((verb, request.path, request.user))
            if request.resource.group == ACCESS:
                return 201, review_access(self.storage, request)
            authorize(self.storage, request, verb)
            if request.resource.namespaced and request.method == "POST" and not request.subresource:
                self.storage.read("/namespaces", "", request.namespace, "namespaces", "")
            code, body = getattr(self, f"_{verb}")(request)
            self.storage.collect_garbage()
            self.storage.changed.notify_all()
            return code, copy.deepcopy(body)

    def verb(self, request: Request) -> str:
        if request.method == "GET" and not request.name:
            return "list"
        named = {"GET": "get", "PATCH": "patch", "DELETE": "delete"}
        verb = named.get(request.method) if request.name else None
        if request.method == "POST" and (not request.name or request.subresource == "binding"):
            verb = "create"
        if verb is None:
            raise StatusError(
                405, "MethodNotAllowed", "the server does not allow this method on the requested resource"
            )
        return verb

    def _get(self, request: Request) -> tuple[int, Json]:
        item = self.storage.read(self._get_key(request), request.namespace, request.name, *self._get_names(request))
        return 200, item

    def _list(self, request: Request) -> tuple[int, Json]:
        assert request.resource is not None
        labels, fields = request.query.get("labelSelector", ""), request.query.get("fieldSelector", "")
        items = [
            item
            for item in self._list_objects(request)
            if matches_selector(item, labels) and matches_fields(item, fields)
        ]
        kind = f"{request.resource.kind}List"
        metadata = {"resourceVersion": str(self.storage.version)}
        return 200, {"kind": kind, "apiVersion": request.resource.api_version, "metadata": metadata, "items": items}

    def _create(self, request: Request) -> tuple[int, Json]:
        assert request.resource is not None
        self._require_media_type(request, "application/json")
        body, resource = request.body(), request.resource
        if request.subresource == "binding":
            pod = self.storage.read("/pods", request.namespace, request.name, "pods", "")
            pod["spec"]["nodeName"] = body["target"]["name"]
            pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
            self.storage.write("/pods", pod)
            return 201, {"kind": "Status", "status": "Success", "code": 201}
        if (body.get("apiVersion"), body.get("kind")) != (resource.api_version, resource.kind):
            raise StatusError(400, "BadRequest", f"{body.get('kind')} does not match what is expected: {resource.kind}")
        metadata = body.setdefault("metadata", {})
        metadata["namespace"] = request.namespace
        name = metadata.get("name") or (metadata.get("generateName", "") + uuid.uuid4().hex[:5])
        if (self._get_key(request), request.namespace, name) in self.storage.objects:
            plural, group = self._get_names(request)
            message = f'{plural}{group and "."}{group} "{name}" already exists'
            raise StatusError(409, "AlreadyExists", message, name=name, group=group, kind=plural)
        if not request.namespace:
            del metadata["namespace"]
        metadata |= {
            "name": name,
            "uid": str(uuid.uuid4()),
            "creationTimestamp": format_time(datetime.now(UTC)),
        }
        if resource.is_custom:
            metadata["generation"] = 1
        if resource.has_status:
            body.pop("status", None)
        self._apply_defaults(resource, body)
        self.storage.write(self._get_key(request), body)
        if resource.kind == "CustomResourceDefinition":
            self._add_resource(body)
        return 201, body

    def _patch(self, request: Request) -> tuple[int, Json]:
        assert request.resource is not None
        self._require_media_type(request, MERGE_PATCH)
        change = request.body()
        key = self._get_key(request)
        before = self.storage.read(key, request.namespace, request.name, *self._get_names(request))
        after = apply_merge_patch(before, change)
        asked = change.get("metadata") or {}
        if asked.get("uid", before["metadata"]["uid"]) != before["metadata"]["uid"]:
            message = f'{request.resource.kind} "{request.name}" is invalid: metadata.uid: field is immutable'
            raise StatusError(422, "Invalid", message, name=request.name, kind=request.resource.kind)
        if asked.get("resourceVersion", before["metadata"]["resourceVersion"]) != before["metadata"]["resourceVersion"]:
            message = "the object has been modified; please apply your changes to the latest version and try again"
            raise self._make_conflict(request, message)
        for name in ("name", "namespace", "creationTimestamp", "deletionTimestamp", "generation"):
            if name in before["metadata"]:
                after["metadata"][name] = before["metadata"][name]
        if request.subresource == "status":
            after = {**before, "status": after.get("status", {})}
        elif request.resource.has_status:
            after = {**after, "status": before.get("status", {})}
        self._apply_defaults(request.resource, after)
        if request.resource.is_custom and after.get("spec") != before.get("spec"):
            after["metadata"]["generation"] = before["metadata"]["generation"] + 1
        if after != before:
            self.storage.write(key, after)
        return 200, after

    def _delete(self, request: Request) -> tuple[int, Json]:
        self._require_media_type(request, "application/json")
        options = request.body()
        key = self._get_key(request)
        item = self.storage.read(key, request.namespace, request.name, *self._get_names(request))
        uid = (options.get("preconditions") or {}).get("uid")
        if uid is not None and uid != item["metadata"]["uid"]:
            message = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {item['metadata']['uid']}"
            raise self._make_conflict(request, message, request.resource.kind if request.resource else "")
        self.storage.remove(key, item, options.get("gracePeriodSeconds"))
        return 200, item

    def _list_objects(self, request: Request) -> list[Json]:
        key = self._get_key(request)
        return [
            item
            for (item_key, namespace, _), item in sorted(self.storage.objects.items())
            if item_key == key and request.namespace in ("", namespace)
        ]

    def _apply_defaults(self, resource: Resource, item: Json) -> None:
        """Drop unknown fields, as the server does without validation, and fill in defaults."""
        if resource.fields is not None:
            item["spec"] = {name: value for name, value in item.get("spec", {}).items() if name in resource.fields}
        if resource.kind == "Job":
            labels = {"controller-uid": item["metadata"]["uid"], "job-name": item["metadata"]["name"]}
            template = item["spec"]["template"].setdefault("metadata", {})
            if not item["spec"].get("manualSelector"):
                template["labels"] = {**template.get("labels", {}), **labels}
            item["spec"].setdefault("parallelism", 1)
            item["spec"].setdefault("selector", {"matchLabels": {"controller-uid": item["metadata"]["uid"]}})
            if self.knows_suspend:
                item["spec"].setdefault("suspend", False)
        if resource.kind == "Pod":
            item["spec"].setdefault("terminationGracePeriodSeconds", 30)
            item.setdefault("status", {}).setdefault("phase", "Pending")

    def route(self, request: Request) -> None:
        """Set the user, resource, namespace and name of a request from its token and path."""
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token not in self.tokens:
            raise StatusError(401, "Unauthorized", "Unauthorized")
        request.user = self.tokens[token]
        parts = request.path.strip("/").split("/")
        group, rest = ("", parts[1:]) if parts[0] == "api" else ("/".join(parts[1:2]), parts[2:])
        if parts[0] not in ("api", "apis") or len(rest) < 2:
            return
        version, *rest = rest
        if rest[0] == "namespaces" and len(rest) > 2:
            request.namespace, rest = rest[1], rest[2:]
        request.name, request.subresource = ([*rest[1:], "", ""])[:2]
        for resource in self.resources:
            if (resource.group, resource.version, resource.plural) == (group, version, rest[0]):
                request.resource = resource
                return
        raise StatusError(404, "NotFound", "the server could not find the requested resource")

    def revoke_verb(self, verb: str, plural: str, *, grant: bool = False) -> None:
        """Take a verb on these resources, or on all (""), from every Role, or grant it again."""
        for (key, _, _), role in self.storage.objects.items():
            for rule in role["rules"] if key.endswith("/roles") else []:
                if plural in ("", *rule["resources"]):
                    kept = [granted for granted in rule["verbs"] if granted != verb]
                    rule["verbs"] = [*kept, *([verb] if grant else [])]

    def _describe_api(self, path: str) -> Json:
        parts = path.strip("/").split("/")
        served = [resource for resource in self.resources if resource.group == parts[1]] if len(parts) in (2, 3) else []
        if parts[0] != "apis" or not served:
            raise StatusError(404, "NotFound", "the server could not find the requested resource")
        versions = sorted({resource.version for resource in served})
        if len(parts) == 2:
            offered = [{"groupVersion": f"{parts[1]}/{version}", "version": version} for version in versions]
            return {"kind": "APIGroup", "name": parts[1], "versions": offered, "preferredVersion": offered[-1]}
        listed = [
            {"name": resource.plural, "kind": resource.kind, "namespaced": resource.namespaced} for resource in served
        ]
        return {"kind": "APIResourceList", "groupVersion": "/".join(parts[1:]), "resources": listed}

    def _add_resource(self, definition: Json) -> None:
        spec = definition["spec"]
        for version in spec["versions"]:
            names = spec["names"]
            has_status = "status" in version.get("subresources", {})
            resource = Resource(
                spec["group"], version["name"], names["plural"], names["kind"], has_status=has_status, is_custom=True
            )
            self.resources.append(resource)

    def _get_key(self, request: Request) -> str:
        assert request.resource is not None
        return f"{request.resource.group}/{request.resource.plural}"

    def _get_names(self, request: Request) -> tuple[str, str]:
        assert request.resource is not None
        return request.resource.plural, request.resource.group

    def _make_conflict(self, request: Request, why: str, kind: str = "") -> StatusError:
        plural, group = self._get_names(request)
        message = f'Operation cannot be fulfilled on {plural}{group and "."}{group} "{request.name}": {why}'
        return StatusError(409, "Conflict", message, name=request.name, group=group, kind=kind or plural)

    def _require_media_type(self, request: Request, media_type: str) -> None:
        given = request.headers.get("content-type", "").partition(";")[0]
        if request.raw and given != media_type:
            message = f"the body of the request was in an unknown format - accepted media types include: {media_type}"
            raise StatusError(415, "UnsupportedMediaType", message)


ACCESS = "authorization.k8s.io"


def review_access(storage: FakeStorage, request: Request) -> Json:
    """Whether who asks may do what the review names."""
    review = request.body()
    asked = review["spec"]["resourceAttributes"]
    granted = _is_granted(storage, request.user, asked["namespace"], asked["group"], asked["resource"], asked["verb"])
    return {**review, "status": {"allowed": granted}}


def authorize(storage: FakeStorage, request: Request, verb: str) -> None:
    resource = request.resource
    assert resource is not None
    plural = f"{resource.plural}/{request.subresource}" if request.subresource else resource.plural
    if _is_granted(storage, request.user, request.namespace, resource.group, plural, verb):
        return
    full_name = f"{resource.plural}{resource.group and '.'}{resource.group}"
    named = f' "{request.name}"' if request.name else ""
    raise StatusError(
        403,
        "Forbidden",
        f'{full_name}{named} is forbidden: User "{request.user}" cannot {verb} resource "{plural}" in API group '
        f'"{resource.group}" in the namespace "{request.namespace}"',
        **({"name": request.name} if request.name else {}),
        group=resource.group,
        kind=resource.plural,
    )


def _is_granted(storage: FakeStorage, user: str, in_namespace: str, group: str, plural: str, verb: str) -> bool:
    """Whether a RoleBinding of the namespace grants it, or a ClusterRoleBinding."""
    if user == "admin":
        return True
    _, _, namespace, account = [*user.split(":"), "", "", "", ""][:4]
    for (key, where, _), binding in storage.objects.items():
        scope = "cluster" if key == "rbac.authorization.k8s.io/clusterrolebindings" else ""
        if not scope and (key != "rbac.authorization.k8s.io/rolebindings" or where != in_namespace):
            continue
        if not any(
            (subject["kind"], subject.get("namespace"), subject["name"]) == ("ServiceAccount", namespace, account)
            for subject in binding["subjects"]
        ):
            continue
        role_key = f"rbac.authorization.k8s.io/{scope}roles"
        role = storage.objects.get((role_key, where, binding["roleRef"]["name"]))
        for rule in role["rules"] if role else []:
            if group in rule["apiGroups"] and plural in rule["resources"] and verb in rule["verbs"]:
                return True
    return False
