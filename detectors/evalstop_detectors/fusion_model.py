"""Models of fusion as `evalstop-lab train-fusion` fitted them, with what they were fitted on; written by a program."""

from __future__ import annotations

from typing import Any

# fmt: off
MODELS: dict[str, dict[str, Any]] = {
    "worlds-1": {"model": {"log_odds": 0.0, "functions": []}},
}
