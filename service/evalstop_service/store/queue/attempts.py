"""An attempt of a delivery: what its worker claimed, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlsplit
from uuid import UUID


@dataclass(frozen=True, slots=True)
class ClaimedDelivery:
    """A delivery that one worker holds until `lease_until`; `attempts` includes this one. It was due at `due_at`.

    `failures`: consecutive failures of its endpoint at the claim. `open_until`: set if this is the one trial attempt of
    an open circuit breaker. `stop_of`: the decision whose stop it hands over to a receiver.
    """

    run_id: UUID
    id: UUID
    event_id: UUID
    endpoint_id: UUID
    attempts: int
    due_at: datetime
    lease_until: datetime
    url: str
    secrets: tuple[str, ...]
    body: str
    format: str = "standard"
    failures: int = 0
    open_until: datetime | None = None
    stop_of: UUID | None = None

    @property
    def receiver(self) -> str:
        """Who gets it, in words; the rest of a URL may be secret."""
        if self.url.startswith("pull:"):
            return f"the receiver {self.url.removeprefix('pull:')}"
        return f"the endpoint at {urlsplit(self.url).hostname}"


@dataclass(frozen=True, slots=True)
class Delivered:
    """The endpoint accepted the event."""


@dataclass(frozen=True, slots=True)
class Retry:
    """A later attempt may succeed: not before `due_at`."""

    due_at: datetime
    error: str


@dataclass(frozen=True, slots=True)
class Dead:
    """A retry would change nothing; `gone`: the endpoint wants no more events."""

    error: str
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Released:
    """It was not attempted: any worker may claim it at once."""


Result = Delivered | Retry | Dead | Released


@dataclass(frozen=True, slots=True)
class FinishedAttempt:
    """The result of a claimed delivery, and when; `answer`: the start of the response body."""

    claimed: ClaimedDelivery
    result: Result
    at: datetime
    duration_ms: float = 0.0
    status_code: int | None = None
    answer: str | None = None

    @property
    def was_tried(self) -> bool:
        """Whether a request was sent."""
        return not isinstance(self.result, Released)

    @property
    def is_trial(self) -> bool:
        """Whether it is the one attempt while the circuit breaker of its endpoint was open."""
        return self.claimed.open_until is not None

    @property
    def is_gone(self) -> bool:
        """Whether the endpoint answered that it wants no more events."""
        return isinstance(self.result, Dead) and self.result.gone

    @property
    def went_well(self) -> bool:
        """Whether the endpoint works: it accepted the event, or answered that it never will."""
        answered = self.status_code is not None and self.status_code < 500
        return isinstance(self.result, Delivered) or (isinstance(self.result, Dead) and answered)
