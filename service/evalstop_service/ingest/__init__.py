"""Ingestion: store messages, advance monitors, make and announce decisions, all in one transaction.

    Committer ──> load ──> apply ──> save          one path for all messages, on both databases
                    │        │         └── the statement that compares versions, then `consequences` in its transaction
                    │        └── pure: a state, messages and facts yield a new state
                    └── RunCache: the last saved states, valid while their version is the row's

Any process may accept messages for any run at any time: caches hold copies, and the rows are authoritative.
"""

from evalstop_service.ingest.committer import Committer
from evalstop_service.ingest.committer_thread import running_in_thread
from evalstop_service.ingest.limits import Limits
from evalstop_service.ingest.messages import (
    CheckpointSaved,
    Content,
    EvalAnswered,
    EvalChanged,
    Message,
    Observations,
    Receipt,
    Resumed,
    RolesCorrected,
    ValueConflict,
)
from evalstop_service.ingest.receipts import MOST_UNWATCHED
from evalstop_service.ingest.run_cache import RunCache

__all__ = [
    "MOST_UNWATCHED",
    "CheckpointSaved",
    "Committer",
    "Content",
    "EvalAnswered",
    "EvalChanged",
    "Limits",
    "Message",
    "Observations",
    "Receipt",
    "Resumed",
    "RolesCorrected",
    "RunCache",
    "ValueConflict",
    "running_in_thread",
]
