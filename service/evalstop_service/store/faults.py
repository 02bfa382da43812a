"""What an error of the database means for the work that met it: one table for requests, workers and commands."""

from __future__ import annotations

import re
from enum import Enum

import sqlalchemy as sa

READ_ONLY = "25006"
"""The SQLSTATE of a server that has become read-only, as after a failover."""


class Fault(Enum):
    """The cause of an error, in words that an error of the database may follow."""

    CONFLICT = "the database was busy with this for others"
    AWAY = "the database cannot be used now"  # silent, read-only, or out of connections
    DISK_FULL = "the database's disk is full"
    REFUSED = "the database refuses this"
    NO_SCHEMA = "the schema is missing or too old; run `evalstop migrate`"
    BUG = "the database cannot do this"

    @property
    def is_transient(self) -> bool:
        """Whether retrying the same transaction may succeed; if the server is away, it may have been committed."""
        return self in (Fault.CONFLICT, Fault.AWAY)


_FAULTS = {
    # PostgreSQL: the longest beginning of the SQLSTATE.
    **dict.fromkeys(("40", "55P03", "57014"), Fault.CONFLICT),  # serialization, deadlock, timeouts of lock or statement
    **dict.fromkeys(("08", "25P03", "25P04", "53", "57P", "58", READ_ONLY), Fault.AWAY),
    "53100": Fault.DISK_FULL,
    **dict.fromkeys(("0A", "28", "3D", "42501"), Fault.REFUSED),  # what Citus lacks, the account, the database, a right
    **dict.fromkeys(("42P01", "42703"), Fault.NO_SCHEMA),
    # SQLite: the longest beginning of the error's name.
    **dict.fromkeys(("SQLITE_BUSY", "SQLITE_LOCKED"), Fault.CONFLICT),
    **dict.fromkeys(("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE"), Fault.DISK_FULL),
    **dict.fromkeys(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_IOERR", "SQLITE_CORRUPT"), Fault.REFUSED),
    "SQLITE_NOTADB": Fault.REFUSED,
}

# While connecting, libpq tells no SQLSTATE.
_REFUSED = re.compile("authentication failed|does not exist|no pg_hba.conf entry|permission denied|not permitted")
_NO_SUCH = re.compile(r"no such (table|column): |table \S+ has no column named ")


def find_fault(error: BaseException) -> Fault:
    """The cause of any error; BUG for those that are not of the database."""
    if isinstance(error, sa.exc.TimeoutError):  # no connection became free
        return Fault.AWAY
    if not isinstance(error, sa.exc.DBAPIError):
        return Fault.BUG
    code = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "sqlite_errorname", None)
    if code is None:
        is_away = error.connection_invalidated or isinstance(error, sa.exc.OperationalError)
        if is_away and _REFUSED.search(str(error.orig)):
            return Fault.REFUSED
        return Fault.AWAY if is_away else Fault.BUG
    if known := [beginning for beginning in _FAULTS if code.startswith(beginning)]:
        return _FAULTS[max(known, key=len)]
    return Fault.NO_SCHEMA if _NO_SUCH.match(str(error.orig)) else Fault.BUG
