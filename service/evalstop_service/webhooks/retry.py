"""Which deliveries are retried, and when: the only place that decides. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from evalstop_service.store.queue.attempts import Dead, Delivered, Result, Retry

GONE = 410
"""The endpoint wants no more events and is disabled."""

REJECTIONS = frozenset({400, 413, 415, 422, 550, 551, 552, 553, 554})
"""The endpoint has read the event and will always reject it; from 550 on, a mail server rejects the address or the
message. Other errors may be temporary: a deployment, a firewall."""


@dataclass(frozen=True)
class Answer:
    """The result of one attempt: a status code, or None with an error when there was no answer.

    `excerpt`: the start of the answer's body.
    """

    status_code: int | None
    error: str | None
    duration_ms: float
    excerpt: str | None = None

    @property
    def is_accepted(self) -> bool:
        """Whether a receiver has the event."""
        return self.status_code is not None and 200 <= self.status_code < 300 and self.error is None


@dataclass(frozen=True)
class Backoff:
    """Exponential backoff: `first_seconds`, then twice as long each time, never above `cap_seconds`.

    The cap is low because a late stop costs GPU hours: a receiver that was down gets its events within that time of
    its return. With these defaults a delivery is given up after about a day.
    """

    first_seconds: float = 1.0
    cap_seconds: float = 900.0
    max_attempts: int = 100

    def seconds(self, attempts: int, chance: float) -> float:
        """How long to wait after `attempts` attempts (at least 1); `chance` in [0, 1) spreads it over the upper
        half."""
        full = min(self.first_seconds * 2.0 ** min(attempts - 1, 100), self.cap_seconds)
        return full * (0.5 + 0.5 * chance)


PULL_BACKOFF = Backoff(cap_seconds=60.0, max_attempts=1500)
"""For events that a receiver fetched but could not handle: it is there, so that they are offered again sooner."""


def judge_answer(answer: Answer, attempts: int, now: datetime, chance: float, backoff: Backoff) -> Result:
    """The result of attempt number `attempts`."""
    code = answer.status_code
    if answer.is_accepted:
        return Delivered()
    error = answer.error or (f"HTTP {code}" if code is not None else "no answer")
    if code == GONE:
        return Dead(f"{error}: the endpoint is permanently gone and was disabled", gone=True)
    if code is not None and 300 <= code < 400:
        return Dead(f"{error}: redirects are not followed; change the endpoint's URL")
    if code in REJECTIONS:
        return Dead(error)
    if attempts >= backoff.max_attempts:
        return Dead(f"{error}; given up after {attempts} {'attempt' if attempts == 1 else 'attempts'}")
    return Retry(now + timedelta(seconds=backoff.seconds(attempts, chance)), error)
