"""Follows the pods of one job by list and watch, so that how a pod ended is known when the pod itself is gone."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from evalstop_client.receivers.kubernetes.api import Api, Expired
from evalstop_client.receivers.kubernetes.kinds import POD
from evalstop_client.receivers.kubernetes.pods import Pod, parse_pod

WATCH_SECONDS = 1


class PodWatch:
    """What was seen of the pods that a selector selects, the deleted ones too.

    The watch has no thread of its own: whoever looks goes on with it from the version where the last look ended, and
    the server tells what has happened meanwhile.
    """

    def __init__(self, api: Api, namespace: str, selector: str, controller_uid: str | None) -> None:
        """`controller_uid`: of what its pods name as their controller, None where something stands in between."""
        self._api = api
        self._namespace = namespace
        self._selector = selector
        self._controller_uid = controller_uid
        self._version: str | None = None
        self._is_fresh = False
        self._seen: dict[str, Pod] = {}
        self.successor_at: datetime | None = None

    @property
    def own(self) -> list[Pod]:
        """Every pod of the job as it was last seen, and none of a successor with the same name and labels.

        A pod that was created in the very second of `successor_at` is the successor's: they are made at once.
        """
        if self._controller_uid is not None:
            return [pod for pod in self._seen.values() if pod.controller_uid == self._controller_uid]
        before = self.successor_at
        return [pod for pod in self._seen.values() if before is None or not pod.created_at or pod.created_at < before]

    @property
    def holding(self) -> list[Pod]:
        """Those that hold resources, or may get some."""
        return [pod for pod in self.own if pod.holds]

    def list(self) -> datetime:
        """See them all as they are now; the API server's time."""
        listing = self._api.list(POD, self._namespace, self._selector)
        listed = {pod.uid: pod for pod in map(parse_pod, listing.items)}
        missed = {uid: replace(pod, is_there=False) for uid, pod in self._seen.items() if uid not in listed}
        self._seen = missed | listed
        self._version = listing.version
        self._is_fresh = True
        return listing.at

    def follow(self) -> None:
        """See what has happened since they were last seen, or happens within a second while one of them holds."""
        if self._version is None:
            self.list()
        if self._version is None or self._is_fresh or not self.holding:
            self._is_fresh = False
            return
        for event in self._api.watch(POD, self._namespace, self._selector, self._version, WATCH_SECONDS):
            if isinstance(event, Expired):
                self.list()
                return
            self._version = event.item["metadata"]["resourceVersion"]
            if event.type != "BOOKMARK":
                pod = parse_pod(event.item)
                self._seen = {**self._seen, pod.uid: replace(pod, is_there=event.type != "DELETED")}
            if not self.holding:
                return
