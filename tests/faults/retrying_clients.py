"""Clients of a service under faults: they retry until a request is acknowledged, and check every refusal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
from evalstop_service.store.observations import PostedObservation

from tests.fixtures.certificates import get_ssl_context

DEADLINE_SECONDS = 90.0
"""The longest that a test waits for anything, on a loaded machine too."""

LONGEST_PAUSE_SECONDS = 0.1
"""Between two looks at a condition; many ask a database, which costs as much as what the test is about."""


def wait_until(condition: Callable[[], bool], expected: str, deadline_seconds: float = DEADLINE_SECONDS) -> None:
    """Wait until the condition holds; fails with what was expected after the deadline."""
    deadline = time.monotonic() + deadline_seconds
    pause_seconds = 0.01
    while not condition():
        assert time.monotonic() < deadline, f"timed out: {expected}"
        time.sleep(pause_seconds)
        pause_seconds = min(1.2 * pause_seconds, LONGEST_PAUSE_SECONDS)


def build_batch(points: Sequence[PostedObservation]) -> dict[str, Any]:
    """The JSON body that posts these observations."""
    return {"observations": [{"metric": point.metric, "step": point.step, "value": point.value} for point in points]}


@dataclass
class RetryingClient:
    """An API client that calls `choose_url` for each attempt.

    `refusals` are the problems it received; `connection_errors` counts the attempts without an answer.
    """

    key: str
    choose_url: Callable[[], str]
    client: httpx.Client = field(
        default_factory=lambda: httpx.Client(verify=get_ssl_context(), timeout=60, trust_env=False)
    )
    refusals: list[dict[str, Any]] = field(default_factory=list)
    connection_errors: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def post_once(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Post once; raises httpx.TransportError if there is no answer."""
        url = f"{self.choose_url()}/api/v1{path}"
        return self.client.post(url, json=body, headers={"Authorization": f"Bearer {self.key}"})

    def post(self, path: str, body: dict[str, Any], accepted: Collection[int] = (200, 201)) -> dict[str, Any]:
        """Post until the request is answered with one of these statuses; returns the response."""
        return self._retry(lambda: self.post_once(path, body), accepted)

    def get(self, path: str, **parameters: str) -> dict[str, Any]:
        """Get until there is an answer; returns the response."""
        headers = {"Authorization": f"Bearer {self.key}"}
        return self._retry(
            lambda: self.client.get(f"{self.choose_url()}/api/v1{path}", params=parameters, headers=headers)
        )

    def _retry(self, send: Callable[[], httpx.Response], accepted: Collection[int] = (200, 201)) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            try:
                response = send()
            except httpx.TransportError:
                self.connection_errors += 1
            else:
                if response.status_code in accepted:
                    document: dict[str, Any] = response.json()
                    return document
                if (
                    response.status_code == 429
                ):  # late observations are charged by time, of which a slow machine takes more
                    time.sleep(int(response.headers["retry-after"]))
                    continue
                self.refusals.append(check_retryable_refusal(response))
            assert time.monotonic() < deadline, f"not acknowledged: {self.refusals[-1:]}"
            time.sleep(0.05)


def check_retryable_refusal(response: httpx.Response) -> dict[str, Any]:
    """Check that a refusal is a 503 with Retry-After that asks to send the request again; returns the problem."""
    assert response.status_code == 503, (response.status_code, response.text)
    assert int(response.headers["retry-after"]) >= 1
    problem: dict[str, Any] = response.json()
    assert problem["status"] == 503
    assert "the same request again" in problem["detail"]
    return problem


class Trainer(threading.Thread):
    """Posts the observations of a new run step by step until `end` is set.

    `acknowledged` holds the observations of each post that was answered 200.
    """

    def __init__(self, client: RetryingClient, name: str, end: threading.Event, pause_seconds: float = 0.0) -> None:
        super().__init__(name=name)
        self._pause_seconds = pause_seconds
        self.client, self.run_id = client, ""
        self.acknowledged: list[list[PostedObservation]] = []
        self.failure: BaseException | None = None
        self.end = end

    def run(self) -> None:
        try:
            with self.client:
                self.report()
        except BaseException as error:
            self.failure = error

    def report(self) -> None:
        """Open the run and post its observations."""
        self.run_id = self.client.post("/runs", {"name": self.name, "policy": "paper", "mode": "enforce"})["id"]
        step = 0
        while not self.end.wait(self._pause_seconds):
            points = create_observations(step)
            self.client.post(f"/runs/{self.run_id}/observations", build_batch(points))
            self.acknowledged.append(points)
            step += 1


def create_observations(step: int) -> list[PostedObservation]:
    """A trainer's observations at a step: the eval rises for 30 steps and falls for 5, repeatedly."""
    score = step % 35 if step % 35 < 30 else 60 - step % 35
    return [
        PostedObservation("proxy", step, step * 1.5),
        PostedObservation("kl", step, step / 3),
        PostedObservation("eval", step, score / 10),
    ]


def wait_for_batches(trainers: Sequence[Trainer], count: int) -> None:
    """Wait until `count` more batches are acknowledged; fails if a trainer failed."""
    goal = sum(len(trainer.acknowledged) for trainer in trainers) + count

    def reached() -> bool:
        assert all(trainer.failure is None for trainer in trainers), [trainer.failure for trainer in trainers]
        return sum(len(trainer.acknowledged) for trainer in trainers) >= goal

    wait_until(reached, f"{count} more batches are acknowledged")


@contextmanager
def run_trainers(trainers: Sequence[Trainer], end: threading.Event) -> Iterator[None]:
    """Run the trainers until the end of the block; raises the first failure of a trainer."""
    try:
        for trainer in trainers:
            trainer.start()
        yield
    finally:
        end.set()
        for trainer in trainers:
            trainer.join()
    for trainer in trainers:
        if trainer.failure is not None:
            raise trainer.failure
