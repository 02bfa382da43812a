"""Ingestion: store messages, advance monitors, make and announce decisions, all in one transaction.

    Committer ──> group_commit: load ──> append ──> save     new observations in step order, of many runs together
                       │          │        │          └── compares versions; then `consequences` in its transaction
                       │          │        └── pure: a state and messages yield changes
                       │          └── RunCache: the last saved states, valid while their version is the row's
                       └──> edits: read, judge anew, lock, save     everything else, a run at a time, in a thread

Any process may accept messages for any run at any time: caches hold copies, and the rows are authoritative.
"""

from evalstop_service.ingest.changes import MOST_UNWATCHED as MOST_UNWATCHED
from evalstop_service.ingest.committer import Committer as Committer
from evalstop_service.ingest.committer import running_in_thread as running_in_thread
from evalstop_service.ingest.load import RunCache as RunCache
from evalstop_service.ingest.load import list_calls as list_calls
from evalstop_service.ingest.messages import CheckpointSaved as CheckpointSaved
from evalstop_service.ingest.messages import Content as Content
from evalstop_service.ingest.messages import EvalAnswered as EvalAnswered
from evalstop_service.ingest.messages import EvalChanged as EvalChanged
from evalstop_service.ingest.messages import Exploited as Exploited
from evalstop_service.ingest.messages import Limits as Limits
from evalstop_service.ingest.messages import Message as Message
from evalstop_service.ingest.messages import Observations as Observations
from evalstop_service.ingest.messages import Receipt as Receipt
from evalstop_service.ingest.messages import Resumed as Resumed
from evalstop_service.ingest.messages import RolesCorrected as RolesCorrected
from evalstop_service.ingest.messages import ValueConflict as ValueConflict
