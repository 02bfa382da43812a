"""The objects of a fake API server, with their versions and garbage collection."""

from __future__ import annotations

import copy
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

Json = dict[str, Any]


class StatusError(Exception):
    """An error answer, in the shape of a Status."""

    def __init__(self, code: int, reason: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.headers: dict[str, str] = {}
        self.body = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "details": details,
            "code": code,
        }


class FakeStorage:
    """Objects by group/plural, namespace and name. Every reader and writer holds `changed`."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.version = 100
        self.objects: dict[tuple[str, str, str], Json] = {}

    def remove(self, key: str, item: Json, grace: int | None) -> None:
        """Delete an object; a pod on a node is marked, and its node deletes it without a grace period."""
        metadata = item["metadata"]
        if key == "/pods":
            grace_seconds = grace if grace is not None else item["spec"].get("terminationGracePeriodSeconds", 30)
            bound = item["spec"].get("nodeName") and item.get("status", {}).get("phase") not in ("Succeeded", "Failed")
            left = grace_seconds if bound else 0
            if left > 0:
                if left < metadata.get("deletionGracePeriodSeconds", left + 1):
                    metadata["deletionTimestamp"] = format_time(datetime.now(UTC) + timedelta(seconds=left))
                    metadata["deletionGracePeriodSeconds"] = left
                    self.write(key, item)
                return
        del self.objects[key, metadata.get("namespace", ""), metadata["name"]]
        self.version += 1

    def collect_garbage(self) -> None:
        """Delete what all of its owners have left, until nothing more does."""
        before = None
        while self.version != before:
            before = self.version
            uids = {item["metadata"]["uid"] for item in self.objects.values()}
            for (key, _, _), item in list(self.objects.items()):
                owners = [reference["uid"] for reference in item["metadata"].get("ownerReferences", [])]
                if owners and not uids.intersection(owners):
                    self.remove(key, item, None)

    def write(self, key: str, item: Json) -> None:
        self.version += 1
        metadata = item["metadata"]
        metadata["resourceVersion"] = str(self.version)
        self.objects[key, metadata.get("namespace", ""), metadata["name"]] = item

    def read(self, key: str, namespace: str, name: str, plural: str, group: str) -> Json:
        item = self.objects.get((key, namespace, name))
        if item is None:
            message = f'{plural}{group and "."}{group} "{name}" not found'
            raise StatusError(404, "NotFound", message, name=name, group=group, kind=plural)
        return copy.deepcopy(item)


def format_time(moment: datetime) -> str:
    """A time as the API writes it."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
