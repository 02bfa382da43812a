"""How long to wait before the next try: pure."""

from __future__ import annotations

FIRST_SECONDS = 0.5
LONGEST_SECONDS = 30.0
LONGEST_ASKED_SECONDS = 300.0


def wait_seconds(failures: int, chance: float, retry_after_seconds: float | None = None) -> float:
    """Seconds to wait after `failures` (>= 1) tries in a row: doubling, half of it by `chance` in [0, 1).

    A service that asked for `retry_after_seconds` (Retry-After) is given at least that, up to five minutes.
    """
    doubled = min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** min(failures - 1, 30))
    jittered = doubled * (0.5 + chance / 2)
    if retry_after_seconds is None:
        return jittered
    return max(jittered, min(retry_after_seconds, LONGEST_ASKED_SECONDS))
