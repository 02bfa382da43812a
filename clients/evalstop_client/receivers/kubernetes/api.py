"""A client for the parts of the Kubernetes API that receivers need: get, list, watch, merge, create, delete,
and which of these are granted.

It uses httpx, which the client already requires, instead of the official client: that has many dependencies and no
types, and does not cover kinds that are not part of Kubernetes itself.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx
from httpx import codes

from evalstop_client.errors import ConfigurationError, RequestRefused, SchedulerUnavailable
from evalstop_client.receivers.kubernetes.access import Access
from evalstop_client.receivers.kubernetes.kinds import (
    COMMAND,
    EVENT,
    JOB,
    KINDS,
    POD,
    VOLCANO_JOB,
    WORKLOAD,
    Kind,
    Object,
    at,
)
from evalstop_client.service import object_in, trusted_certificates

logger = logging.getLogger("evalstop_client.receivers")

MERGE_PATCH = "application/merge-patch+json"
MAX_RETRY_AFTER_SECONDS = 300.0
REFUSALS = frozenset({codes.BAD_REQUEST, codes.METHOD_NOT_ALLOWED, codes.GONE, codes.UNPROCESSABLE_ENTITY})


@dataclass(frozen=True)
class Listing:
    """The objects, the resource version from which a watch continues, and the API server's time."""

    items: list[Object]
    version: str
    at: datetime


WatchEvent = tuple[str, Object]
"""ADDED, MODIFIED, DELETED or BOOKMARK, and the object."""


@dataclass(frozen=True)
class Conflict:
    """The object has changed since it was read, or another one has its name."""


class Api:
    """Every method may raise SchedulerUnavailable, or RequestRefused if a retry cannot succeed."""

    def __init__(self, access: Access, timeout_seconds: float = 30.0) -> None:
        self._access = access
        trusted = access.tls or (access.url.startswith("https:") and trusted_certificates())
        self._client = httpx.Client(base_url=access.url, verify=trusted, timeout=timeout_seconds)
        self._versions: dict[Kind, str] = {}
        self._retry_at = 0.0

    def close(self) -> None:
        self._client.close()

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object; None if there is none of this name."""
        return _read_answer(self._request_object("get", kind, namespace, name), "get", kind)

    def list(self, kind: Kind, namespace: str, selector: str, fields: str = "") -> Listing:
        """All objects with these labels and fields, as they are now, not from a cache; of all namespaces if it is
        empty."""
        params = {"labelSelector": selector, "fieldSelector": fields}
        response = self._request_object("list", kind, namespace, params=params)
        body = _read_answer(response, "list", kind)
        if body is None or not isinstance(response, httpx.Response):
            raise SchedulerUnavailable(f"list {kind}: there is no such place")
        version = str(at(body, "metadata", "resourceVersion"))
        return Listing(list(body.get("items") or []), version, _read_date(response))

    def watch(
        self, kind: Kind, namespace: str, selector: str, version: str, seconds: int
    ) -> Iterator[WatchEvent | None]:
        """The events from a version on, for `seconds`; fewer if the connection is cut: then watch again.

        None: the server no longer has the events since this version, so list again.
        """
        began = False
        params = {
            "watch": "1",
            "labelSelector": selector,
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
            "allowWatchBookmarks": "true",
        }
        path, headers = self._path(kind, namespace), self._headers()
        try:
            with self._client.stream("GET", path, params=params, headers=headers) as response:
                began = True
                if response.status_code == codes.GONE:
                    yield None
                elif response.is_success:
                    yield from _parse_events(response.iter_lines())
                else:
                    response.read()
                    self._raise_for_status(response, "watch", kind, namespace)
        except (httpx.HTTPError, OSError) as error:
            if not began:
                raise SchedulerUnavailable(f"the API server: {type(error).__name__}: {error}") from None

    def merge(self, kind: Kind, namespace: str, name: str, change: Object) -> Object | Conflict | None:
        """Change the fields in `change`, which may require a uid and a version; None if there is no object."""
        answer = self._request_object("patch", kind, namespace, name, body=change)
        return answer if isinstance(answer, Conflict) else _read_answer(answer, "patch", kind)

    def create(self, kind: Kind, namespace: str, item: Object) -> bool:
        """Create an object; False if there is one with this name."""
        body = {"apiVersion": self.api_version(kind), "kind": kind.name, **item}
        return not isinstance(self._request_object("create", kind, namespace, body=body), Conflict)

    def delete(self, kind: Kind, namespace: str, name: str, options: Object) -> None:
        """Delete an object if it exists and is the one that the options require."""
        self._request_object(
            "delete", kind, namespace, name, body={"apiVersion": "v1", "kind": "DeleteOptions", **options}
        )

    def is_granted(self, verb: str, kind: Kind, namespace: str) -> bool:
        """Whether the API server would allow it, in all namespaces if `namespace` is empty."""
        attributes = {"namespace": namespace, "verb": verb, "group": kind.group, "resource": kind.resource}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        response = self._send_request("POST", path, headers={"content-type": "application/json"}, body=review)
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
    ) -> httpx.Response | Conflict | None:
        method = {"get": "GET", "list": "GET", "patch": "PATCH", "create": "POST", "delete": "DELETE"}[verb]
        path = self._path(kind, namespace) + (f"/{name}" if name else "")
        headers = {} if body is None else {"content-type": MERGE_PATCH if verb == "patch" else "application/json"}
        response = self._send_request(method, path, params, headers, body)
        if response.status_code == codes.CONFLICT:
            return Conflict()
        if response.status_code == codes.NOT_FOUND:
            if at(object_in(response), "details", "name"):
                return None
            self._versions.pop(kind, None)  # the path is unknown: another version now serves the kind
            raise SchedulerUnavailable(f"{verb} {kind}: {_describe_response(response)}")
        self._raise_for_status(response, verb, kind, namespace)
        return response

    def _raise_for_status(self, response: httpx.Response, verb: str, kind: Kind, namespace: str) -> None:
        """Raise the error of a response, unless it succeeded."""
        if response.is_success:
            return
        status, message = response.status_code, _describe_response(response)
        if status == codes.FORBIDDEN:
            resource = f"{kind.resource}.{kind.group}" if kind.group else kind.resource
            raise RequestRefused(
                f"the verb {verb!r} on {resource} in namespace {namespace} is not granted to it: {message}"
            )
        if status == codes.UNAUTHORIZED:
            raise SchedulerUnavailable(f"the API server does not know this receiver's token or certificate: {message}")
        if status in REFUSALS:
            raise RequestRefused(f"Kubernetes does not take it ({verb} {kind}): {message}")
        retry_after = response.headers.get("retry-after", "")
        if retry_after.isdecimal():
            self._retry_at = time.monotonic() + min(float(retry_after), MAX_RETRY_AFTER_SECONDS)
        raise SchedulerUnavailable(f"{verb} {kind}: {message}")

    def _path(self, kind: Kind, namespace: str) -> str:
        root = "/apis" if kind.group else "/api"
        where = f"/namespaces/{namespace}" if namespace else ""
        return f"{root}/{self.api_version(kind)}{where}/{kind.resource}"

    def api_version(self, kind: Kind) -> str:
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
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Object | None = None,
    ) -> httpx.Response:
        content = None if body is None else json.dumps(body).encode()
        headers = {**self._headers(), **(headers or {})}
        try:
            return self._client.request(method, path, params=params, headers=headers, content=content)
        except (httpx.HTTPError, OSError) as error:
            raise SchedulerUnavailable(f"the API server: {type(error).__name__}: {error}") from None

    def _headers(self) -> dict[str, str]:
        """The headers of a request; raises SchedulerUnavailable before the server's Retry-After is over."""
        remaining_seconds = self._retry_at - time.monotonic()
        if remaining_seconds > 0:
            raise SchedulerUnavailable(f"the API server asked to retry in {remaining_seconds:.0f} s")
        token = self._access.token()
        return {"accept": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})


def _parse_events(lines: Iterator[str]) -> Iterator[WatchEvent | None]:
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:  # the connection was cut in the middle of a line
            return
        if event["type"] != "ERROR":
            yield event["type"], event["object"]
        elif at(event, "object", "code") == codes.GONE:
            yield None
        else:
            raise SchedulerUnavailable(f"the watch failed: {at(event, 'object', 'message')}")


def _read_answer(answer: httpx.Response | Conflict | None, verb: str, kind: Kind) -> Object | None:
    if answer is None:
        return None
    body = None if isinstance(answer, Conflict) else object_in(answer)
    if not body:
        raise SchedulerUnavailable(f"{verb} {kind}: the API server's answer is no object")
    return body


def _read_date(response: httpx.Response) -> datetime:
    date = response.headers.get("date")
    return parsedate_to_datetime(date) if date else datetime.now(UTC)


def _describe_response(response: httpx.Response) -> str:
    """A short text of a response."""
    return f"{response.status_code} {at(object_in(response), 'message') or response.text[:200]}"


Verbs = Mapping[Kind, Sequence[str]]


def check_permissions(api: Api, namespaces: Collection[str] | None, stop_by: str, annotates: bool) -> None:
    """Ask when the receiver starts what its Role grants, so that a missing verb is not found in the middle of a stop.

    Raises ConfigurationError with the rules that a Role lacks for pods, or for every kind of workload. What else is
    missing is logged: events, and kinds that are granted in part. So is all of it for any namespace (None), since
    RoleBindings may grant it in some, and where the API server cannot be asked.
    """
    needs: dict[Kind, list[str]] = {kind: ["get", "delete" if stop_by == "delete" else "patch"] for kind in KINDS}
    needs |= {POD: ["get", "list", "watch", "delete"], WORKLOAD: ["get", "list", "patch"], EVENT: ["create"]}
    if annotates:
        needs[POD].append("patch")
    if stop_by != "delete":
        needs |= {VOLCANO_JOB: ["get"], COMMAND: ["create"]}
    try:
        for namespace in [""] if namespaces is None else sorted(namespaces):
            lacks = {
                kind: [verb for verb in verbs if not api.is_granted(verb, kind, namespace)]
                for kind, verbs in needs.items()
            }
            _report_missing(namespace, needs, lacks)
    except SchedulerUnavailable as error:
        logger.warning("permissions are not checked: %s", error)


def _report_missing(namespace: str, needs: Verbs, lacks: Verbs) -> None:
    usable = [kind for kind in KINDS if not lacks[kind] and not (kind is VOLCANO_JOB and lacks.get(COMMAND))]
    where = f"in {f'namespace {namespace}' if namespace else 'all namespaces'} this receiver's Role lacks"
    required = [_describe_rule(POD, lacks[POD])] if lacks[POD] else []
    required += [] if usable else [f"{_describe_rule(JOB, needs[JOB])}, or the same for another kind"]
    if required and namespace:
        raise ConfigurationError(f"permissions: {where} {'; '.join(required)}.")
    # A kind without any grant is one that the cluster does not have.
    partly = [kind for kind in (*KINDS, WORKLOAD) if 0 < len(lacks[kind]) < len(needs[kind])]
    for rule in (*required, *(_describe_rule(kind, lacks[kind]) for kind in (*partly, EVENT) if lacks[kind])):
        logger.warning("%s %s", where, rule)


def _describe_rule(kind: Kind, verbs: Sequence[str]) -> str:
    return f'{{apiGroups: ["{kind.group}"], resources: [{kind.resource}], verbs: [{", ".join(verbs)}]}}'
