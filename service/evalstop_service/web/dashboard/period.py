"""The period of the figures on all pages: chosen once, and passed on in links as the parameter `days`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from urllib.parse import parse_qsl, urlencode, urlsplit

from fastapi import Request

from evalstop_service.errors import Invalid

PARAMETER = "days"

PERIODS = {"": "all time", "7": "7 days", "30": "30 days", "90": "90 days", "365": "a year"}
"""The available periods: values of the parameter, and their names."""


@dataclass(frozen=True)
class Period:
    """The last days, or all time."""

    days: str = ""

    @property
    def name(self) -> str:
        """The name for people."""
        return PERIODS[self.days]

    def since(self, now: datetime) -> datetime | None:
        """Its beginning, to the hour, so that repeated rendering gives the same links; None: all time."""
        if not self.days:
            return None
        return (now - timedelta(days=int(self.days))).replace(minute=0, second=0, microsecond=0)

    def link(self, address: str) -> str:
        """The address of a page, with the same period."""
        if not self.days:
            return address
        parts = urlsplit(address)
        query = [*parse_qsl(parts.query, keep_blank_values=True), (PARAMETER, self.days)]
        return parts._replace(query=urlencode(query)).geturl()


ALL_TIME = Period()


def read_period(request: Request) -> Period:
    """The period of a request; raises Invalid for one that is not available."""
    period = Period(request.query_params.get(PARAMETER, ""))
    if period.days not in PERIODS:
        raise Invalid(f"{PARAMETER}: {', '.join(filter(None, PERIODS))}, or none for all time")
    return period
