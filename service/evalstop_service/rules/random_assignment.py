"""What is left to chance, reproducibly: a number drawn for a decision, by its id and the seed of its project. Pure.

A stop that is carried out destroys the evidence of whether it was right. So some are held out, by chance and by nothing
else: then those whose truth is seen are like those whose truth is not, and one that was let run with a probability of
a tenth stands for ten. Anybody who has the id and the seed can draw again, and see that nobody chose.
"""

from __future__ import annotations

import hmac
from uuid import UUID

HELD_OUT_SHARE = 0.1
"""Of the stops of a new project, unless it says otherwise."""

CARRIED_OUT = "carried out"
HELD_OUT = "held out"
"""What is asked of chance; each question has a draw of its own."""


def draw_number(seed: str, decision_id: UUID, question: str) -> float:
    """A number from [0, 1): uniform over decisions, independent from question to question, always the same for one."""
    digest = hmac.digest(seed.encode(), question.encode() + decision_id.bytes, "sha256")
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


def observed_probability(enforced_share: float, held_out_share: float) -> float:
    """With which a run goes on after its decision, so that the truth is seen: of the stops a share is enforced, and of
    these a share is held out."""
    return 1 - enforced_share * (1 - held_out_share)
