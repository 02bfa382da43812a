"""A client for the parts of the Kubernetes API that the receiver needs: get, list, merge, delete, and what is granted.

It uses httpx, which the client already requires, instead of the official client: that has many dependencies and no
types, and does not cover kinds that are not part of Kubernetes itself.
"""

from __future__ import annotations

import argparse
import logging
import os
import ssl
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
from httpx import codes

from evalstop_client.errors import ConfigurationError, RequestRefused, SchedulerUnavailable
from evalstop_client.receivers.kubernetes.kinds import JOB, KINDS, POD, WORKLOAD, Kind, Object, at
from evalstop_client.service import object_in, trusted_certificates

logger = logging.getLogger("evalstop_client.receivers")

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MERGE_PATCH = "application/merge-patch+json"
METHODS = {"get": "GET", "list": "GET", "patch": "PATCH", "delete": "DELETE"}
REFUSALS = frozenset({codes.BAD_REQUEST, codes.METHOD_NOT_ALLOWED, codes.GONE, codes.UNPROCESSABLE_ENTITY})


@dataclass(frozen=True)
class Access:
    """`token` is called before every request, because tokens expire. `tls`: by default the system's certificates."""

    url: str
    namespace: str = "default"
    token: Callable[[], str | None] = field(default=lambda: None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)


def load_in_cluster_access(environment: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> Access | None:
    """The access that Kubernetes gives to a pod; None outside a pod."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (folder / "token").exists():
        return None
    namespace = (folder / "namespace").read_text().strip()
    url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    tls = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    return Access(url, namespace, read_token_from(folder / "token"), tls)


def read_token_from(file: Path) -> Callable[[], str]:
    """Read a token from a file at every request, because it is replaced when it expires."""

    def read() -> str:
        try:
            return file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SchedulerUnavailable(f"no token: {error}") from None

    return read


def add_access_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for use outside a cluster; inside one, none is needed."""
    add = parser.add_argument
    add("--api-server", metavar="URL", help="for use outside the cluster, such as http://127.0.0.1:8001")
    add("--token-file", type=Path, metavar="FILE", help="with --api-server: file with the token, read at every request")


def load_access(options: argparse.Namespace) -> Access:
    """The access from the options, or that of a pod; raises ConfigurationError."""
    if url := options.api_server:
        if not url.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"api-server {url!r}: write it like https://10.0.0.1:6443 or http://127.0.0.1:8001."
            )
        return Access(
            url.rstrip("/"), token=read_token_from(options.token_file) if options.token_file else lambda: None
        )
    if options.token_file:
        raise ConfigurationError("token-file: it requires --api-server.")
    inside = load_in_cluster_access(os.environ)
    if inside is None:
        raise ConfigurationError(
            "api-server: outside of a pod, start `kubectl proxy` and set --api-server http://127.0.0.1:8001."
        )
    return inside


class Api:
    """Every method may raise SchedulerUnavailable, or RequestRefused if a retry cannot succeed."""

    def __init__(self, access: Access, timeout_seconds: float = 30.0) -> None:
        self._access = access
        trusted = access.tls or (access.url.startswith("https:") and trusted_certificates())
        self._client = httpx.Client(base_url=access.url, verify=trusted, timeout=timeout_seconds)
        self._versions: dict[Kind, str] = {}

    def close(self) -> None:
        self._client.close()

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object; None if there is none of this name."""
        response = self._request_object("get", kind, namespace, name)
        return None if response is None else _read_object(response, "get", kind)

    def list(self, kind: Kind, namespace: str, selector: str, fields: str = "") -> tuple[list[Object], datetime]:
        """All objects with these labels and fields, as they are now, not from a cache, and the API server's time; of
        all namespaces if it is empty."""
        params = {"labelSelector": selector, "fieldSelector": fields}
        response = self._request_object("list", kind, namespace, params=params)
        if response is None:
            raise SchedulerUnavailable(f"list {kind}: there is no such place")
        date = response.headers.get("date")
        items = _read_object(response, "list", kind).get("items")
        return list(items or []), parsedate_to_datetime(date) if date else datetime.now(UTC)

    def merge(self, kind: Kind, item: Object, change: Object) -> Object | None:
        """Change these fields of an object that was read; returns it as it is then, None if it is gone.

        A merge patch that names a uid is refused for another object of the same name.
        """
        metadata = item["metadata"]
        body = {**change, "metadata": {**change.get("metadata", {}), "uid": metadata["uid"]}}
        response = self._request_object("patch", kind, metadata["namespace"], metadata["name"], body=body)
        return None if response is None else _read_object(response, "patch", kind)

    def delete(self, kind: Kind, namespace: str, name: str, options: Object) -> None:
        """Delete an object if it exists and is the one that the options require."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", **options}
        self._request_object("delete", kind, namespace, name, body=options)

    def is_granted(self, verb: str, kind: Kind, namespace: str) -> bool:
        """Whether the API server would allow it, in all namespaces if `namespace` is empty."""
        attributes = {"namespace": namespace, "verb": verb, "group": kind.group, "resource": kind.resource}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        response = self._send_request("POST", path, body=review)
        allowed = at(object_in(response), "status", "allowed")
        if not response.is_success or not isinstance(allowed, bool):
            raise SchedulerUnavailable(f"what is granted cannot be asked: {_describe_response(response)}")
        return allowed

    def _request_object(
        self,
        verb: str,
        kind: Kind,
        namespace: str,
        name: str = "",
        *,
        params: Mapping[str, str] | None = None,
        body: Object | None = None,
    ) -> httpx.Response | None:
        """The answer; None if there is no such object, or another one than is to be deleted."""
        root, where = "/apis" if kind.group else "/api", f"/namespaces/{namespace}" if namespace else ""
        path = f"{root}/{self._find_version(kind)}{where}/{kind.resource}" + (f"/{name}" if name else "")
        response = self._send_request(METHODS[verb], path, params, body)
        if response.is_success:
            return response
        status, message = response.status_code, _describe_response(response)
        if status == codes.CONFLICT and verb == "delete":
            return None
        if status == codes.NOT_FOUND:
            if at(object_in(response), "details", "name"):
                return None
            self._versions.pop(kind, None)  # the path is unknown: another version now serves the kind
        if status == codes.FORBIDDEN:
            resource = f"{kind.resource}.{kind.group}" if kind.group else kind.resource
            raise RequestRefused(
                f"the verb {verb!r} on {resource} in namespace {namespace} is not granted to it: {message}"
            )
        if status == codes.UNAUTHORIZED:
            raise SchedulerUnavailable(f"the API server does not know this receiver's token: {message}")
        if status in REFUSALS:
            raise RequestRefused(f"Kubernetes does not take it ({verb} {kind}): {message}")
        raise SchedulerUnavailable(f"{verb} {kind}: {message}")

    def _find_version(self, kind: Kind) -> str:
        """The API version of a kind on this cluster, such as `batch/v1`."""
        if not kind.group:
            return "v1"
        if kind not in self._versions:
            self._versions[kind] = self._discover_version(kind)
        return f"{kind.group}/{self._versions[kind]}"

    def _discover_version(self, kind: Kind) -> str:
        """The version that serves a kind on this cluster, preferably the cluster's preferred one."""
        group = self._load_description(f"/apis/{kind.group}")
        preferred = at(group, "preferredVersion", "version")
        offered = [entry["version"] for entry in group.get("versions") or []]
        for version in sorted(offered, key=lambda offered_version: offered_version != preferred):
            resources = self._load_description(f"/apis/{kind.group}/{version}").get("resources") or []
            if any(resource["name"] == kind.resource for resource in resources):
                return str(version)
        raise RequestRefused(f"this cluster knows no {kind.resource}.{kind.group}")

    def _load_description(self, path: str) -> Object:
        response = self._send_request("GET", path)
        if response.status_code == codes.NOT_FOUND:
            return {}
        if not response.is_success:
            raise SchedulerUnavailable(f"GET {path}: {_describe_response(response)}")
        return object_in(response) or {}

    def _send_request(
        self, method: str, path: str, params: Mapping[str, str] | None = None, body: Object | None = None
    ) -> httpx.Response:
        token = self._access.token()
        headers = {"authorization": f"Bearer {token}"} if token else {}
        if method == "PATCH":
            headers["content-type"] = MERGE_PATCH
        try:
            return self._client.request(method, path, params=params, headers=headers, json=body)
        except (httpx.HTTPError, OSError) as error:
            raise SchedulerUnavailable(f"the API server: {type(error).__name__}: {error}") from None


def _read_object(response: httpx.Response, verb: str, kind: Kind) -> Object:
    body = object_in(response)
    if not body:
        raise SchedulerUnavailable(f"{verb} {kind}: the API server's answer is no object")
    return body


def _describe_response(response: httpx.Response) -> str:
    """A short text of a response."""
    return f"{response.status_code} {at(object_in(response), 'message') or response.text[:200]}"


NEEDS: Mapping[Kind, Sequence[str]] = {
    **dict.fromkeys(KINDS, ("get", "patch")),
    WORKLOAD: ("list", "patch"),
    POD: ("get", "list", "delete"),
}
"""The verbs that stops need."""


def check_permissions(api: Api, namespaces: Collection[str] | None) -> None:
    """Ask when the receiver starts what its Role grants, so that a missing verb is not found in the middle of a stop.

    Raises ConfigurationError with the rules that a Role lacks for pods, or for every kind of workload. Kinds that are
    granted in part are logged. So is all of it for any namespace (None), since RoleBindings may grant it in some, and
    where the API server cannot be asked.
    """
    try:
        for namespace in [""] if namespaces is None else sorted(namespaces):
            lacks = {
                kind: [verb for verb in verbs if not api.is_granted(verb, kind, namespace)]
                for kind, verbs in NEEDS.items()
            }
            where = f"in {f'namespace {namespace}' if namespace else 'all namespaces'} this receiver's Role lacks"
            required = [_describe_rule(POD, lacks[POD])] if lacks[POD] else []
            if all(lacks[kind] for kind in KINDS):
                required.append(f"{_describe_rule(JOB, NEEDS[JOB])}, or the same for another kind")
            if required and namespace:
                raise ConfigurationError(f"permissions: {where} {'; '.join(required)}.")
            # A kind without any grant is one that the cluster does not have.
            partly = [kind for kind in (*KINDS, WORKLOAD) if 0 < len(lacks[kind]) < len(NEEDS[kind])]
            for rule in (*required, *(_describe_rule(kind, lacks[kind]) for kind in partly)):
                logger.warning("%s %s", where, rule)
    except SchedulerUnavailable as error:
        logger.warning("permissions are not checked: %s", error)


def _describe_rule(kind: Kind, verbs: Sequence[str]) -> str:
    return f'{{apiGroups: ["{kind.group}"], resources: [{kind.resource}], verbs: [{", ".join(verbs)}]}}'
