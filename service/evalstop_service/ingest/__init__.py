"""The junction: news of runs is stored, monitors moved on, decisions made and announced, and all of it or nothing.

    Committer ──┬──> FromMemory ──> step ──> one statement                          news that memory suffices for
                └──> take ──> lock ──> recall ──> step ──> announce ──> write       all other news: a transaction
                                         └── Live: what this process remembers, good while its stamp is the row's

Any process may take news of any run at any time: what is remembered is a cache of rows, and rows decide.
"""

from evalstop_service.ingest.apply import take
from evalstop_service.ingest.committer import Committer
from evalstop_service.ingest.messages import Arrival, Contradiction, Corrected, News, Points, Receipt, Resumed, Saved
from evalstop_service.ingest.queues import Limits
from evalstop_service.ingest.run_cache import CHOOSER, LiveRuns

__all__ = [
    "CHOOSER",
    "Arrival",
    "Committer",
    "Contradiction",
    "Corrected",
    "Limits",
    "LiveRuns",
    "News",
    "Points",
    "Receipt",
    "Resumed",
    "Saved",
    "take",
]
