"""Converts a detector verdict to the form of rows, responses and events. Pure."""

from __future__ import annotations

import msgspec
from evalstop_detectors import Verdict

from evalstop_service.domain.run import Verdict as RecordedVerdict


def record_verdict(verdict: Verdict) -> RecordedVerdict:
    """The verdict as the store holds it; the store does not import detectors."""
    return msgspec.convert(verdict, RecordedVerdict, from_attributes=True)
