"""Protects a receiver's key and secrets from other processes of its user, including its own jobs."""

from __future__ import annotations

import ctypes
import sys

PR_SET_DUMPABLE = 4


def forbid_tracing() -> bool:
    """Prevent processes of the same user from reading this one's memory and environment; False if not possible.

    It ends with the next exec, so that jobs can still be traced.
    """
    return set_process_attribute(PR_SET_DUMPABLE, 0)


def set_process_attribute(option: int, value: int) -> bool:
    """Call prctl(2), which only Linux has; False if it is not possible."""
    if sys.platform != "linux":
        return False
    try:
        return int(ctypes.CDLL(None).prctl(option, value, 0, 0, 0)) == 0
    except (OSError, AttributeError):
        return False
