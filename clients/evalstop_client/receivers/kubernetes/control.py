"""`evalstop-receiver kubernetes`: ends workloads of a Kubernetes cluster.

It suspends them; they are gone when no pod of theirs holds resources. A run identifies its workload, or its
pod, with labels that the client adds.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import threading
from collections.abc import Collection, Iterator
from dataclasses import replace
from datetime import timedelta

from evalstop_client.errors import RequestRefused, SchedulerUnavailable
from evalstop_client.receivers.kubernetes.api import Api, add_access_options, check_permissions, load_access
from evalstop_client.receivers.kubernetes.kinds import BY_NAME, POD, RAY_JOB, WORKLOAD, Kind, Object, at
from evalstop_client.receivers.kubernetes.workloads import (
    SeenPods,
    Suspension,
    find_successor,
    find_topmost,
    is_queued,
    is_unschedulable,
    list_facts,
    parse_time,
    read_labels,
    summarize_pods,
)
from evalstop_client.receivers.stop.job_control import (
    Gone,
    Job,
    JobControl,
    Parked,
    Present,
    StopRequest,
    Unproven,
)
from evalstop_client.receivers.stop.receiver import (
    add_receiver_options,
    add_return_option,
    add_service_options,
    run_receiver,
)

logger = logging.getLogger("evalstop_client.receivers")

SUSPENDED = "Suspended"
OVERDUE = timedelta(seconds=2)  # beyond a pod's grace period, which Kubernetes counts in whole seconds


class KubernetesJobControl(JobControl):
    """`namespaces`: where workloads may be stopped; None: wherever Kubernetes permits it.

    `cluster`: the value of the label kubernetes_cluster in runs of this cluster; None: any.
    """

    def __init__(
        self,
        api: Api,
        *,
        namespaces: frozenset[str] | None,
        cluster: str | None = None,
    ) -> None:
        self._api = api
        self._namespaces = namespaces
        self._cluster = cluster
        self._suspension = Suspension(api)
        self._pods: dict[str, SeenPods] = {}
        self._changing = threading.Lock()

    def find_job(self, request: StopRequest) -> Job | None:
        """The topmost workload above the object that the run's labels name, if its namespace is allowed."""
        labels = request.labels
        if not labels.get("kubernetes_name"):
            return None
        if self._cluster is not None and labels.get("kubernetes_cluster") != self._cluster:
            return None
        kind, namespace, name, uid = read_labels(labels, self._namespaces)
        item = self._api.get(kind, namespace, name)
        if item is None:  # it may have been replaced within a higher workload, which may still exist
            raise RequestRefused(f"there is no {kind} {name} in namespace {namespace}; its state is unknown")
        if item["metadata"]["uid"] != uid:
            raise RequestRefused(f"{kind} {name} in namespace {namespace} is another one of the same name: not {uid}")
        kind, item = find_topmost(self._api, kind, item)
        if kind is RAY_JOB and at(item, "spec", "clusterSelector"):
            raise RequestRefused(
                f"RayJob {item['metadata']['name']} runs in a Ray cluster that others may use (spec.clusterSelector); "
                "KubeRay does not suspend it: have its trainer read should_stop, or end it with `ray job stop`"
            )
        facts = list_facts(kind, item)
        if self._cluster is not None:
            facts["cluster"] = self._cluster
        job = Job(f"{namespace}/{item['metadata']['name']}", facts)
        now = self._get_pods(job).list()  # missing permission to list pods is detected now, not after the cancel
        return replace(job, facts={**job.facts, "found_at": now.isoformat()})

    def cancel_job(self, job: Job, request: StopRequest) -> None:
        """Suspend it, annotated with the reason; its pods have their own grace period."""
        logger.info("suspending %s %s", job.facts["kind"], job.id)
        self._suspend_workload(job, request.explanation)

    def kill_job(self, job: Job) -> None:
        """Suspend it again, delete remaining pods, and force-delete those whose grace period is over.

        Force-deleting a pod frees its resources in Kubernetes' view, without waiting for its node to confirm the end:
        such a stop is reported as failed, unless the node has said before that the pod's containers ended.
        """
        self._suspend_workload(job)
        pods = self._get_pods(job)
        now = pods.list()
        for pod in pods.holding:
            options: dict[str, object] = {"preconditions": {"uid": pod.uid}}
            if pod.delete_at is not None:
                if now < pod.delete_at + OVERDUE:
                    continue
                options["gracePeriodSeconds"] = 0
                pods.mark_forced(pod.uid)
            logger.info("deleting pod %s of %s%s", pod.name, job.id, " for good" if len(options) > 1 else "")
            self._api.delete(POD, job.facts["namespace"], pod.name, options)

    def park_job(self, job: Job, request: StopRequest) -> None:
        """Suspend it, as a stop does."""
        self.cancel_job(job, request)

    def check_parked(self, job: Job) -> Present | Parked | Gone | Unproven:
        """Parked when it is suspended and no pod of it holds resources."""
        state = self.check_job(job)
        if isinstance(state, Gone) and state.state == SUSPENDED:
            return Parked("suspended", {**state.details, "parked_as": "suspended"})
        return state

    def check_job(self, job: Job) -> Present | Gone | Unproven:
        """Gone when its controller creates no more pods and, listed after that, none of its pods holds resources."""
        try:
            return self._check_workload(job)
        except RequestRefused as error:  # a revoked permission may be granted again, and the job may still run
            raise SchedulerUnavailable(error.detail) from None

    def resume_job(self, job: Job) -> None:
        kind, workload = BY_NAME[job.facts["kind"]], self._find_workload(job)
        if workload is None:
            raise RequestRefused(f"{kind} {job.id} no longer exists and cannot be resumed")
        if kind.list_states(workload) & kind.ended:
            raise RequestRefused(f"{kind} {job.id} has ended and cannot be resumed")
        self._suspension.resume(kind, workload)

    def others_wait(self, job: Job, parked: Collection[Job]) -> bool:
        """Whether a pod waits for a node, or a workload for Kueue's quota, that belongs to none of these parked jobs.

        Looks in all namespaces if it may list them, else in those where it may stop workloads.
        """
        known = {other.facts["uid"] for other in parked}
        for kind, waits in ((WORKLOAD, is_queued), (POD, is_unschedulable)):
            for item in filter(waits, self._list_waiting(kind, job)):
                try:
                    if find_topmost(self._api, kind, item)[1]["metadata"]["uid"] not in known:
                        return True
                except RequestRefused:  # it belongs to nothing that can be parked
                    return True
        return False

    def _list_waiting(self, kind: Kind, job: Job) -> Iterator[Object]:
        is_granted = self._api.is_granted("list", kind, "")
        fields = "status.phase=Pending,spec.nodeName=" if kind is POD else ""
        for namespace in [""] if is_granted else sorted(self._namespaces or [job.facts["namespace"]]):
            try:
                yield from self._api.list(kind, namespace, "", fields)[0]
            except RequestRefused:  # the cluster has no Kueue, or the receiver's Role leaves it out
                if kind is POD:
                    raise

    def _check_workload(self, job: Job) -> Present | Gone | Unproven:
        kind, workload, state = BY_NAME[job.facts["kind"]], self._find_workload(job), None
        pods = self._get_pods(job, workload)
        if workload is None:
            state = "Deleted"
        elif ended := kind.list_states(workload) & kind.ended:
            state = min(ended)
        elif self._suspension.is_held(kind, workload):
            state = SUSPENDED
        pods.list()  # listed after its controller confirmed, so that no pod can be missed
        if holding := pods.holding:
            is_suspended = workload is not None and at(workload, *kind.suspend_field) is True
            runs = not is_suspended and any(pod.node and pod.delete_at is None for pod in holding)
            return Present(f"{holding[0].state}, {len(holding)} of its pods", runs=runs)
        if state is None:
            return Present("without pods, but may get some", runs=False)
        if successor := find_successor(self._api, job):
            return Present(f"started again by {job.facts['owner']}, as {successor}")
        with self._changing:
            self._pods.pop(job.facts["uid"], None)
        if unproven := pods.unproven:
            listed = ", ".join(f"{pod.name} on {pod.node}" for pod in unproven[:8])
            reason = f"forced: {listed} deleted without an answer from the node; the GPUs are not proven free"
            return Unproven(reason, {"scheduler_state": state, **summarize_pods(pods.own)})
        return Gone(state, {"scheduler_state": state, **summarize_pods(pods.own)})

    def _suspend_workload(self, job: Job, reason: str | None = None) -> None:
        kind, workload = BY_NAME[job.facts["kind"]], self._find_workload(job)
        if workload is not None and not kind.list_states(workload) & kind.ended:
            self._suspension.suspend(kind, workload, reason)

    def _find_workload(self, job: Job) -> Object | None:
        """The workload that was found, by uid; None if it no longer exists."""
        workload = self._api.get(BY_NAME[job.facts["kind"]], job.facts["namespace"], job.facts["name"])
        if workload is None:
            return None
        if workload["metadata"]["uid"] != job.facts["uid"]:
            self._get_pods(job).successor_at = parse_time(workload["metadata"]["creationTimestamp"])
            return None
        return workload

    def _get_pods(self, job: Job, workload: Object | None = None) -> SeenPods:
        """Its pods. A RayJob that was resumed has another Ray cluster: `workload` names the current one."""
        kind, uid = BY_NAME[job.facts["kind"]], job.facts["uid"]
        current = kind.selector(workload) if workload and at(workload, "status", "rayClusterName") else None
        with self._changing:
            pods = self._pods.get(uid)
            if pods is None or current not in (None, pods.selector):
                selector, owner = current or job.facts["selector"], uid if kind.owns_pods else None
                pods = self._pods[uid] = SeenPods(self._api, job.facts["namespace"], selector, owner)
            return pods


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--allow-namespace",
        action="append",
        metavar="NAME",
        help="namespace in which workloads may be stopped (default: the receiver's own)",
    )
    add("--allow-any-namespace", action="store_true", help="stop workloads in any namespace that Kubernetes permits")
    add("--cluster", metavar="NAME", help="handle only runs with this label kubernetes_cluster (default: any run)")
    add_return_option(parser)
    add_access_options(parser)
    add_service_options(parser)
    add_receiver_options(parser)


def run(options: argparse.Namespace) -> int:
    access = load_access(options)
    allowed = None if options.allow_any_namespace else frozenset(options.allow_namespace or [access.namespace])
    with contextlib.closing(Api(access)) as api:
        check_permissions(api, allowed)
        action = KubernetesJobControl(api, namespaces=allowed, cluster=options.cluster)
        return run_receiver(action, options, "kubernetes", options.return_idle)
