"""Clients of a service under faults: what was not acknowledged is sent again, and every refusal has to help."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
from evalstop_service.store.observations import PostedObservation

from tests.fixtures.certificates import get_ssl_context

DEADLINE_SECONDS = 90.0
"""For whatever has to happen in the end, on a machine that does much else."""


def wait_until(condition: Callable[[], bool], what: str, deadline_seconds: float = DEADLINE_SECONDS) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + deadline_seconds
    while not condition():
        assert time.monotonic() < deadline, f"in vain waited until {what}"
        time.sleep(0.01)


def batch(points: Sequence[PostedObservation]) -> dict[str, Any]:
    """The body that posts these points."""
    return {"observations": [{"metric": point.metric, "step": point.step, "value": point.value} for point in points]}


@dataclass
class Caller:
    """One client, which turns to another address with each try; `refusals` are the problems that it was told."""

    key: str
    address: Callable[[], str]
    client: httpx.Client = field(
        default_factory=lambda: httpx.Client(verify=get_ssl_context(), timeout=60, trust_env=False)
    )
    refusals: list[dict[str, Any]] = field(default_factory=list)
    cut: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def try_once(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Post once; raises httpx.TransportError when there is no answer."""
        url = f"{self.address()}/api/v1{path}"
        return self.client.post(url, json=body, headers={"Authorization": f"Bearer {self.key}"})

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post until it is acknowledged."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            try:
                response = self.try_once(path, body)
            except httpx.TransportError:
                self.cut += 1
            else:
                if response.status_code in (200, 201):
                    document: dict[str, Any] = response.json()
                    return document
                self.refusals.append(helpful(response))
            assert time.monotonic() < deadline, f"not acknowledged: {self.refusals[-1:]}"
            time.sleep(0.05)

    def get(self, path: str, **parameters: str) -> dict[str, Any]:
        """Ask until there is an answer."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            try:
                url = f"{self.address()}/api/v1{path}"
                response = self.client.get(url, params=parameters, headers={"Authorization": f"Bearer {self.key}"})
                if response.status_code == 200:
                    document: dict[str, Any] = response.json()
                    return document
                self.refusals.append(helpful(response))
            except httpx.TransportError:
                self.cut += 1
            assert time.monotonic() < deadline, "no answer"
            time.sleep(0.05)


def helpful(response: httpx.Response) -> dict[str, Any]:
    """The problem in a refusal of what should be sent again: 503, when to come back, and what to do."""
    assert response.status_code == 503, (response.status_code, response.text)
    assert int(response.headers["retry-after"]) >= 1
    problem: dict[str, Any] = response.json()
    assert problem["status"] == 503
    assert "the same request again" in problem["detail"]
    return problem


class Trainer(threading.Thread):
    """Tells a run of its own step by step, with a pause in between, until it is told to end; all in `acknowledged` was
    answered 200."""

    def __init__(self, caller: Caller, name: str, end: threading.Event, pause_seconds: float = 0.0) -> None:
        super().__init__(name=name)
        self._pause_seconds = pause_seconds
        self.caller, self.run_id = caller, ""
        self.acknowledged: list[list[PostedObservation]] = []
        self.failure: BaseException | None = None
        self._end = end

    def run(self) -> None:
        try:
            with self.caller:
                terms = {"name": self.name, "policy": "paper", "mode": "enforce"}
                self.run_id = self.caller.post("/runs", terms)["id"]
                step = 0
                while not self._end.wait(self._pause_seconds):
                    points = told(step)
                    self.caller.post(f"/runs/{self.run_id}/observations", batch(points))
                    self.acknowledged.append(points)
                    step += 1
        except BaseException as error:
            self.failure = error


def told(step: int) -> list[PostedObservation]:
    """What a trainer tells at a step: the gold score rises for 30 steps and falls for 5, over and over."""
    gold = step % 35 if step % 35 < 30 else 60 - step % 35
    return [
        PostedObservation("proxy", step, step * 1.5),
        PostedObservation("kl", step, step / 3),
        PostedObservation("eval", step, gold / 10),
    ]


def more(trainers: Sequence[Trainer], count: int) -> None:
    """Wait until so many more batches were acknowledged."""
    goal = sum(len(trainer.acknowledged) for trainer in trainers) + count

    def reached() -> bool:
        assert all(trainer.failure is None for trainer in trainers), [trainer.failure for trainer in trainers]
        return sum(len(trainer.acknowledged) for trainer in trainers) >= goal

    wait_until(reached, f"{count} more batches were acknowledged")


@contextmanager
def training(trainers: Sequence[Trainer], end: threading.Event) -> Iterator[None]:
    """Trainers that end with the block; raises what one of them failed with."""
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
