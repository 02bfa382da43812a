"""The suite `public-1`: outlines of what public training logs look like, drawn with other numbers each time.

The outlines were written by hand, and no value of any log is in them.
"""

from __future__ import annotations

from collections.abc import Mapping

from evalstop_lab.worlds.third_suite import LOSS, SHORT, Kind, Part, Range

SCORE = (0.02, 0.12)
REWARD = (0.05, 0.25)
MEDIUM = (15, 120)
LONG = (50, 600)
SPREAD = 0.3


def _follow(evals: Range, noise: Range, *points: tuple[float, float], kl: str = "none", weight: int = 1) -> Kind:
    """A kind that follows these points (share of the run, level) from (0, 0) on; each piece varies by `SPREAD`."""
    parts, (x, y) = [], (0.0, 0.0)
    for next_x, next_y in points:
        width, change = next_x - x, next_y - y
        reach = SPREAD * abs(change) / 2
        parts.append(Part((next_y - reach, next_y + reach), ((1 - SPREAD) * width, (1 + SPREAD) * width)))
        x, y = next_x, next_y
    return Kind(parts, evals, noise, kl=kl, weight=weight)


OUTLINES: Mapping[str, Kind] = {
    # Losses of fine-tuning, with the sign turned so that more is better.
    "loss-levels-off": _follow(SHORT, LOSS, (0.1, 0.6), (0.3, 0.85), (0.6, 0.95), (1.0, 1.0), weight=4),
    "loss-falls-throughout": _follow(MEDIUM, LOSS, (0.2, 0.5), (0.5, 0.8), (1.0, 1.1), weight=4),
    "loss-in-steps-by-epoch": _follow(SHORT, LOSS, (0.3, 0.5), (0.35, 0.75), (0.65, 0.8), (0.7, 0.95), (1.0, 1.0)),
    "overfit-from-second-epoch": _follow(SHORT, LOSS, (0.3, 1.0), (0.45, 0.85), (1.0, 0.1), weight=3),
    "overfit-in-steps": _follow(SHORT, LOSS, (0.3, 1.0), (0.6, 0.95), (0.65, 0.6), (0.9, 0.55), (1.0, 0.1)),
    "overfit-slowly": _follow(MEDIUM, LOSS, (0.15, 0.9), (0.3, 1.0), (0.5, 0.95), (1.0, 0.6), weight=2),
    "overfit-far-below-start": _follow(MEDIUM, LOSS, (0.1, 1.0), (0.3, 0.4), (1.0, -2.0)),
    "worse-from-the-start": _follow(SHORT, LOSS, (0.2, -0.3), (0.5, -0.8), (1.0, -1.5)),
    "warm-up-then-better": _follow(SHORT, LOSS, (0.2, -0.3), (0.35, 0.0), (0.6, 0.7), (1.0, 1.0), weight=2),
    "loss-rises-late": _follow(MEDIUM, LOSS, (0.3, 0.9), (0.8, 1.0), (1.0, 0.8)),
    # Scores of fine-tuned models: accuracy, F1, word error rate turned around, mean average precision.
    "score-levels-off": _follow(MEDIUM, SCORE, (0.1, 0.7), (0.3, 0.9), (1.0, 1.0), weight=4),
    "score-flat-after-first": _follow(SHORT, SCORE, (0.1, 0.95), (1.0, 1.0), weight=3),
    "score-late-jump": _follow(MEDIUM, SCORE, (0.4, 0.1), (0.5, 0.7), (1.0, 1.0), weight=2),
    "score-sags-and-returns": _follow(MEDIUM, SCORE, (0.3, 0.8), (0.45, 0.65), (0.7, 0.9), (1.0, 1.1), weight=2),
    "score-two-dips": _follow(MEDIUM, SCORE, (0.2, 0.7), (0.3, 0.5), (0.5, 0.9), (0.6, 0.75), (0.8, 1.1), (1.0, 1.15)),
    "score-declines-after-peak": _follow(SHORT, SCORE, (0.25, 1.0), (0.4, 0.9), (1.0, 0.5), weight=2),
    "score-breaks-then-poor": _follow(MEDIUM, SCORE, (0.4, 1.0), (0.42, 0.2), (1.0, 0.4)),
    "score-forgets-old-task": _follow(SHORT, SCORE, (0.1, -0.4), (0.3, -0.8), (1.0, -1.0)),
    "detector-warm-up": _follow(LONG, SCORE, (0.02, -0.5), (0.06, 0.0), (0.3, 0.8), (1.0, 1.0), weight=2),
    "detector-slow-gain": _follow(LONG, SCORE, (0.1, 0.6), (0.4, 0.85), (1.0, 1.0), weight=2),
    "detector-zero-epoch": _follow(MEDIUM, SCORE, (0.4, 0.8), (0.42, 0.0), (0.46, 0.75), (0.7, 0.95), (1.0, 1.05)),
    # Episode rewards of reinforcement learning.
    "agent-learns": _follow(LONG, REWARD, (0.2, 0.5), (0.5, 0.9), (1.0, 1.0), weight=4),
    "agent-starts-late": _follow(LONG, REWARD, (0.4, 0.05), (0.6, 0.8), (1.0, 1.0), weight=2),
    "agent-worse-first": _follow(LONG, REWARD, (0.1, -0.4), (0.3, 0.2), (0.7, 0.9), (1.0, 1.0)),
    "agent-loses-it": _follow(LONG, REWARD, (0.4, 1.0), (0.5, 0.95), (0.52, 0.1), (1.0, 0.15), weight=2),
    "agent-declines": _follow(LONG, REWARD, (0.3, 1.0), (0.5, 0.9), (1.0, 0.3), weight=2),
    "agent-falls-twice": _follow(LONG, REWARD, (0.3, 1.0), (0.35, 0.4), (0.5, 0.8), (0.55, 0.2), (1.0, 0.3)),
    "agent-falls-and-relearns": _follow(LONG, REWARD, (0.3, 0.8), (0.34, 0.3), (0.6, 0.9), (1.0, 1.2)),
    "agent-wavers": _follow(LONG, REWARD, (0.2, 0.8), (0.4, 0.7), (0.6, 0.95), (0.8, 0.9), (1.0, 1.0), weight=2),
    # Rewards and held-out scores of language models under reinforcement learning.
    "policy-improves": _follow(MEDIUM, SCORE, (0.3, 0.6), (0.7, 0.9), (1.0, 1.0), kl="grows", weight=4),
    "policy-plateau": _follow(MEDIUM, SCORE, (0.15, 0.9), (1.0, 1.0), kl="grows", weight=3),
    "gold-peaks-early": _follow(MEDIUM, SCORE, (0.15, 1.0), (0.3, 0.9), (1.0, 0.0), kl="grows", weight=2),
    "gold-peaks-late": _follow(MEDIUM, SCORE, (0.5, 1.0), (0.7, 0.95), (1.0, 0.6), kl="grows", weight=2),
    "gold-falls-below-start": _follow(MEDIUM, SCORE, (0.2, 1.0), (0.5, 0.2), (1.0, -1.5), kl="grows"),
    "policy-collapses": _follow(MEDIUM, SCORE, (0.5, 1.0), (0.53, -0.2), (1.0, -0.3), kl="grows", weight=2),
    "policy-degrades-then-dies": _follow(MEDIUM, SCORE, (0.4, 1.0), (0.6, 0.8), (0.65, 0.0), (1.0, 0.0), kl="grows"),
    "policy-pays-the-tax": _follow(MEDIUM, SCORE, (0.1, -0.2), (0.3, 0.1), (1.0, 1.0), kl="grows", weight=2),
}
