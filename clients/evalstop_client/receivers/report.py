"""Tells the service how a stop ended, again and again until it has understood."""

from __future__ import annotations

import logging
import random
import time
from typing import Any
from urllib.parse import quote

from evalstop_client.backoff import wait_seconds
from evalstop_client.receivers.action import Ended, Failed, StopRequest
from evalstop_client.service import Accepted, Away, Refused, Service

logger = logging.getLogger("evalstop_client.receivers")


class Reports:
    """Brings reports to `POST /decisions/{id}/report`; each is tried for `report_seconds`, and at least once."""

    def __init__(self, url: str | None, key: str | None, actor: str, report_seconds: float) -> None:
        self._url = url
        self._key = key
        self._actor = actor
        self._report_seconds = report_seconds

    def send(self, request: StopRequest, result: Ended | Failed) -> bool:
        """Report `result` and wait until the service has accepted it; False when it did not in time."""
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
        try:
            return self._insist(service, f"/decisions/{quote(request.decision_id, safe='')}/report", body)
        finally:
            service.close()

    def _insist(self, service: Service, path: str, body: dict[str, Any]) -> bool:
        deadline = time.monotonic() + self._report_seconds
        failures = 0
        while True:
            answer = service.post(path, body)
            if isinstance(answer, Accepted):
                return True
            if isinstance(answer, Refused):
                logger.error("the service refuses the report: %s", answer.reason)
                return False
            failures += 1
            asked_seconds = answer.asked_seconds if isinstance(answer, Away) else None
            pause_seconds = wait_seconds(failures, random.random(), asked_seconds)
            if time.monotonic() + pause_seconds > deadline:
                logger.error("the report was never accepted: %s", answer.reason)
                return False
            if failures == 1:
                logger.warning("the report is not accepted yet, trying on: %s", answer.reason)
            time.sleep(pause_seconds)
