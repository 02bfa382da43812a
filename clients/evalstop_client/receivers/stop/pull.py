"""Fetches events, for hosts without inbound connections: claim, receive, settle."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any
from urllib.parse import quote

from evalstop_client.backoff import seconds_after
from evalstop_client.receivers.stop.webhook_handler import Receiver
from evalstop_client.service import Accepted, Json, Refused, Service

logger = logging.getLogger("evalstop_client.receivers")

EMPTY_SECONDS = 0.1  # after an empty poll, so that a service that does not wait is not polled in a tight loop


class Puller:
    """Long-polls one pull endpoint and passes each event to the receiver, as if it had been posted.

    An event is settled once the receiver has answered, which is after it is journaled: if a receiver dies, its claimed
    events come again when the claim expires.
    """

    def __init__(
        self, url: str, key: str | None, endpoint_id: str, receiver: Receiver, poll_seconds: float = 25.0
    ) -> None:
        self._service = Service(url, key, timeout_seconds=poll_seconds + 15.0)
        self._path = f"/pull/endpoints/{quote(endpoint_id, safe='')}"
        self._receiver = receiver
        self._poll_seconds = poll_seconds
        self._ended = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self.run, name="puller", daemon=True).start()

    def end(self) -> None:
        """Start no further poll; does not interrupt a waiting one."""
        self._ended.set()

    def run(self) -> None:
        failures = 0
        while not self._ended.is_set():
            claim = {"wait_seconds": self._poll_seconds, "limit": 10, "lease_seconds": 30}
            answer = self._service.post(f"{self._path}/claim", claim)
            answered = isinstance(answer, Accepted)
            self._receiver.metrics.add("polls_total", f'answered="{"yes" if answered else "no"}"')
            if isinstance(answer, Accepted):
                if failures:
                    logger.info("the service answers again")
                failures = 0
                events = answer.body.get("events")
                for event in events if isinstance(events, list) else []:
                    self._handle_event(event)
                if not events:
                    self._ended.wait(EMPTY_SECONDS)
                continue
            failures += 1
            if failures == 1:
                logger.warning("events cannot be fetched, retrying: %s", answer.reason)
            self._ended.wait(seconds_after(answer, failures))

    def _handle_event(self, event: Json) -> None:
        if self._ended.is_set():
            return  # left to the next receiver
        try:
            headers, body = event["headers"], event["body"].encode()
            claim: dict[str, Any] = {"delivery_id": event["delivery_id"], "attempt": event["attempt"]}
        except (KeyError, TypeError, AttributeError) as error:
            logger.error("the service returned a malformed event: %s %s", type(error).__name__, error)
            return
        try:
            reply = self._receiver.receive(headers, body, time.time())
        except Exception:  # any error: the next event must not be lost; this one comes again
            logger.exception("an event could not be handled")
            return
        detail = str(reply.body.get("error", ""))[:300] if reply.status >= 300 else ""
        answer = self._service.post(f"{self._path}/settle", {**claim, "status": reply.status, "error": detail})
        if isinstance(answer, Refused):
            logger.error("the service does not accept the settlement: %s", answer.reason)
