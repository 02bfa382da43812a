"""What the pages are handed to act through: the rules of the API for settings, and what only the app can reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from evalstop_service.ingest import Arrival, Receipt
from evalstop_service.projects.key_cache import KeyCache
from evalstop_service.security.address_policy import AddressPolicy
from evalstop_service.security.encryption import Encryption

Take = Callable[[Arrival], Receipt]
"""Takes news of a run in, and returns once they are durable. Raises NotFound, Conflict, Overloaded."""


@dataclass(frozen=True)
class Doors:
    """What the pages act through."""

    take: Take
    key_cache: KeyCache
    delivery_timeout_seconds: float
    address_policy: AddressPolicy
    encryption: Encryption
