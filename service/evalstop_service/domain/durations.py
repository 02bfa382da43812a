"""Durations as people write them: `90s`, `15m`, `4h`, `1h30m`, `2d`. Pure."""

from __future__ import annotations

import re

UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}

PATTERN = r"^(?=.)(\d{1,9}d)?(\d{1,9}h)?(\d{1,9}m)?(\d{1,9}(\.\d{1,6})?s)?$"
"""Each unit at most once, the largest first; the empty text is none."""

_DURATION = re.compile(PATTERN, re.ASCII)


def parse_duration(text: str) -> float:
    """The seconds of a duration; raises ValueError for anything else.

    >>> [parse_duration(text) for text in ("90s", "15m", "1h30m", "2d", "0s", "0.5s")]
    [90.0, 900.0, 5400.0, 172800.0, 0.0, 0.5]
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"a duration such as 90s, 15m, 4h or 1h30m, not {text[:40]!r}")
    return sum(float(match[number][:-1]) * UNITS[match[number][-1]] for number in range(1, 5) if match[number])


def format_duration(seconds: float, parts: int = 2) -> str:
    """A duration in its `parts` largest units, rounded; `parts=4` is exact to the second.

    >>> [format_duration(seconds) for seconds in (900, 14_400, 5_400, 4.23, 0.0, 90_061, 3_599.9)]
    ['15m', '4h', '1h30m', '4.2s', '0s', '1d1h', '1h']
    """
    if seconds < 10:
        return f"{round(seconds, 1):g}s"
    left = round(seconds)
    for number, size in enumerate(UNITS.values()):
        if left >= size:  # the smallest unit to be shown
            smallest = list(UNITS.values())[min(number + parts - 1, 3)]
            left = round(left / smallest) * smallest
            break
    text = ""
    for unit, size in UNITS.items():
        count, left = divmod(left, size)
        text += f"{count}{unit}" if count else ""
    return text
