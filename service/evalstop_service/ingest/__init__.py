"""Ingestion: store messages, advance monitors, make and announce decisions, all in one transaction.

    Committer ──> group_commit: load ──> append ──> save     new observations in step order, of many runs together
                       │          │        │          └── compares versions; then `consequences` in its transaction
                       │          │        └── pure: a state and messages yield changes
                       │          └── RunCache: the last saved states, valid while their version is the row's
                       └──> edits: read, judge anew, lock, save     everything else, a run at a time, in a thread

Any process may accept messages for any run at any time: caches hold copies, and the rows are authoritative.
"""

from evalstop_service.ingest.changes import MOST_UNWATCHED
from evalstop_service.ingest.committer import Committer, running_in_thread
from evalstop_service.ingest.load import RunCache, list_calls
from evalstop_service.ingest.messages import (
    CheckpointSaved,
    Content,
    EvalAnswered,
    EvalChanged,
    Exploited,
    Limits,
    Message,
    Observations,
    Receipt,
    Resumed,
    RolesCorrected,
    ValueConflict,
)

__all__ = [
    "MOST_UNWATCHED",
    "CheckpointSaved",
    "Committer",
    "Content",
    "EvalAnswered",
    "EvalChanged",
    "Exploited",
    "Limits",
    "Message",
    "Observations",
    "Receipt",
    "Resumed",
    "RolesCorrected",
    "RunCache",
    "ValueConflict",
    "list_calls",
    "running_in_thread",
]
