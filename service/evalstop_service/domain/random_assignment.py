"""Random assignment of decisions, reproducible: a number drawn from a decision's id and its project's seed. Pure.

A stop that is carried out destroys the evidence of whether it was right. So some stops are held out, purely at random:
the decisions with observed outcomes are then like those without, and one that was held out with probability 0.1
represents ten. Anybody with the id and the seed can repeat and verify the draw.
"""

from __future__ import annotations

import hmac
from uuid import UUID

HELD_OUT_SHARE = 0.1
"""The share of stops that a new project holds out by default."""

CARRIED_OUT = "carried out"
HELD_OUT = "held out"
"""The questions; each has an independent draw."""


def draw_number(seed: str, decision_id: UUID, question: str) -> float:
    """A number in [0, 1): uniform over decisions, independent between questions, deterministic."""
    digest = hmac.digest(seed.encode(), question.encode() + decision_id.bytes, "sha256")
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


def observed_probability(enforced_share: float, held_out_share: float) -> float:
    """The probability that a run continues after its decision, so that its outcome is observed."""
    return 1 - enforced_share * (1 - held_out_share)
