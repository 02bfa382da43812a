"""Ingestion: messages are stored, monitors moved on, decisions made and announced, and all of it or nothing.

    Committer ──> load ──> apply ──> save          one way for all messages, on both databases
                    │        │         └── the statement that compares versions, then `consequences` in its transaction
                    │        └── pure: a state, messages and facts make another state
                    └── RunCache: states that were saved last, good while their version is the row's

Any process may take messages of any run at any time: what is cached is a copy of rows, and rows decide.
"""

from evalstop_service.ingest.committer import Committer, Limits
from evalstop_service.ingest.committer_thread import running_in_thread
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
from evalstop_service.ingest.run_state import CHOOSER

__all__ = [
    "CHOOSER",
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
