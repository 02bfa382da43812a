"""plateau_drop over many runs at once: one column a run, one eval of each at a time.

What is the same for all runs (how many evals make a block) is a plain number, what is not is an array. Every sum is
taken in the order in which the detector takes it, so that numbers are equal to the last bit. Arrays only say which runs
may have fallen by more than noise explains, which few have; these are weighed by the detector itself.
"""

from __future__ import annotations

import numpy as np
from evalstop_detectors import Evidence, Kind
from evalstop_detectors.checkpoint import noise as noises
from evalstop_detectors.checkpoint.noise import LARGEST, Noise, NoiseState, estimate
from evalstop_detectors.detectors.plateau_drop import (
    BLOCKS,
    LARGEST_SIGMAS,
    LEAST_GAIN_SIGMAS,
    LENGTHS,
    LOOKS,
    NO_FALL,
    SIGMAS_IF_NOT_RISEN,
    SOONEST,
    UNMOVED,
    Best,
    PlateauDrop,
    PlateauDropState,
    weigh,
)
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class PlateauColumns:
    """The state of `detector` in each of many runs; `values` are their evidence.

    `gold`, `stderrs` (NaN for none) and `steps` hold one row an eval and one column a run. `proxy_sums` and
    `proxy_counts` are those of the proxies between the eval before and this one, each counted from the run's first.
    """

    def __init__(
        self,
        detector: PlateauDrop,
        gold: Floats,
        stderrs: Floats,
        steps: Integers,
        proxy_sums: Floats,
        proxy_counts: Integers,
    ) -> None:
        evals, runs = gold.shape
        self.values = np.zeros(runs)
        self._detector, self._gold, self._stderrs, self._steps = detector, gold, stderrs, steps
        self._proxy_sums, self._proxy_counts = proxy_sums, proxy_counts
        self._loud: dict[int, Evidence] = {}
        self._over = np.zeros(runs, dtype=bool)
        self._seen_at_close = np.zeros(runs, dtype=np.int64)
        self._sd_at_close = np.zeros(runs)
        self._counted, self._proxies = np.zeros((evals, runs)), np.full((evals, runs), np.nan)
        self._origin, self._low, self._high = np.zeros(runs), np.zeros(runs), np.zeros(runs)
        self._told, self._mean_square = np.zeros(runs), np.zeros(runs)
        self._start, self._top = np.zeros(runs), np.zeros(runs)
        self._proxy_seen, self._proxy_origin = np.zeros(runs, dtype=np.int64), np.zeros(runs)
        self._proxy_last = np.zeros(runs)
        self._size, self._open = 1, 0
        self._open_gold, self._open_proxy = np.zeros(runs), np.zeros(runs)
        self._closed_at: list[int] = []
        self._blocks = _Windows(runs)

    def advance(self, index: int, runs: int) -> None:
        """Take in the eval of this index of the first `runs` runs."""
        closes = self._open + 1 == self._size
        known = self._noise(index, runs) if closes else None
        top = self._top[:runs].copy()
        self._take_evals(index, runs)
        self._take_proxy(index, runs)
        self._open += 1
        self._open_gold[:runs] += self._counted[index, :runs]
        self._open_proxy[:runs] += self._proxy_last[:runs]
        if known is not None:
            self._close(index, runs, top, *known)

    def evidence(self, run: int) -> Evidence:
        """What the detector would have said of this run last."""
        seen = int(self._seen_at_close[run])
        if run in self._loud:
            return self._loud[run]
        if seen < SOONEST:
            return Evidence(Kind.STATISTIC, 0.0, None, f"needs {SOONEST - seen} more evals")
        return UNMOVED if self._sd_at_close[run] == 0 else NO_FALL

    def end(self, run: int) -> None:
        """Look no longer at this run, of which nothing more will be asked."""
        self._over[run] = True

    def _take_evals(self, index: int, runs: int) -> None:
        value = np.clip(self._gold[index, :runs], -LARGEST, LARGEST)
        if index == 0:
            self._origin[:runs] = value
        counted = np.clip(value - self._origin[:runs], -LARGEST, LARGEST)
        self._counted[index, :runs] = counted
        self._low[:runs] = np.minimum(self._low[:runs], counted)
        self._high[:runs] = np.maximum(self._high[:runs], counted)
        stderr = self._stderrs[index, :runs]
        told = np.flatnonzero((stderr > 0) & (stderr < np.inf))
        known = np.minimum(stderr[told], LARGEST)
        self._told[told] += 1
        self._mean_square[told] += (known * known - self._mean_square[told]) / self._told[told]
        last = self._counted[max(index - 2, 0) : index + 1, :runs]
        mean = _in_order(last) / len(last)
        if index < 3:
            self._start[:runs] = self._top[:runs] = mean
        else:
            self._top[:runs] = np.maximum(self._top[:runs], mean)

    def _take_proxy(self, index: int, runs: int) -> None:
        new = np.flatnonzero(self._proxy_counts[index, :runs])
        value = np.clip(self._proxy_sums[index, new] / self._proxy_counts[index, new], -LARGEST, LARGEST)
        first = self._proxy_seen[new] == 0
        self._proxy_origin[new[first]] = value[first]
        counted = np.clip(value - self._proxy_origin[new], -LARGEST, LARGEST)
        self._proxies[index, new] = self._proxy_last[new] = counted
        self._proxy_seen[new] += 1

    def _noise(self, seen: int, runs: int) -> tuple[Floats, Floats]:
        """`noise.estimate` of gold after so many evals."""
        recent = self._counted[max(seen - noises.WINDOW - 1, 0) : seen, :runs]
        return _estimates(recent, seen, self._low[:runs], self._high[:runs], np.sqrt(self._mean_square[:runs]))

    def _close(self, index: int, runs: int, top: Floats, sd: Floats, inflation: Floats) -> None:
        size = self._size
        self._closed_at.append(index)
        self._blocks.add(self._open_gold[:runs] / size, self._open_proxy[:runs] / size)
        self._open = 0
        self._open_gold[:runs] = self._open_proxy[:runs] = 0.0
        self._seen_at_close[:runs] = index + 1
        self._sd_at_close[:runs] = sd
        self.values[:runs] = 0.0
        for run in [run for run in self._loud if run < runs]:
            del self._loud[run]
        if index + 1 >= SOONEST:
            fallen = self._fallen(runs, top, sd, inflation)
            for run, of_proxy in zip(fallen.tolist(), self._proxy_noises(index, fallen), strict=True):
                of_gold = Noise(float(sd[run]), float(inflation[run]))
                evidence = self._weighed(index, run, float(top[run]), of_gold, of_proxy)
                self._loud[run] = evidence
                self.values[run] = evidence.value
        if self._blocks.count == BLOCKS:
            self._blocks.fold()
            self._size, self._closed_at = 2 * size, self._closed_at[1::2]

    def _fallen(self, runs: int, top: Floats, sd: Floats, inflation: Floats) -> Integers:
        """The runs of which `PlateauDrop.falls` finds some."""
        fallen = np.zeros(runs, dtype=bool)
        with np.errstate(all="ignore"):  # of runs that have not moved
            risen = np.minimum((top - self._start[:runs]) / (LEAST_GAIN_SIGMAS * sd), 1.0)
            doubt = self._detector.sigmas + SIGMAS_IF_NOT_RISEN * (1 - risen)
            one = sd * inflation
            windows = zip(LOOKS[self._blocks.count], self._blocks.best_gold, self._blocks.last_evals, strict=False)
            for place, (looks, best, last) in enumerate(windows):
                fall = best[:runs] - last[:runs]
                sigmas = np.minimum(fall / (one / np.sqrt(LENGTHS[place] * self._size)), LARGEST_SIGMAS) - looks
                fallen |= (fall > 0) & (sigmas - doubt > 0)
        return np.flatnonzero(fallen & (sd > 0) & ~self._over[:runs])

    def _weighed(self, index: int, run: int, top: float, noise: Noise, proxy_noise: Noise) -> Evidence:
        gold, proxy, bests = self._blocks.of(run)
        state = PlateauDropState(
            noise=NoiseState(seen=index + 1),
            proxy_noise=NoiseState(seen=int(self._proxy_seen[run])),
            size=self._size,
            scores=gold,
            proxy=proxy,
            steps=tuple(self._steps[self._closed_at, run].tolist()),
            start=float(self._start[run]),
        )
        falls = self._detector.falls(gold, bests, state, top, noise)
        gain = max(top - state.start, LEAST_GAIN_SIGMAS * noise.sd)
        return weigh(state, falls, gain, noise, proxy_noise)

    def _proxy_noises(self, seen: int, runs: Integers) -> list[Noise]:
        """`noise.estimate` of the proxies of these runs with so many evals."""
        found: dict[int, Noise] = {}
        # The proxy of this eval is counted already.
        new = ~np.isnan(self._proxies[seen, runs])
        whole = runs[self._proxy_seen[runs] - new == seen]
        proxies = self._proxies[:seen, whole]
        low, high = proxies.min(axis=0), proxies.max(axis=0)
        sd, inflation = _estimates(proxies[-noises.WINDOW - 1 :], seen, low, high, np.zeros(len(whole)))
        found = {run: Noise(a, b) for run, a, b in zip(whole.tolist(), sd.tolist(), inflation.tolist(), strict=True)}
        return [found[run] if run in found else self._proxy_noise(seen, run) for run in runs.tolist()]

    def _proxy_noise(self, seen: int, run: int) -> Noise:
        """The same of a run that lacks some."""
        values = self._proxies[:seen, run]
        values = values[~np.isnan(values)]
        if not len(values):
            return Noise(0.0, 1.0)
        low, high = float(values.min()), float(values.max())
        return estimate(NoiseState(len(values), 0.0, tuple(values[-noises.WINDOW - 1 :].tolist()), low, high))


class _Windows:
    """The blocks of many runs, the mean of the last window of each length, and the best of the earlier ones."""

    def __init__(self, runs: int) -> None:
        self._gold, self._proxy = np.zeros((BLOCKS, runs)), np.zeros((BLOCKS, runs))
        self._forget()

    def _forget(self) -> None:
        self.count = 0
        self._gold_means: list[list[Floats]] = [[] for _ in LENGTHS]
        self._proxy_means: list[list[Floats]] = [[] for _ in LENGTHS]
        self.best_gold: list[Floats] = []
        self.best_proxy: list[Floats] = []
        self.best_ends: list[Integers] = []

    @property
    def last_evals(self) -> list[Floats]:
        """The mean of the last window of each length."""
        return [means[-1] for means in self._gold_means if means]

    def add(self, gold: Floats, proxy: Floats) -> None:
        """One more block of the first runs, as many as there are values."""
        runs = len(gold)
        self._gold[self.count, :runs], self._proxy[self.count, :runs] = gold, proxy
        self.count += 1
        for place, length in enumerate(LENGTHS):
            if length > self.count:
                break
            last = slice(self.count - length, self.count)
            self._gold_means[place].append(_in_order(self._gold[last, :runs]) / length)
            self._proxy_means[place].append(_in_order(self._proxy[last, :runs]) / length)
            if self.count >= 2 * length:
                self._became_earlier(place, self.count - length, runs)

    def _became_earlier(self, place: int, end: int, runs: int) -> None:
        gold = self._gold_means[place][end - LENGTHS[place]][:runs]
        proxy = self._proxy_means[place][end - LENGTHS[place]][:runs]
        if place == len(self.best_gold):
            self.best_gold.append(gold.copy())
            self.best_proxy.append(proxy.copy())
            self.best_ends.append(np.full(runs, end - 1, dtype=np.int64))
            return
        # Of equals the later.
        better = self.best_gold[place][:runs] <= gold
        self.best_gold[place][:runs][better] = gold[better]
        self.best_ends[place][:runs][better] = end - 1
        np.maximum(self.best_proxy[place][:runs], proxy, out=self.best_proxy[place][:runs])

    def fold(self) -> None:
        """Join the blocks in pairs, and look for the best windows again."""
        gold, proxy = ((blocks[::2] + blocks[1::2]) / 2 for blocks in (self._gold, self._proxy))
        self._forget()
        for row, other in zip(gold, proxy, strict=True):
            self.add(row, other)

    def of(self, run: int) -> tuple[tuple[float, ...], tuple[float, ...], tuple[Best, ...]]:
        """The blocks of one run, and its best windows by length."""
        bests = zip(self.best_gold, self.best_ends, self.best_proxy, strict=True)
        return (
            tuple(self._gold[: self.count, run].tolist()),
            tuple(self._proxy[: self.count, run].tolist()),
            tuple(Best(float(gold[run]), int(ends[run]), float(proxy[run])) for gold, ends, proxy in bests),
        )


def _in_order(rows: Floats) -> Floats:
    """The sum of the rows as `add_up` adds them up, one after the other."""
    total: Floats = rows[0] + 0.0
    for row in rows[1:]:
        total += row
    return total


def _estimates(recent: Floats, seen: int, low: Floats, high: Floats, known: Floats) -> tuple[Floats, Floats]:
    """`noise.estimate` of many series of which so many values were seen: scale and inflation."""
    runs = recent.shape[1]
    if seen < 2:
        return known, np.ones(runs)
    least = (high - low) * (noises.SHARE_OF_RANGE_WHILE_FEW if seen <= noises.FEW else noises.SHARE_OF_RANGE)
    first = _median(np.abs(recent[1:] - recent[:-1])) / noises.MEDIAN_DIFFERENCE
    found, correlation = first, np.zeros(runs)
    if seen >= 4:
        second = _median(np.abs(recent[2:] - 2 * recent[1:-1] + recent[:-2]))
        found = np.minimum(first, noises.SECOND_MARGIN * second / noises.MEDIAN_SECOND_DIFFERENCE)
    if seen >= noises.FEW + 2:
        some = np.flatnonzero(first > least)
        ratio = _median(np.abs(recent[2:, some] - recent[:-2, some])) / noises.MEDIAN_DIFFERENCE / first[some]
        pairs = seen - 2
        above = np.minimum(np.maximum(ratio * ratio - 1, 0.0), noises.STRONGEST_CORRELATION)
        correlation[some] = above * pairs / (pairs + 10)
    supposed = noises.SUPPOSED_CORRELATION * 10 / (seen + 10)
    correlation = np.minimum(correlation + supposed, noises.STRONGEST_SUPPOSED)
    sd = np.maximum(np.maximum(found * (1 + 2 / seen), least), known)
    return sd, np.sqrt((1 + correlation) / (1 - correlation))


def _median(rows: Floats) -> Floats:
    count = len(rows)
    low, high = (count - 1) // 2, count // 2
    ordered = np.partition(rows, (low, high), axis=0)
    median: Floats = (ordered[low] + ordered[high]) / 2
    return median
