"""What the pages are handed to act through: the rules of the API for settings, and what only the app can reach."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from evalstop_service.ingest import Arrival, Receipt
from evalstop_service.security.address_policy import AddressPolicy
from evalstop_service.security.encryption import Encryption
from evalstop_service.store.database import Database
from evalstop_service.store.projects import Project
from evalstop_service.webhooks.endpoints import Send

ChangeProject = Callable[[Database, UUID, str, Mapping[str, Any], datetime], Project]
"""Changes settings of a project, given as texts: database, project, actor, settings by name, now. Raises Invalid."""


Take = Callable[[Arrival], Receipt]
"""Takes news of a run in, and returns once they are durable. Raises NotFound, Conflict, Overloaded."""


@dataclass(frozen=True)
class Doors:
    """`settable`: the names of the settings. `forget_keys`: to be called when a key was revoked."""

    change_project: ChangeProject
    change_role_patterns: ChangeProject
    take: Take
    settable: frozenset[str]
    forget_keys: Callable[[], None]
    send: Send
    targets: AddressPolicy
    encryption: Encryption
