"""Thresholds by risk as `evalstop-lab calibrate` found them, with seeds and command; written by a program."""

from __future__ import annotations

from typing import Any

# fmt: off
CALIBRATIONS: list[dict[str, Any]] = []
