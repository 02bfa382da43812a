"""Finds the workload to be stopped: that of a run's labels, the topmost of its controllers, and its successor."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from datetime import datetime

from evalstop_client.errors import RequestRefused
from evalstop_client.receivers.kubernetes.api import Api
from evalstop_client.receivers.kubernetes.kinds import (
    KINDS,
    POD,
    Kind,
    Object,
    at,
    find_controller,
    find_kind,
    find_kind_of,
)
from evalstop_client.receivers.kubernetes.pods import digest_containers, parse_pod, parse_time
from evalstop_client.receivers.stop.job_control import Job

NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


def read_labels(labels: Mapping[str, str], namespaces: frozenset[str] | None) -> tuple[Kind, str, str, str]:
    """The object that the labels name, validated: a label must not refer to anything else."""
    kind = find_kind(labels.get("kubernetes_kind") or "Job")
    if kind is None:
        supported = ", ".join(str(supported_kind) for supported_kind in (*KINDS, POD))
        raise RequestRefused(f"label kubernetes_kind is {labels['kubernetes_kind'][:80]!r}; it may be {supported}")
    for label in ("kubernetes_namespace", "kubernetes_name", "kubernetes_uid"):
        if not NAME.fullmatch(labels.get(label, "")):
            raise RequestRefused(f"label {label} is {labels.get(label, '')[:80]!r}, which cannot be")
    namespace = labels["kubernetes_namespace"]
    if namespaces is not None and namespace not in namespaces:
        raise RequestRefused(f"namespace {namespace} is not on the allow-list")
    return kind, namespace, labels["kubernetes_name"], labels["kubernetes_uid"]


def find_topmost(api: Api, kind: Kind, item: Object) -> tuple[Kind, Object]:
    """Follow controllers to the top: anything stopped below is restarted by its controller."""
    while True:
        owner = find_controller(item)
        above = find_kind_of(owner["apiVersion"], owner["kind"]) if owner is not None else None
        if owner is None or above is None:
            break
        controller = api.get(above, item["metadata"]["namespace"], owner["name"])
        if controller is None or controller["metadata"]["uid"] != owner["uid"]:
            raise RequestRefused(f"{above} {owner['name']}, to which it belonged, no longer exists")
        kind, item = above, controller
    if kind is POD:
        controlled_by = f"{owner['kind']} {owner['name']}" if owner is not None else "nothing"
        raise RequestRefused(
            f"pod {item['metadata']['name']} is controlled by {controlled_by}, which cannot be suspended; run the "
            "training as a Job, or have the trainer read should_stop and then wait"
        )
    return kind, item


def list_facts(kind: Kind, item: Object) -> dict[str, str]:
    """The facts of a job: what identifies the workload and its pods, and its successor if a controller creates one."""
    metadata = item["metadata"]
    facts = {"kind": str(kind), "namespace": metadata["namespace"], "name": metadata["name"], "uid": metadata["uid"]}
    owner = find_controller(item)
    if owner is not None and owner["kind"] != "CronJob":  # which creates the next one anyway
        facts |= {"owner": f"{owner['kind']} {owner['name']}", "owner_uid": owner["uid"]}
        facts["containers"] = digest_containers(at(item, "spec", "template", "spec") or {})
    return {**facts, "selector": kind.selector(item)}


def get_kind(job: Job) -> Kind:
    """The kind of a job's workload; RequestRefused if only an earlier release knew it."""
    kind = find_kind(job.facts["kind"])
    if kind is None:
        raise RequestRefused(f"this release does not support the kind {job.facts['kind']}, which an earlier one found")
    return kind


def find_successor(api: Api, job: Job) -> str | None:
    """The workload that the controller above, unknown to this receiver, created in place of the one that was ended.

    It has the same name, or pods with the same containers, created since the stop was found.
    """
    if "owner_uid" not in job.facts:
        return None
    namespace, name = job.facts["namespace"], job.facts["name"]
    candidates = [(get_kind(job), api.get(get_kind(job), namespace, name))]
    for pod in api.list(POD, namespace, "").items:
        created_at = parse_time(pod["metadata"].get("creationTimestamp"))
        is_new = created_at is not None and created_at >= datetime.fromisoformat(job.facts["found_at"])
        if is_new and parse_pod(pod).holds and digest_containers(pod["spec"]) == job.facts["containers"]:
            with contextlib.suppress(RequestRefused):  # it belongs to nothing that can be stopped
                candidates.append(find_topmost(api, POD, pod))
    for kind, item in candidates:
        if item is None or item["metadata"]["uid"] == job.facts["uid"]:
            continue
        owner = find_controller(item)
        if owner is not None and owner["uid"] == job.facts["owner_uid"]:
            return f"{kind} {item['metadata']['name']}"
    return None
