"""Tells the service how a stop ended, until it has understood or it no longer makes sense."""

from __future__ import annotations

import logging
import random
import threading
from typing import Any
from urllib.parse import quote

from evalstop_client.backoff import wait_seconds
from evalstop_client.receivers.action import Ended, Failed, StopRequest
from evalstop_client.service import Accepted, Refused, Service

logger = logging.getLogger("evalstop_client.receivers")


class Reports:
    """Brings reports to `POST /decisions/{id}/report`, again and again, until `give_up` is called."""

    def __init__(self, url: str | None, key: str | None, actor: str) -> None:
        self._url = url
        self._key = key
        self._actor = actor
        self._given_up = threading.Event()

    def send(self, request: StopRequest, result: Ended | Failed) -> bool:
        """Report `result` and wait until the service has accepted it; False when it never did."""
        body: dict[str, Any] = {
            "state": "confirmed" if isinstance(result, Ended) else "failed",
            "actor": self._actor,
            "reason": result.reason,
            "details": dict(result.details),
        }
        logger.info("decision %s: %s: %s", request.decision_id, body["state"], result.reason)
        if self._url is None:
            logger.warning("no url was given (--url, EVALSTOP_URL): the service is not told")
            return False
        service = Service(self._url, self._key)
        failures = 0
        try:
            while True:
                answer = service.post(f"/decisions/{quote(request.decision_id, safe='')}/report", body)
                if isinstance(answer, Accepted):
                    return True
                if isinstance(answer, Refused):
                    logger.error("the service refuses the report: %s", answer.reason)
                    return False
                failures += 1
                if failures == 1:
                    logger.warning("the report is not accepted yet, trying on: %s", answer.reason)
                asked_seconds = getattr(answer, "asked_seconds", None)
                if self._given_up.wait(wait_seconds(failures, random.random(), asked_seconds)):
                    return False
        finally:
            service.close()

    def give_up(self) -> None:
        """End the attempts that are under way."""
        self._given_up.set()
