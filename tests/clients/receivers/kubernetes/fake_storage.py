"""The objects of a fake API server, with their versions and garbage collection."""

from __future__ import annotations

import copy
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

Json = dict[str, Any]
FOREGROUND = "foregroundDeletion"


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

    def remove(self, key: str, item: Json, policy: str, grace: int | None) -> None:
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
            if bound and "deletionTimestamp" not in metadata:
                metadata |= {"deletionTimestamp": format_time(datetime.now(UTC)), "deletionGracePeriodSeconds": 0}
                self.write(key, item)
        elif policy == "Foreground" and FOREGROUND not in metadata.get("finalizers", []):
            metadata["finalizers"] = [*metadata.get("finalizers", []), FOREGROUND]
            metadata.setdefault("deletionTimestamp", format_time(datetime.now(UTC)))
            metadata["deletionGracePeriodSeconds"] = 0
            self.write(key, item)
            return
        if metadata.get("finalizers"):
            if "deletionTimestamp" not in metadata:
                metadata |= {"deletionTimestamp": format_time(datetime.now(UTC)), "deletionGracePeriodSeconds": 0}
                self.write(key, item)
            return
        del self.objects[key, metadata.get("namespace", ""), metadata["name"]]
        self.version += 1

    def finalize(self, key: str, item: Json) -> None:
        """Delete an object that was only waiting for a finalizer that is now gone."""
        metadata = item["metadata"]
        if metadata.get("deletionTimestamp") and not metadata.get("finalizers") and key != "/pods":
            self.remove(key, item, "Background", None)

    def collect_garbage(self) -> None:
        while True:
            uids = {item["metadata"]["uid"] for item in self.objects.values()}
            deleting = {
                item["metadata"]["uid"]
                for item in self.objects.values()
                if FOREGROUND in item["metadata"].get("finalizers", [])
            }
            owned: set[str] = set()
            before = self.version
            for (key, _, _), item in list(self.objects.items()):
                owners = [reference["uid"] for reference in item["metadata"].get("ownerReferences", [])]
                owned |= set(owners)
                if owners and not any(uid in uids and uid not in deleting for uid in owners):
                    policy = "Foreground" if set(owners) & deleting else "Background"
                    self.remove(key, item, policy, None)
            for (key, _, _), item in list(self.objects.items()):
                finalizers = item["metadata"].get("finalizers", [])
                if FOREGROUND in finalizers and item["metadata"]["uid"] not in owned:
                    item["metadata"]["finalizers"] = [name for name in finalizers if name != FOREGROUND]
                    self.write(key, item)
                    self.finalize(key, item)
            if self.version == before:
                return

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
