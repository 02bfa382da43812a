"""A fake pull endpoint: the service's side of a receiver that fetches its events."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.clients.fake_service import Answer
from tests.clients.webhooks import SECRET, sign_event


@dataclass
class FakePullEndpoint:
    """The endpoint `e1`. An event is returned to every claim until it is settled.

    `journal`: the receiver's folder; `journaled` records for each settlement whether a file was in it by then.
    """

    journal: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    settlements: list[dict[str, Any]] = field(default_factory=list)
    claims: int = 0
    errors: list[Answer] = field(default_factory=list)
    refuses_settlements: bool = False
    journaled: list[bool] = field(default_factory=list)

    def add(self, event: Any, delivery_id: str = "d1", secret: str = SECRET) -> None:
        headers, body = sign_event(event, f"msg-{delivery_id}", secret)
        self.events.append({"delivery_id": delivery_id, "attempt": 1, "headers": headers, "body": body.decode()})

    def answer(self, path: str, body: Any) -> Answer | None:
        """The answer to a request to the endpoint; None if it is for another path."""
        if path.endswith("/pull/endpoints/e1/claim"):
            self.claims += 1
            if self.errors:
                return self.errors.pop(0)
            if not self.events:
                time.sleep(0.02)
            return Answer(200, {"events": list(self.events)})
        if path.endswith("/pull/endpoints/e1/settle"):
            if self.refuses_settlements:
                return Answer(503, {})
            self.journaled.append(any(self.journal.glob("*.json")))
            self.settlements.append(body)
            self.events = [event for event in self.events if event["delivery_id"] != body["delivery_id"]]
            return Answer(200, {"settled": True})
        return None
