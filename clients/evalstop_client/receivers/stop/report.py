"""Reports the progress and end of a stop to the service, and queries newer checkpoints."""

from __future__ import annotations

import json
import logging
import math
import threading
import unicodedata
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from evalstop_client.receivers.stop.job_control import StopRequest
from evalstop_client.receivers.stop.steps import Report
from evalstop_client.service import Accepted, Refused, Service, Unavailable

logger = logging.getLogger("evalstop_client.receivers")

REPORTING_SCOPES = {"report", "operate", "admin"}
"""A key with any of them may report."""

MAX_DEPTH, MAX_TEXT = 7, 2000
"""The service accepts 8 levels of nesting; what is nested deeper is reported as text, of at most 2000 characters."""


MAX_NAMES, TOO_LARGE = 1000, 10**399
"""The service accepts this many names in an object, and numbers of up to 400 digits with their sign."""


class ReportClient:
    """Sends reports to `POST /decisions/{id}/report`; each call is one try. Not thread-safe."""

    def __init__(self, url: str | None, key: str | None, actor: str) -> None:
        self._actor = actor
        self._service = None if url is None else Service(url, key)
        self._complained = False

    def close(self) -> None:
        if self._service is not None:
            self._service.close()

    def check_key(self) -> None:
        """Log what would keep reports from the service, before there is one."""
        if self._service is None:
            logger.warning("no url was given (--url, EVALSTOP_URL): nothing will be reported to the service")
            return
        answer = self._service.get("/key")
        if not isinstance(answer, Accepted):
            logger.warning("stops could not be reported as of now: %s", answer.reason)
            return
        scopes = answer.body.get("scopes")
        if isinstance(scopes, list) and not REPORTING_SCOPES & set(map(str, scopes)):
            logger.error(
                "the key %r may not report, it has %s: `evalstop key create --name receiver --scopes report` makes one",
                answer.body.get("name"),
                ", ".join(map(str, scopes)),
            )

    def send(self, request: StopRequest, report: Report) -> Accepted | Unavailable | Refused:
        """Send a report once; Unavailable means to retry."""
        logger.info("decision %s: %s: %s", request.decision_id, report.state, report.reason)
        if self._service is None:
            logger.warning("no url is set (--url, EVALSTOP_URL): nothing is reported to the service")
            return Refused(0, "no url is set")
        answer = self._service.post(_path(request), self._body(report))
        if isinstance(answer, Accepted):
            return answer
        if isinstance(answer, Refused):
            logger.error("the service refuses the report: %s", answer.reason)
            return answer
        if not self._complained:
            self._complained = True
            logger.warning("the report was not accepted, retrying: %s", answer.reason)
        return answer if isinstance(answer, Unavailable) else Unavailable(answer.reason)  # a person may fix the key

    def acknowledge(self, request: StopRequest, report: Report, expected_seconds: float) -> str | None:
        """Report once, without retry, that the stop has started and how long its job may take to save a checkpoint.

        Returns the state of the decision; None if the service did not accept the report.
        """
        if self._service is None:
            return None
        answer = self._service.post(_path(request), self._body(report) | {"expected_seconds": expected_seconds})
        if not isinstance(answer, Accepted):
            logger.info("decision %s: could not be acknowledged: %s", request.decision_id, answer.reason)
            return None
        state = answer.body.get("state")
        return state if isinstance(state, str) else None

    def _body(self, report: Report) -> dict[str, Any]:
        return {
            "state": report.state,
            "actor": self._actor,
            "reason": _clean(report.reason[:2000]),
            "details": _clean(dict(report.details)),
        }

    def newest_checkpoint(self, request: StopRequest) -> str | None:
        """When the run's newest checkpoint was registered, by the service's clock; "" without any, None if unknown."""
        if self._service is None:
            return None
        answer = self._service.get(f"/runs/{quote(request.run_id, safe='')}/checkpoints")
        if not isinstance(answer, Accepted):
            return None
        items = answer.body.get("items")
        times = [item.get("created_at") for item in items if isinstance(item, dict)] if isinstance(items, list) else []
        return max((time for time in times if isinstance(time, str)), default="")


def start_key_check(reports: Callable[[], ReportClient]) -> None:
    """Check whether stops can be reported, in parallel with the start of a receiver."""

    def check() -> None:
        client = reports()  # a connection belongs to one thread
        try:
            client.check_key()
        finally:
            client.close()

    threading.Thread(target=check, name="check-key", daemon=True).start()


def _clean(value: Any, depth: int = MAX_DEPTH) -> Any:
    """The value as the service accepts it, whatever a scheduler's program printed: else it would refuse the report."""
    if (depth == 1 and isinstance(value, dict | list)) or (isinstance(value, dict) and len(value) > MAX_NAMES):
        value = json.dumps(value)[:MAX_TEXT]
    match value:
        case dict():
            return {_clean(name): _clean(item, depth - 1) for name, item in value.items()}
        case list():
            return [_clean(item, depth - 1) for item in value]
        case float() if not math.isfinite(value):
            return str(value)
        case int() if abs(value) >= TOO_LARGE:
            return str(value)
        case str():
            controls = {sign for sign in value if unicodedata.category(sign) in ("Cc", "Cs")} - {"\n", "\t"}
            return "".join(" " if sign in controls else sign for sign in value)
    return value


def _path(request: StopRequest) -> str:
    return f"/decisions/{quote(request.decision_id, safe='')}/report"
