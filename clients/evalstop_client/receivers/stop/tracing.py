"""Keeps a receiver's key and secrets from other processes of its user, its own jobs among them."""

from __future__ import annotations

import ctypes
import sys

PR_SET_DUMPABLE = 4


def forbid_tracing() -> bool:
    """Have no process of the same user read this one's memory and environment; False where that is not possible.

    Linux alone; it ends with the next exec, so that jobs can be traced as ever.
    """
    if sys.platform != "linux":
        return False
    try:
        return int(ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)) == 0
    except (OSError, AttributeError):
        return False
