"""The agreement of two people who labeled the same cases: Cohen's kappa. Pure.

J. Cohen, A coefficient of agreement for nominal scales (1960): the share of cases that both label alike, less the
share expected by chance, relative to the largest possible excess over chance. 1: full agreement; 0: as by chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

_Case = TypeVar("_Case", bound=Hashable)


@dataclass(frozen=True)
class Agreement:
    """Two people, the number of cases that both labeled, and the number that they labeled alike.

    `kappa`: None if both gave all cases one label, so that they would agree by chance alone.
    """

    first: str
    second: str
    cases: int
    alike: int
    kappa: float | None


def measure_agreements(labels: Mapping[str, Mapping[_Case, str]]) -> list[Agreement]:
    """The agreement of each two people with cases in common; `labels`: by person and case."""
    agreements = []
    for first, second in combinations(sorted(labels), 2):
        pairs = [(labels[first][case], labels[second][case]) for case in labels[first] if case in labels[second]]
        if pairs:
            alike = sum(label == other for label, other in pairs)
            agreements.append(Agreement(first, second, len(pairs), alike, compute_kappa(pairs)))
    return agreements


def compute_kappa(pairs: Sequence[tuple[str, str]]) -> float | None:
    """Cohen's kappa of pairs of labels; None where it is not defined."""
    number = len(pairs)
    first, second = Counter(first_label for first_label, _ in pairs), Counter(second_label for _, second_label in pairs)
    chance = sum(count * second[label] for label, count in first.items())
    if chance == number * number:
        return None
    alike = sum(first_label == second_label for first_label, second_label in pairs)
    return (alike * number - chance) / (number * number - chance)
