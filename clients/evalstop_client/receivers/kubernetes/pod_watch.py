"""Follows the pods of one job with list and watch, so that the end of a pod is known even after it is deleted."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from evalstop_client.receivers.kubernetes.api import Api, Expired
from evalstop_client.receivers.kubernetes.kinds import POD
from evalstop_client.receivers.kubernetes.pods import Pod, parse_pod

WATCH_SECONDS = 1


class PodWatch:
    """The pods that a selector selects, including deleted ones.

    The watch has no thread: each call continues it from the version where the last call ended, and the server sends
    the events since then.
    """

    def __init__(self, api: Api, namespace: str, selector: str, controller_uid: str | None) -> None:
        """`controller_uid`: the uid of the controller that its pods name; None if they name another object."""
        self._api = api
        self._namespace = namespace
        self._selector = selector
        self._controller_uid = controller_uid
        self._version: str | None = None
        self._is_fresh = False
        self._pods_by_uid: dict[str, Pod] = {}
        self._forced: set[str] = set()
        self.successor_at: datetime | None = None

    @property
    def own(self) -> list[Pod]:
        """Every pod of the job as last seen, without those of a successor with the same name and labels.

        A pod created in the second of `successor_at` is the successor's, which creates its pods immediately.
        """
        if self._controller_uid is not None:
            return [pod for pod in self._pods_by_uid.values() if pod.controller_uid == self._controller_uid]
        before = self.successor_at
        return [
            pod for pod in self._pods_by_uid.values() if before is None or not pod.created_at or pod.created_at < before
        ]

    @property
    def holding(self) -> list[Pod]:
        """The pods that hold resources or may get some."""
        return [pod for pod in self.own if pod.holds]

    def mark_forced(self, uid: str) -> None:
        """Note that a pod is deleted without a word from its node."""
        if uid in self._pods_by_uid:
            self._forced.add(uid)

    @property
    def unproven(self) -> list[Pod]:
        """The pods that are gone from the API only."""
        seen = [replace(pod, is_forced=pod.is_forced or pod.uid in self._forced) for pod in self.own]
        return [pod for pod in seen if pod.is_unproven]

    def list(self) -> datetime:
        """List all pods; returns the API server's time."""
        listing = self._api.list(POD, self._namespace, self._selector)
        present = {pod.uid: pod for pod in map(parse_pod, listing.items)}
        missed = {uid: replace(pod, is_there=False) for uid, pod in self._pods_by_uid.items() if uid not in present}
        self._pods_by_uid = missed | present
        self._version = listing.version
        self._is_fresh = True
        return listing.at

    def follow(self) -> None:
        """Read the events since the last call, waiting up to a second while a pod holds resources."""
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
                self._pods_by_uid = {**self._pods_by_uid, pod.uid: replace(pod, is_there=event.type != "DELETED")}
            if not self.holding:
                return
