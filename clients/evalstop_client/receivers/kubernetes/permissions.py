"""Asks when the receiver starts what its Role grants, so that a missing verb is not found in the middle of a stop."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from evalstop_client.errors import ConfigurationError, SchedulerUnavailable
from evalstop_client.receivers.kubernetes.api import Api
from evalstop_client.receivers.kubernetes.kinds import COMMAND, EVENT, JOB, KINDS, POD, VOLCANO_JOB, WORKLOAD, Kind

logger = logging.getLogger("evalstop_client.receivers")

Verbs = Mapping[Kind, Sequence[str]]


def check_permissions(api: Api, namespaces: Collection[str] | None, stop_by: str, annotates: bool) -> None:
    """Raise ConfigurationError with the rules that a Role lacks for pods, or for every kind of workload.

    What else is missing is logged: events, and kinds that are granted in part. So is all of it for any namespace
    (None), since RoleBindings may grant it in some, and where the API server cannot be asked.
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
    # A kind of which nothing is granted is one that the cluster does not have.
    partly = [kind for kind in (*KINDS, WORKLOAD) if 0 < len(lacks[kind]) < len(needs[kind])]
    for rule in (*required, *(_describe_rule(kind, lacks[kind]) for kind in (*partly, EVENT) if lacks[kind])):
        logger.warning("%s %s", where, rule)


def _describe_rule(kind: Kind, verbs: Sequence[str]) -> str:
    """A rule as a Role states it."""
    return f'{{apiGroups: ["{kind.group}"], resources: [{kind.resource}], verbs: [{", ".join(verbs)}]}}'
