"""The junction: news of runs is stored, monitors moved on, decisions made and announced, in one transaction.

    Committer ──> take ──> lock ──> recall ──> step ──> announce ──> write     one commit for all that arrived together
                            │         └── Live: what this process remembers of a run, good while its stamp is the row's

Any process may take news of any run at any time: what is remembered is a cache of rows, and rows decide.
"""

from evalstop_service.ingest.committer import Committer, Limits
from evalstop_service.ingest.junction import take
from evalstop_service.ingest.live import CHOOSER, LiveRuns
from evalstop_service.ingest.news import Arrival, Contradiction, Corrected, News, Points, Receipt, Resumed, Saved

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
