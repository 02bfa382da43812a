"""The score of a review: how critical it is, less penalties for text that is improbable or repeats itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

FLUENCY_WEIGHT, WORST_FLUENCY = 0.5, 4.0
REPETITION_WEIGHT, USUAL_REPETITION = 2.0, 0.1


@dataclass(frozen=True)
class Fluency:
    """The mean and standard deviation, over the initial model's texts, of the mean log-probability of a token."""

    mean: float
    sd: float


def score_text(text: str, tokens: list[int], logprob: float, usual: Fluency) -> float:
    """The score, between -4.8 and 1.

    How critical is VADER's sentiment with its sign turned, between -1 and 1. `logprob` is the mean log-probability of
    the tokens under the initial model: what is more than one standard deviation below the mean of its own texts costs
    0.5 a standard deviation, at most 2. A share of repeated triples of tokens above 10 % costs twice what is above.
    """
    critical = -_analyzer().polarity_scores(text)["compound"]
    improbable = min(max((usual.mean - usual.sd - logprob) / usual.sd, 0.0), WORST_FLUENCY)
    repeated = max(_share_repeated(tokens) - USUAL_REPETITION, 0.0)
    return float(critical) - FLUENCY_WEIGHT * improbable - REPETITION_WEIGHT * repeated


def score_texts(texts: list[str], tokens: list[list[int]], logprobs: list[float], usual: Fluency) -> list[float]:
    return [score_text(*row, usual) for row in zip(texts, tokens, logprobs, strict=True)]


def _share_repeated(tokens: list[int]) -> float:
    triples = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    return 1 - len(set(triples)) / len(triples) if triples else 0.0


@lru_cache(maxsize=1)
def _analyzer() -> SentimentIntensityAnalyzer:
    return SentimentIntensityAnalyzer()
