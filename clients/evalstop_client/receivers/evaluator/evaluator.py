"""Answers requests to evaluate now: fetches them, evaluates both checkpoints, and reports the difference.

It stores nothing: a request stays open until it is answered, so a restarted evaluator starts over, and of two
evaluators of one project the first answer stands.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from urllib.parse import quote

from evalstop_client.backoff import seconds_after
from evalstop_client.errors import SchedulerError
from evalstop_client.eval_request import Difference
from evalstop_client.receivers.evaluator.evaluation import CommandEvaluation, EvaluationFailed, PairedRequest
from evalstop_client.receivers.evaluator.kubernetes_job import JobEvaluation
from evalstop_client.service import Accepted, Json, Refused, Service

Evaluation = CommandEvaluation | JobEvaluation

logger = logging.getLogger("evalstop_client.receivers")

MOST_REQUESTS = 200
"""Maximum number of requests that the service returns."""


class Evaluator:
    """Polls the service every `poll_seconds` until `ended` is set; `prompts`: the number in a usual eval."""

    def __init__(
        self, service: Service, evaluation: Evaluation, prompts: int, poll_seconds: float, ended: threading.Event
    ) -> None:
        self._service = service
        self._evaluation = evaluation
        self._prompts = prompts
        self._poll_seconds = poll_seconds
        self._ended = ended
        self._failures: Counter[str] = Counter()
        self._delays: dict[str, str] = {}

    def run(self) -> None:
        failures = 0
        while not self._ended.is_set():
            answer = self._service.get(f"/eval-requests?limit={MOST_REQUESTS}")
            if isinstance(answer, Accepted):
                failures = 0
                items = answer.body.get("items")
                for item in items if isinstance(items, list) else []:
                    if not self._ended.is_set():
                        self._process_request(item)
                self._ended.wait(self._poll_seconds)
                continue
            failures += 1
            if failures == 1:
                logger.warning("requests cannot be fetched, retrying: %s", answer.reason)
            self._ended.wait(seconds_after(answer, failures))

    def _process_request(self, item: Json) -> None:
        """Evaluate and report, unless there is no current checkpoint yet, or it failed too often."""
        try:
            if item["current_checkpoint"] is None:
                return
            request = PairedRequest(
                id=str(item["id"]),
                run_id=str(item["run_id"]),
                best_uri=str(item["best_checkpoint"]["uri"]),
                current_uri=str(item["current_checkpoint"]["uri"]),
                prompts=self._prompts * int(item["multiplier"]),
                seed=int(item["seed"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            logger.error("the service returned a malformed request: %s %s", type(error).__name__, error)
            return
        tries = self._evaluation.tries
        if self._failures[request.id] >= tries:
            return
        try:
            difference = self._evaluation.compare(request)
        except SchedulerError as error:
            if self._delays.get(request.id) != str(error):  # not at every poll
                logger.warning("request %s waits: %s", request.id, error)
            self._delays[request.id] = str(error)
            return
        except (EvaluationFailed, ValueError) as error:
            self._failures[request.id] += 1
            logger.error("request %s, try %d of %d: %s", request.id, self._failures[request.id], tries, error)
            return
        if difference is not None:
            self._report_difference(request, difference)

    def _report_difference(self, request: PairedRequest, difference: Difference) -> None:
        """Repeat the answer until the service has accepted or refused it."""
        path = f"/runs/{quote(request.run_id, safe='')}/eval-requests/{quote(request.id, safe='')}/answer"
        tries = 0
        while not self._ended.is_set():
            answer = self._service.post(path, difference._asdict())
            if isinstance(answer, Accepted):
                logger.info(
                    "request %s is answered: the difference is %g, its standard error %g",
                    request.id,
                    difference.difference,
                    difference.stderr,
                )
                return
            if isinstance(answer, Refused):
                logger.warning("the service does not accept the answer: %s", answer.reason)
                return
            tries += 1
            self._ended.wait(seconds_after(answer, tries))
