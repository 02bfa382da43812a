"""A slow reference of plateau_drop, equal bit by bit: everything is computed again after each eval."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evalstop_detectors import Evidence, Kind, MetricRole, Observation
from evalstop_detectors.detectors.plateau_drop import PlateauDrop

LARGEST_VALUE = 1e120
LENGTHS = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SPANS = (3, 4, 5, 6, 8, 12, 16, 24, 32)


def clip(value: float) -> float:
    return min(max(value, -LARGEST_VALUE), LARGEST_VALUE)


def median(numbers: list[float]) -> float:
    ordered = sorted(numbers)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def estimate_noise(values: Sequence[float], stderrs: Sequence[float | None] = ()) -> tuple[float, float]:
    """The noise scale and inflation of these values, which are relative to the first one."""
    count, mean_square = 0, 0.0
    for stderr in stderrs:
        if stderr is not None and 0 < stderr < math.inf:
            count += 1
            mean_square += (min(stderr, LARGEST_VALUE) * min(stderr, LARGEST_VALUE) - mean_square) / count
    n, known, recent = len(values), math.sqrt(mean_square), values[-65:]
    if n < 2:
        return known, 1.0
    least = (max(values) - min(values)) * (0.05 if n <= 8 else 0.02)
    first = median([abs(recent[i + 1] - recent[i]) for i in range(len(recent) - 1)]) / 0.9539
    sd, correlation = first, 0.0
    if n >= 4:
        bends = [abs(recent[i + 2] - 2 * recent[i + 1] + recent[i]) for i in range(len(recent) - 2)]
        sd = min(first, 1.15 * median(bends) / 1.6522)
    if n >= 10 and first > least:
        ratio = median([abs(recent[i + 2] - recent[i]) for i in range(len(recent) - 2)]) / 0.9539 / first
        correlation = min(max(ratio * ratio - 1, 0.0), 0.7) * (n - 2) / (n + 8)
    correlation = min(correlation + 0.4 * 10 / (n + 10), 0.8)
    return max(sd * (1 + 2 / n), least, known), math.sqrt((1 + correlation) / (1 - correlation))


class Blocks:
    """Block means of the eval and the proxy; at 128 blocks, neighbors are merged."""

    def __init__(self) -> None:
        self.size, self.open, self.eval_scores, self.proxy, self.steps = 1, 0, [0.0], [0.0], list[int]()

    def add(self, eval_scores: float, proxy: float, step: int) -> bool:
        """Add an eval to the open block, the last of the lists; returns whether the block is full."""
        self.eval_scores[-1] += eval_scores
        self.proxy[-1] += proxy
        self.open += 1
        if self.open < self.size:
            return False
        self.eval_scores[-1], self.proxy[-1] = self.eval_scores[-1] / self.size, self.proxy[-1] / self.size
        self.steps.append(step)
        return True

    def open_block(self) -> None:
        """Start a new block; merge neighbors if there are 128."""
        if len(self.steps) == 128:
            self.eval_scores = [(a + b) / 2 for a, b in zip(self.eval_scores[::2], self.eval_scores[1::2], strict=True)]
            self.proxy = [(a + b) / 2 for a, b in zip(self.proxy[::2], self.proxy[1::2], strict=True)]
            self.size, self.steps = 2 * self.size, self.steps[1::2]
        self.open, self.eval_scores, self.proxy = 0, [*self.eval_scores, 0.0], [*self.proxy, 0.0]


def compute_reference_evidence(detector: PlateauDrop, observations: Sequence[Observation]) -> list[Evidence]:
    """The evidence after each observation."""
    eval_scores, stderrs, proxy, pending = list[float](), list[float | None](), list[float](), list[float]()
    eval_origin = proxy_origin = 0.0
    blocks, evidence, collected = Blocks(), Evidence(Kind.STATISTIC, 0.0, None, "no evals yet"), list[Evidence]()
    relative_proxy = list[float]()
    for item in observations:
        if math.isfinite(item.value) and item.role is MetricRole.PROXY:
            proxy_origin = proxy_origin if proxy or pending else clip(item.value)
            pending.append(clip(clip(item.value) - proxy_origin))
        elif math.isfinite(item.value):
            before = (list(eval_scores), list(stderrs), list(relative_proxy))
            eval_origin = eval_origin if eval_scores else clip(item.value)
            eval_scores.append(clip(clip(item.value) - eval_origin))
            stderrs.append(item.stderr)
            if pending:
                proxy.append(sum(pending) / len(pending))
                # Relative to the first proxy value, and again to the first mean of several values.
                relative_proxy.append(clip(clip(proxy[-1]) - clip(proxy[0])))
                pending.clear()
            if blocks.add(eval_scores[-1], relative_proxy[-1] if relative_proxy else 0.0, item.step):
                evidence = compute_evidence(detector, eval_scores, bool(proxy), blocks, item.progress, *before)
                blocks.open_block()
        collected.append(evidence)
    return collected


def compute_evidence(
    detector: PlateauDrop,
    eval_scores: Sequence[float],
    proxy_seen: bool,
    blocks: Blocks,
    progress: float | None,
    known_eval: Sequence[float],
    known_stderrs: Sequence[float | None],
    known_proxy: Sequence[float],
) -> Evidence:
    """The evidence after a full block; the `known` values exclude the last eval."""
    if len(eval_scores) < 6:
        return Evidence(
            Kind.STATISTIC, 0.0, None, f"needs {6 - len(eval_scores)} more eval{'s' if len(eval_scores) < 5 else ''}"
        )
    sd, inflation = estimate_noise(known_eval, known_stderrs)
    proxy_sd, proxy_inflation = estimate_noise(known_proxy)
    if sd == 0:
        return Evidence(Kind.STATISTIC, 0.0, None, "the eval score has not moved yet")
    threes = [sum(eval_scores[end - 3 : end]) / 3 for end in range(3, len(eval_scores))]
    risen, g, p, size = max(threes) - threes[0], blocks.eval_scores, blocks.proxy, blocks.size
    gain = max(risen, 6 * sd)
    doubt = detector.sigmas + 4 * (1 - min(risen / (6 * sd), 1))
    best = (0.0, 0, 0.0, 0, 0.0)
    for length in LENGTHS:
        ends = range(length, len(g) - length + 1)
        if not ends:
            break
        highest, end = max((sum(g[end - length : end]) / length, end) for end in ends)
        fall = highest - sum(g[-length:]) / length
        looks = math.sqrt(2 * math.log(len(g) / length))
        of_mean = sd * inflation / math.sqrt(length * size)
        fall_of_proxy = 0.0
        if proxy_sd > 0:
            fall_of_proxy = max(sum(p[end - length : end]) / length for end in ends) - sum(p[-length:]) / length
            fall_of_proxy /= proxy_sd * proxy_inflation / math.sqrt(length * size)
        common = max(0.0, min(fall_of_proxy, 1e9) - looks + 2)
        excess = min(fall / of_mean, 1e9) - looks - 3 * common - doubt
        half = length // 2
        older = highest - sum(g[-length : half - length]) / half
        older -= sd * (inflation if half * size > 1 else 1.0) / math.sqrt(half * size)
        depth = min(1.0, excess * of_mean / gain, 2 * older / gain)
        if fall > 0 and excess > 0 and depth > 0:
            rises = min(max((-fall_of_proxy - 1) / 4, 0.0), 1.0)
            value = length * size / (len(g) * size + 8)
            if progress is not None and 0 < progress < 1:
                value = 1.5 * length * size / (len(g) * size / progress + 8)
            value = value * depth**0.4 * (1 + 2 * rises)
            best = max(best, (value, -length, depth, end - 1, rises))
    value, length, depth, end, rises = best
    if value == 0:
        return Evidence(Kind.STATISTIC, 0.0, None, "the eval score is not below its best by more than its noise")
    if is_rising(g, 2 * inflation * sd / math.sqrt(size)):
        return Evidence(
            Kind.STATISTIC, 0.0, None, "the eval score is below its best, but a span of last evals slopes up"
        )
    proxy = "not seen" if not proxy_seen else "rising" if rises > 0 else "not falling alike"
    note = (
        f"the last {-length * size} of {len(g) * size} evals lie below the best by at least"
        f" {100 * depth:.0f} % of the gain;"
        f" proxy {proxy}"
    )
    return Evidence(Kind.STATISTIC, value, blocks.steps[end], note)


def is_rising(eval_scores: Sequence[float], bound: float) -> bool:
    """Whether a straight line over one of the spans rises by at least `bound` in units of its norm."""
    for span in SPANS:
        x = [index - (span - 1) / 2 for index in range(span)]
        norm = math.sqrt(sum(a * a for a in x))
        if span <= len(eval_scores) and sum(a / norm * b for a, b in zip(x, eval_scores[-span:], strict=True)) >= bound:
            return True
    return False
