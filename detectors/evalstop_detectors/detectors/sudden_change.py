"""A metric that trainers log beside the score, such as entropy or response length, changed by a factor at once.

Source      Original, from public reports of RL runs: before or as a policy collapses, the entropy of its answers
            vanishes or explodes, or they become a few tokens or endless.
Rule        Values are averaged in 32 to 63 blocks a run (fewer while it is young), however often it logs. The metric
            has changed if each of the last `blocks` is at most a `factor`-th or at least `factor` times the median of
            the ten blocks three before these, and the ten differ by at most a factor of 2: entropy that falls and
            answers that grow steadily, as in healthy runs, never change so fast.
State       The means of at most 63 blocks, and the block in progress. O(1).
Evidence    A statistic: the logarithm of the change, divided by that of `factor`. The turn is placed nowhere.
Not done    It does not stop by itself, and does not see the eval: a suspicion asks for an eval, which decides.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

from msgspec import Meta, Struct
from msgspec.structs import replace

from evalstop_detectors.checkpoint.noise import clipped
from evalstop_detectors.detectors.detector import Amount, Detector, Evidence, Kind, Thresholds
from evalstop_detectors.observation import MetricRole, Observation

_MOST_BLOCKS = 64
_BETWEEN, _REFERENCE = 3, 10  # blocks
_STEADY = 2.0


class SuddenChangeState(Struct, frozen=True):
    """`blocks`: means of `size` values each. `total`, `count`: the sum and number of those in the block in progress."""

    blocks: tuple[float, ...] = ()
    size: int = 1
    total: float = 0.0
    count: int = 0
    evidence: Evidence = Evidence(Kind.STATISTIC, 0.0, None, "no values yet")


class SuddenChange(Detector[SuddenChangeState], frozen=True):
    """Compares the latest values of one role with those before.

    `blocks`: how many of the latest must agree: more where single values are far off. `offset` is added to all values:
    a share near zero varies by large factors. `falls`: whether a fall counts too.

    Entropy that is 0.5, and then 0.1:

    >>> detector, state = SuddenChange(), SuddenChange().start()
    >>> for step in range(24):
    ...     state, evidence = detector.step(state, Observation(MetricRole.ENTROPY, step, 0.5 if step < 20 else 0.1))
    ...     if evidence.reaches(detector.thresholds.suspect_at):
    ...         print(f"step {step}: {evidence.note}")
    ...         break
    step 21: entropy fell to 0.2 of its level within 5 values; please evaluate
    """

    name: ClassVar[str] = "sudden_change"
    kind: ClassVar[Kind] = Kind.STATISTIC
    thresholds: ClassVar[Thresholds] = Thresholds(suspect_at=1.0, stop_at=None)
    state_type: ClassVar[type[SuddenChangeState]] = SuddenChangeState

    role: MetricRole = MetricRole.ENTROPY
    factor: Annotated[float, Meta(gt=1, le=1000)] = 3.0
    blocks: Annotated[int, Meta(ge=1, le=10)] = 2
    offset: Amount = 0.0
    falls: bool = True

    @property
    def roles(self) -> frozenset[MetricRole]:
        return frozenset({self.role})

    def step(self, state: SuddenChangeState, observation: Observation) -> tuple[SuddenChangeState, Evidence]:
        if not observation.finite:
            return state, state.evidence
        total, count = clipped(state.total + clipped(observation.value + self.offset)), state.count + 1
        if count < state.size:
            return replace(state, total=total, count=count), state.evidence
        blocks, size = (*state.blocks, total / count), state.size
        if len(blocks) == _MOST_BLOCKS:
            blocks, size = tuple((a + b) / 2 for a, b in zip(blocks[::2], blocks[1::2], strict=True)), 2 * size
        evidence = self._weigh(blocks, size)
        evidence = state.evidence if evidence == state.evidence else evidence
        return SuddenChangeState(blocks, size, evidence=evidence), evidence

    def _weigh(self, blocks: tuple[float, ...], size: int) -> Evidence:
        recent = self.blocks + _BETWEEN
        before = sorted(blocks[-recent - _REFERENCE : -recent])
        if len(before) < _REFERENCE:
            return Evidence(Kind.STATISTIC, 0.0, None, f"{self.role}: too few values yet")
        level, last = (before[4] + before[5]) / 2, blocks[-self.blocks :]
        if before[0] <= 0 or before[-1] > _STEADY * before[0]:
            return Evidence(Kind.STATISTIC, 0.0, None, f"{self.role} was not steady before")
        ratio, fell = (max(last) / level, True) if max(last) < level else (min(last) / level, False)
        # The logarithm is rounded, as its last bits differ between machines.
        counts = self.falls if fell else ratio > 1
        change = round(abs(math.log(max(ratio, 1e-9))) / math.log(self.factor), 6) if counts else 0.0
        if change < 1:
            return Evidence(Kind.STATISTIC, change, None, f"{self.role} did not change by a factor of {self.factor:g}")
        verb = "fell" if fell else "rose"
        note = f"{self.role} {verb} to {ratio:.2g} of its level within {recent * size} values; please evaluate"
        return Evidence(Kind.STATISTIC, change, None, note)
