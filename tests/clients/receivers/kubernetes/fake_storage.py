"""What a fake API server remembers: objects, versions, what has happened, and what goes with what."""

from __future__ import annotations

import copy
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

Json = dict[str, Any]
FOREGROUND = "foregroundDeletion"


class Answered(Exception):
    """An answer that is no success, in the shape of a Status."""

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
    """Objects by group/plural, namespace and name; whoever reads or writes holds `changed`.

    `remembers`: events of the past that a watch can begin with.
    """

    def __init__(self, remembers: int = 1_000) -> None:
        self.remembers = remembers
        self.changed = threading.Condition(threading.RLock())
        self.version = 100
        self.forgotten = 0
        self.objects: dict[tuple[str, str, str], Json] = {}
        self.past: list[tuple[int, str, str, Json]] = []  # version, group/plural, type, object

    def remove(self, key: str, item: Json, policy: str, grace: int | None) -> None:
        metadata = item["metadata"]
        if key == "/pods":
            given = grace if grace is not None else item["spec"].get("terminationGracePeriodSeconds", 30)
            bound = item["spec"].get("nodeName") and item.get("status", {}).get("phase") not in ("Succeeded", "Failed")
            left = given if bound else 0
            if left > 0:
                if left < metadata.get("deletionGracePeriodSeconds", left + 1):
                    metadata["deletionTimestamp"] = text_of(datetime.now(UTC) + timedelta(seconds=left))
                    metadata["deletionGracePeriodSeconds"] = left
                    self.write(key, item, "MODIFIED")
                return
            if bound and "deletionTimestamp" not in metadata:
                metadata |= {"deletionTimestamp": text_of(datetime.now(UTC)), "deletionGracePeriodSeconds": 0}
                self.write(key, item, "MODIFIED")
        elif policy == "Foreground" and FOREGROUND not in metadata.get("finalizers", []):
            metadata["finalizers"] = [*metadata.get("finalizers", []), FOREGROUND]
            metadata.setdefault("deletionTimestamp", text_of(datetime.now(UTC)))
            metadata["deletionGracePeriodSeconds"] = 0
            self.write(key, item, "MODIFIED")
            return
        if metadata.get("finalizers"):
            if "deletionTimestamp" not in metadata:
                metadata |= {"deletionTimestamp": text_of(datetime.now(UTC)), "deletionGracePeriodSeconds": 0}
                self.write(key, item, "MODIFIED")
            return
        del self.objects[key, metadata.get("namespace", ""), metadata["name"]]
        self.record(key, item, "DELETED")

    def finalize(self, key: str, item: Json) -> None:
        """What was being deleted, and was waited for by nobody but a finalizer that is gone now, goes."""
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
                owners = [one["uid"] for one in item["metadata"].get("ownerReferences", [])]
                owned |= set(owners)
                if owners and not any(one in uids and one not in deleting for one in owners):
                    policy = "Foreground" if set(owners) & deleting else "Background"
                    self.remove(key, item, policy, None)
            for (key, _, _), item in list(self.objects.items()):
                finalizers = item["metadata"].get("finalizers", [])
                if FOREGROUND in finalizers and item["metadata"]["uid"] not in owned:
                    item["metadata"]["finalizers"] = [one for one in finalizers if one != FOREGROUND]
                    self.write(key, item, "MODIFIED")
                    self.finalize(key, item)
            if self.version == before:
                return

    def write(self, key: str, item: Json, kind: str) -> None:
        self.record(key, item, kind)
        metadata = item["metadata"]
        self.objects[key, metadata.get("namespace", ""), metadata["name"]] = item

    def record(self, key: str, item: Json, kind: str) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self.past.append((self.version, key, kind, copy.deepcopy(item)))
        while len(self.past) > self.remembers:
            self.forgotten = self.past.pop(0)[0]

    def forget_the_past(self) -> None:
        """What happened until now can no longer be watched, as after a compaction."""
        with self.changed:
            self.version += 1
            self.forgotten = self.version
            self.past.clear()

    def read(self, key: str, namespace: str, name: str, what: str, group: str) -> Json:
        found = self.objects.get((key, namespace, name))
        if found is None:
            words = f'{what}{group and "."}{group} "{name}" not found'
            raise Answered(404, "NotFound", words, name=name, group=group, kind=what)
        return copy.deepcopy(found)


def text_of(moment: datetime) -> str:
    """A time as the API writes it."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
