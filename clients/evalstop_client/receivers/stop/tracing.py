"""Protects a receiver's key and secrets from other processes of its user, including its own jobs."""

from __future__ import annotations

import ctypes
import sys

PR_SET_DUMPABLE = 4


def forbid_tracing() -> bool:
    """Prevent processes of the same user from reading this one's memory and environment; False if not possible.

    Linux only; it ends with the next exec, so that jobs can still be traced.
    """
    if sys.platform != "linux":
        return False
    try:
        return int(ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)) == 0
    except (OSError, AttributeError):
        return False
