"""Times as people write them: durations (`90s`, `15m`, `4h`, `1h30m`, `2d`), and the hours in which stops may go out,
by the clock on the wall of one time zone. Pure.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from msgspec import Struct, field
from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

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


def begin_day(now: datetime) -> datetime:
    """The start of a time's day in UTC."""
    return now.replace(hour=0, minute=0, second=0, microsecond=0)


DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_HOURS = re.compile(rf"([A-Za-z,-]{{1,60}}) ({_TIME})-({_TIME})(?: ([^ ]{{1,60}}))?")
_DAY = timedelta(days=1)

EXAMPLE = "mon-fri 09:00-18:00 Europe/Berlin"


class StopHours(Struct, frozen=True):
    """Days of the week, and the hours of each, written as a text. Hours that cross midnight belong to the day on which
    they begin; equal times are a whole day."""

    days: tuple[str, ...]
    begin: str = field(name="from")
    end: str = field(name="to")
    time_zone: str = "UTC"

    def __str__(self) -> str:
        return f"{','.join(self.days)} {self.begin}-{self.end} {self.time_zone}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        written = core_schema.plain_serializer_function_ser_schema(str)
        return core_schema.no_info_plain_validator_function(parse_stop_hours, serialization=written)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{_HOURS.pattern}$", "examples": [EXAMPLE]}

    def contains(self, at: datetime) -> bool:
        """Whether stops may go out at this time."""
        local = at.astimezone(ZoneInfo(self.time_zone))
        day, clock = local.weekday(), local.time()
        begin, end = time.fromisoformat(self.begin), time.fromisoformat(self.end)
        if begin < end:
            return DAYS[day] in self.days and begin <= clock < end
        return (DAYS[day] in self.days and clock >= begin) or (DAYS[day - 1] in self.days and clock < end)

    def find_opening(self, at: datetime) -> datetime:
        """This time if stops may go out then, else when the hours next begin."""
        if self.contains(at):
            return at
        zone, begin = ZoneInfo(self.time_zone), time.fromisoformat(self.begin)
        today = at.astimezone(zone).date()
        for number in range(15):  # on one day the clock may skip the hours, a week later they are there
            for opening in _locate(today + number * _DAY, begin, zone):
                if opening >= at and self.contains(opening):
                    return opening
        raise AssertionError("each week has one of the days")


def parse_stop_hours(written: object) -> StopHours:
    """Stop hours from a text such as `mon-fri 09:00-18:00 Europe/Berlin`; raises ValueError."""
    if isinstance(written, StopHours):
        return written
    match = _HOURS.fullmatch(written) if isinstance(written, str) else None
    if match is None:
        raise ValueError(f"write days, hours from 00:00 to 23:59, and a time zone, as in {EXAMPLE!r}")
    days, begin, end, time_zone = match.groups(default="UTC")
    listed = tuple(day for part in days.lower().split(",") for day in _list_days(part))
    if len(set(listed)) < len(listed) or not set(listed) <= set(DAYS):
        raise ValueError(f"days are {', '.join(DAYS)}, each at most once")
    try:
        ZoneInfo(time_zone)
    except (KeyError, ValueError, OSError):  # OSError: the name of a folder
        raise ValueError(f"the time zone {time_zone!r} is not known; write one such as Europe/Berlin or UTC") from None
    return StopHours(listed, begin, end, time_zone)


def find_morning(after: datetime, zone: ZoneInfo) -> datetime:
    """The next 09:00 after a time."""
    today = after.astimezone(zone).date()
    mornings = (_locate(today + number * _DAY, time(9), zone)[0] for number in range(3))
    return next(morning for morning in mornings if morning > after)


def _list_days(part: str) -> list[str]:
    """The days of `fri` or `fri-mon`."""
    first, _, last = part.partition("-")
    if first not in DAYS or (last or first) not in DAYS:
        return [part]  # refused, by its name
    start, count = DAYS.index(first), (DAYS.index(last or first) - DAYS.index(first)) % 7 + 1
    return [DAYS[(start + number) % 7] for number in range(count)]


def _locate(day: date, at: time, zone: ZoneInfo) -> tuple[datetime, datetime]:
    """The first and the last moment that this wall time can mean."""
    local = datetime.combine(day, at, zone)
    first, second = sorted(local.replace(fold=fold).astimezone(UTC) for fold in (0, 1))
    return first, second
