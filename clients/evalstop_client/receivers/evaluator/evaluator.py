"""Answers requests to evaluate now: fetches them, has both checkpoints evaluated, and reports the difference.

It keeps nothing: a request stays open until it is answered, so that an evaluator that dies in the middle begins again
when it is started again, and of two evaluators of one project the first answer stands.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from evalstop_client.eval_request import Difference, compare_scores
from evalstop_client.receivers.evaluator.evaluation import EvaluationFailed, evaluate, fill_command
from evalstop_client.receivers.retry import seconds_after
from evalstop_client.service import Accepted, Json, Refused, Service

logger = logging.getLogger("evalstop_client.receivers")

TRIES = 3


@dataclass(frozen=True)
class Evaluation:
    """How checkpoints are evaluated: a command with places, the prompts of a usual eval, what may be loaded."""

    command: Sequence[str]
    environment: dict[str, str]
    prompts: int
    prefixes: Sequence[str]
    timeout_seconds: float


class Evaluator:
    """Asks the service every `poll_seconds`; evaluates one request after the other."""

    def __init__(self, service: Service, evaluation: Evaluation, poll_seconds: float) -> None:
        self._service = service
        self._evaluation = evaluation
        self._poll_seconds = poll_seconds
        self._failures: Counter[str] = Counter()
        self._ended = threading.Event()

    def end(self) -> None:
        """Begin no other evaluation."""
        self._ended.set()

    def run(self) -> None:
        """Answer requests until `end`."""
        away = 0
        while not self._ended.is_set():
            answer = self._service.get("/eval-requests")
            if isinstance(answer, Accepted):
                away = 0
                items = answer.body.get("items")
                for item in items if isinstance(items, list) else []:
                    if not self._ended.is_set():
                        self._take(item)
                self._ended.wait(self._poll_seconds)
                continue
            away += 1
            if away == 1:
                logger.warning("requests cannot be fetched, retrying: %s", answer.reason)
            self._ended.wait(seconds_after(answer, away))

    def _take(self, item: Json) -> None:
        """Evaluate and report, unless there is no checkpoint of now yet; gives up a request that failed thrice."""
        try:
            request_id, run_id, current = str(item["id"]), str(item["run_id"]), item["current_checkpoint"]
            if current is None or self._failures[request_id] >= TRIES:
                return
            uris = str(item["best_checkpoint"]["uri"]), str(current["uri"])
            prompts, seed = self._evaluation.prompts * int(item["multiplier"]), int(item["seed"])
        except (KeyError, TypeError, ValueError) as error:
            logger.error("the service gave a request that cannot be read: %s %s", type(error).__name__, error)
            return
        try:
            found = self._compare(uris, prompts, seed)
        except (EvaluationFailed, ValueError) as error:
            self._failures[request_id] += 1
            logger.error("request %s, try %d of %d: %s", request_id, self._failures[request_id], TRIES, error)
            return
        path = f"/runs/{quote(run_id, safe='')}/eval-requests/{quote(request_id, safe='')}/answer"
        self._report(path, found)

    def _compare(self, uris: Sequence[str], prompts: int, seed: int) -> Difference:
        how = self._evaluation
        commands = [fill_command(how.command, uri, prompts, seed, how.prefixes) for uri in uris]
        best, current = (evaluate(command, how.environment, how.timeout_seconds, self._ended) for command in commands)
        return compare_scores(best, current)

    def _report(self, path: str, found: Difference) -> None:
        """Repeat the answer until the service has taken or refused it."""
        tries = 0
        while not self._ended.is_set():
            answer = self._service.post(path, found._asdict())
            if isinstance(answer, Accepted):
                logger.info("answered: the difference is %g, its standard error %g", found.difference, found.stderr)
                return
            if isinstance(answer, Refused):
                logger.warning("the service does not take the answer: %s", answer.reason)
                return
            tries += 1
            self._ended.wait(seconds_after(answer, tries))
