"""RBAC of a fake API server: who may do what, by the Roles and bindings among its objects."""

from __future__ import annotations

from tests.clients.receivers.kubernetes.fake_requests import Request
from tests.clients.receivers.kubernetes.fake_storage import FakeStorage, Json, StatusError

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
