"""Converts a detector verdict to the form of rows, responses and events. Pure."""

from __future__ import annotations

import msgspec
from evalstop_detectors import Verdict

from evalstop_service.domain import run_results


def record_verdict(verdict: Verdict) -> run_results.Verdict:
    """The verdict as the store holds it; the store does not import detectors."""
    return msgspec.convert(verdict, run_results.Verdict, from_attributes=True)
