"""A verdict of the detectors as rows, answers and events hold it. Pure."""

from __future__ import annotations

import msgspec
from evalstop_detectors import Verdict

from evalstop_service.rules import run_results


def record_verdict(verdict: Verdict) -> run_results.Verdict:
    """The verdict as the store holds it, which knows no detectors."""
    return msgspec.convert(verdict, run_results.Verdict, from_attributes=True)
