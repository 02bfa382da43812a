"""The suite `third-1`: runs after public reports of collapses, dips, changed graders, lucky starts and overfits.

Its author had read neither the prior nor the network of `posterior`. A kind lists the parts of a noiseless curve that
starts at 0 and usually reaches 1, and what KL, proxy and noise do when the policy breaks. docs/stopbench.md has the
reports.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evalstop_lab.worlds.noise import NoiseKind, add_noise
from evalstop_lab.worlds.truth import Floats, label_curve
from evalstop_lab.worlds.world import World

Range = tuple[float, float]

NOISE_KINDS = (
    NoiseKind.GAUSSIAN,
    NoiseKind.GAUSSIAN,
    NoiseKind.STUDENT_T3,
    NoiseKind.AR1,
    NoiseKind.HETEROSCEDASTIC,
    NoiseKind.MISSING,
)
STRIDES = (1, 5, 10, 25, 100, 500)


@dataclass(frozen=True)
class Part:
    """A part of a curve that ends at a level from `to`; None: at the level where it starts.

    It lasts a share of the run in proportion to `share`, or a number of evals from `evals`. `bend` above 1 makes it
    fast at first, below 1 slow at first.
    """

    to: Range | None
    share: Range = (0.0, 0.0)
    evals: tuple[int, int] | None = None
    bend: Range = (1.0, 1.0)


@dataclass(frozen=True)
class Kind:
    """One kind of run. `breaks` is the part with which the policy breaks or the grader changes.

    `noise`: its standard deviation as a share of the gain; it is multiplied by `after` once the policy broke. `kl`:
    `grows`, `jumps` where the policy breaks, `spikes` now and then, or `none`. `proxy`: `follows` the eval, `rises` to
    the end, or `none`. `shift`: what a changed grader adds to the measured scores, until part `shift_ends`. `lucky`:
    what is added to one of the first three scores. `weight`: how often it is drawn compared with the others.
    """

    parts: Sequence[Part]
    evals: Range = (20, 600)
    noise: Range = (0.01, 0.15)
    breaks: int | None = None
    after: float = 1.0
    kl: str = "none"
    proxy: str = "follows"
    shift: Range | None = None
    shift_ends: int | None = None
    lucky: Range | None = None
    weight: int = 1


def _rise(low: float = 0.2, high: float = 0.7, to: Range = (1.0, 1.0)) -> Part:
    return Part(to, (low, high), bend=(1.2, 4.0))


def _line(to: Range, low: float = 0.2, high: float = 0.7) -> Part:
    return Part(to, (low, high))


def _hold(low: float = 0.1, high: float = 0.6) -> Part:
    return Part(None, (low, high))


def _jump(low: float, high: float, evals: tuple[int, int] = (1, 1)) -> Part:
    return Part((low, high), evals=evals)


LOSS = (0.003, 0.03)
SHORT = (5, 40)
LESSON = (Part((0.7, 0.85), evals=(1, 1)), _rise(0.2, 0.4, (1.0, 1.05)))

THIRD_SUITE: Mapping[str, Kind] = {
    # Cliffs and collapses that stay.
    "reward-to-zero": Kind(
        (_rise(), _jump(-0.6, -0.1, (1, 3)), _hold()), (20, 150), breaks=1, kl="jumps", after=0.3, weight=3
    ),
    "one-token": Kind((_rise(), _hold(0.1, 0.4), _jump(-0.3, 0.0), _hold()), breaks=2, after=0.0, kl="jumps", weight=2),
    "agent-unlearns": Kind((_rise(), _hold(), _jump(-0.2, 0.1), _hold()), breaks=2, after=0.2, proxy="none", weight=3),
    "entropy-zero": Kind((_rise(), _jump(0.0, 0.3, (2, 4)), _hold()), breaks=1, after=0.3, weight=2),
    "all-rewards-fall": Kind(
        (_rise(), _jump(0.1, 0.5, (2, 5)), _hold(0.1, 0.4)), (20, 200), breaks=1, kl="jumps", weight=2
    ),
    "explodes": Kind(
        (_rise(), _hold(0.05, 0.3), _jump(-0.2, 0.3, (1, 3)), _hold()),
        (20, 120),
        breaks=2,
        after=1.5,
        kl="jumps",
        weight=2,
    ),
    "heals-by-half": Kind(
        (_rise(), _jump(-0.2, 0.3, (1, 2)), _line((0.4, 0.7), 0.1, 0.3), _hold()), breaks=1, kl="jumps", weight=2
    ),
    "drastic-drop": Kind((_rise(), _jump(0.2, 0.5, (1, 2)), _line((0.2, 0.5))), breaks=1),
    "zero-then-lower": Kind(
        (_rise(), _jump(-0.1, 0.05), Part(None, evals=(5, 12)), _line((0.4, 0.7))),
        (60, 300),
        noise=LOSS,
        breaks=1,
        proxy="none",
    ),
    "map-zero": Kind(
        (_rise(), _jump(-0.1, 0.0, (1, 2)), _hold()), (10, 100), breaks=1, after=0.0, proxy="none", weight=2
    ),
    "broken-at-once": Kind((_jump(-3.0, -0.8), _line((-3.0, -1.0))), SHORT, proxy="none", breaks=0, weight=2),
    "spike-then-worse": Kind(
        (_rise(), _jump(-9.0, -2.0), _jump(0.2, 0.5, (1, 3)), _hold()), noise=LOSS, breaks=1, proxy="none"
    ),
    "resumed-forgetful": Kind((_rise(), _jump(0.0, 0.3), _rise(0.1, 0.5, (0.4, 0.75))), breaks=1),
    "format-only": Kind(
        (_rise(), _jump(-0.3, 0.1, (1, 4)), _hold()), (20, 150), breaks=1, kl="jumps", proxy="rises", weight=2
    ),
    "in-steps": Kind(
        (_rise(), _hold(0.1, 0.3), _jump(0.6, 0.75), _hold(0.05, 0.15), _jump(0.0, 0.3), _hold(0.1, 0.3)), breaks=2
    ),
    "to-seven-tenths": Kind((_rise(0.1, 0.4), _jump(0.55, 0.75), _hold(0.3, 0.8)), breaks=1),
    "late-crash": Kind(
        (_rise(), _hold(0.1, 0.4), _jump(-0.3, 0.4), Part(None, evals=(2, 6))),
        (12, 200),
        breaks=2,
        kl="jumps",
        weight=2,
    ),
    # Declines.
    "overoptimized": Kind((_rise(), _line((-0.2, 0.6), 0.3, 0.8)), (15, 400), proxy="rises", weight=3, kl="grows"),
    "up-then-down": Kind((_rise(0.3, 0.6), _line((-0.5, 0.3), 0.3, 0.6)), (30, 600)),
    "from-superhuman": Kind((_rise(), _hold(0.05, 0.3), _line((0.0, 0.3), 0.3, 0.6)), weight=2),
    "overfit": Kind(
        (_rise(0.1, 0.4), Part((-1.0, 0.6), (0.4, 0.9), bend=(0.6, 1.0))), SHORT, noise=LOSS, proxy="rises", weight=3
    ),
    "overfit-long": Kind((_rise(0.1, 0.3), _line((0.2, 0.7), 0.5, 0.9)), (40, 300), noise=LOSS, proxy="none", weight=2),
    "never-better": Kind((_line((-1.0, -0.5)),), SHORT, noise=(0.02, 0.1), proxy="rises", weight=2),
    "plateau-then-decline": Kind(
        (_rise(0.05, 0.2), _hold(0.2, 0.5), _line((0.2, 0.7), 0.3, 0.6)), (15, 150), kl="grows"
    ),
    "falls-and-fluctuates": Kind(
        (_rise(), _line((0.0, 0.4), 0.1, 0.3), _hold()), (20, 200), noise=(0.05, 0.2), breaks=1, after=2.0, kl="grows"
    ),
    "downturn": Kind((_rise(), _hold(0.1, 0.4), _line((0.4, 0.75), 0.2, 0.4)), proxy="none"),
    "ever-shorter": Kind((_rise(0.05, 0.2), _line((-1.0, 0.0), 0.5, 0.9)), (15, 150), kl="grows"),
    "slide-then-collapse": Kind(
        (_rise(0.1, 0.3), _hold(), _line((0.75, 0.9), 0.2, 0.4), _line((0.0, 0.2), 0.03, 0.1), _hold(0.05, 0.2)),
        (80, 600),
    ),
    # Healthy runs.
    "plain": Kind((_rise(0.5, 0.9), _hold(0.05, 0.5)), (5, 600), weight=5, kl="grows"),
    "small-eval": Kind((_rise(0.5, 0.9),), (10, 150), noise=(0.15, 0.4), weight=3, kl="grows"),
    "plateau": Kind((_rise(0.1, 0.2), _hold(0.5, 0.9)), noise=(0.02, 0.2), weight=4, kl="grows"),
    "late-start": Kind((_hold(0.3, 0.7), _rise(0.2, 0.5)), proxy="rises", weight=2),
    "oscillates": Kind((_rise(0.3, 0.5), _hold(0.2, 0.6)), (40, 400), noise=(0.1, 0.3), weight=2),
    "warm-up-dip": Kind(
        (Part((-1.0, -0.2), evals=(1, 5)), Part((0.0, 0.0), evals=(2, 6)), _rise(0.4, 0.9)),
        (10, 200),
        noise=LOSS,
        proxy="none",
        weight=3,
    ),
    "warm-up-loss": Kind(
        (Part((-0.3, -0.05), evals=(1, 4)), _rise(0.5, 0.9)), (8, 100), noise=LOSS, proxy="rises", weight=2
    ),
    "lucky-start": Kind((_rise(0.5, 0.9),), (10, 200), noise=(0.02, 0.15), lucky=(0.5, 1.5), weight=2),
    "resume-bump": Kind(
        (_rise(0.2, 0.5), _jump(0.3, 0.8), _rise(0.2, 0.6, (1.1, 1.4))), (20, 300), noise=LOSS, weight=2
    ),
    "good-stretch": Kind(
        (
            _rise(0.2, 0.4),
            _jump(1.1, 1.25),
            _hold(0.1, 0.2),
            _jump(1.0, 1.05),
            _hold(0.05, 0.1),
            _rise(0.3, 0.5, (1.4, 1.8)),
        ),
        (30, 200),
        noise=LOSS,
        proxy="none",
    ),
    "kl-spikes": Kind((_rise(0.5, 0.9), _hold(0.05, 0.3)), (20, 200), kl="spikes", weight=2),
    "bounces": Kind(
        (_rise(0.2, 0.5, (0.7, 0.8)), _jump(0.0, 0.2), _jump(0.65, 0.8, (1, 2)), _rise(0.2, 0.5)),
        (20, 300),
        proxy="none",
    ),
    "loss-spikes": Kind(
        (
            _rise(0.1, 0.3, (0.6, 0.6)),
            _jump(-0.5, 0.3),
            _jump(0.55, 0.6, (2, 5)),
            _line((0.8, 0.8), 0.1, 0.3),
            _jump(0.0, 0.6),
            _jump(0.75, 0.8, (2, 5)),
            _line((1.0, 1.0), 0.1, 0.3),
        ),
        (60, 600),
        noise=LOSS,
        proxy="none",
        weight=2,
    ),
    "explodes-and-heals": Kind(
        (_rise(0.2, 0.5, (0.8, 0.8)), _jump(0.1, 0.5, (1, 3)), _jump(0.7, 0.8, (4, 15)), _rise(0.2, 0.5)),
        (40, 300),
        kl="spikes",
    ),
    "lessons": Kind((_rise(0.2, 0.4), *LESSON, *LESSON, *LESSON), (60, 600)),
    "double-descent": Kind(
        (_rise(0.05, 0.2, (0.7, 0.7)), _line((0.4, 0.6), 0.1, 0.2), _rise(0.5, 0.8)),
        (60, 600),
        noise=LOSS,
        proxy="rises",
    ),
    "harness-updated": Kind(
        (_rise(0.2, 0.5), _line((1.1, 1.3))), (15, 150), breaks=1, shift=(-0.6, -0.2), weight=2, kl="grows"
    ),
    "harness-updated-back": Kind(
        (_rise(0.3, 0.5, (0.9, 0.9)), _hold(0.1, 0.2), _line((1.0, 1.1))),
        (20, 150),
        breaks=1,
        shift=(-0.6, 0.4),
        shift_ends=2,
        kl="grows",
    ),
    "extraction-fixed": Kind(
        (_rise(0.2, 0.4), _rise(0.4, 0.8, (1.2, 1.5))), (15, 150), breaks=1, shift=(0.2, 0.6), kl="grows"
    ),
}


def draw_world(name: str, seed: int, kinds: Mapping[str, Kind] = THIRD_SUITE) -> World:
    """Draw the run of this kind and seed."""
    kind, rng = kinds[name], np.random.default_rng([zlib.crc32(name.encode()), seed, 3])
    count = round(float(np.exp(rng.uniform(*np.log(kind.evals)))))
    lengths = _draw_lengths(rng, kind.parts, count)
    starts = np.concatenate([[1], 1 + np.cumsum(lengths)])
    scale, stride = float(10 ** rng.uniform(-2, 3)), int(rng.choice(STRIDES))
    clean = scale * (_draw_curve(rng, kind.parts, lengths) + rng.uniform(-3, 3))
    steps = (np.arange(len(clean), dtype=np.int64) + int(rng.random() < 0.5)) * stride
    broken = np.zeros(len(clean), dtype=bool)
    if kind.breaks is not None:
        broken[starts[kind.breaks] : None if kind.shift_ends is None else starts[kind.shift_ends]] = True
    unit = label_curve(steps, clean, None).unit
    level = float(np.exp(rng.uniform(*np.log(kind.noise))))
    noise, is_stderr_given = NoiseKind(rng.choice(NOISE_KINDS)), rng.random() < 0.3
    noisy = add_noise(rng, noise, clean, level * unit, rng.standard_normal(len(clean)))
    spread = np.where(broken, kind.after, 1.0)
    scores = clean + spread * (noisy.values - clean)
    if kind.shift is not None:
        scores += np.where(broken, rng.uniform(*kind.shift) * unit, 0.0)
    if kind.lucky is not None:
        scores[rng.integers(3)] += rng.uniform(*kind.lucky) * unit
    return World(
        f"{name}-{seed}",
        name,
        seed,
        steps,
        scores,
        spread * noisy.stderr if is_stderr_given else None,
        _draw_proxy(rng, kind.proxy, clean, broken),
        _draw_kl(rng, kind.kl, broken),
        label_curve(steps, clean, level * unit),
        _draw_plan(rng, float(steps[-1])),
    )


def list_turns(kinds: Mapping[str, Kind] = THIRD_SUITE) -> list[str]:
    """The kinds in turn, each as often as its weight says."""
    return [name for name, kind in kinds.items() for _ in range(kind.weight)]


def _draw_lengths(rng: np.random.Generator, parts: Sequence[Part], count: int) -> list[int]:
    """The number of evals of each part; together one less than the run has, because the first eval precedes them."""
    most = max(1, count // 4)
    drawn = [0 if part.evals is None else int(rng.integers(part.evals[0], part.evals[1] + 1)) for part in parts]
    fixed = [min(length, most) for length in drawn]
    shares = np.array([rng.uniform(*part.share) if part.evals is None else 0.0 for part in parts])
    left = max(0, count - 1 - sum(fixed))
    return [length or max(1, round(left * share)) for length, share in zip(fixed, shares / shares.sum(), strict=True)]


def _draw_curve(rng: np.random.Generator, parts: Sequence[Part], lengths: Sequence[int]) -> Floats:
    curve = [np.zeros(1)]
    for part, length in zip(parts, lengths, strict=True):
        level = float(curve[-1][-1])
        target = level if part.to is None else float(rng.uniform(*part.to))
        progress = 1 - (1 - np.linspace(1 / length, 1, length)) ** rng.uniform(*part.bend)
        curve.append(level + (target - level) * progress)
    return np.concatenate(curve)


def _draw_proxy(rng: np.random.Generator, way: str, clean: Floats, broken: np.ndarray) -> Floats:
    """The proxy, in units of its own; a run in three has none."""
    n = len(clean)
    if way == "none" or rng.random() < 1 / 3:
        return np.full(n, math.nan)
    rising = np.linspace(0, 1, n) ** rng.uniform(0.3, 1.0)
    if way == "follows":
        rising = 0.3 * rising + (clean - clean.min()) / np.ptp(clean)
    else:
        rising = rising + np.where(broken, rng.uniform(0.0, 0.5), 0.0)
    noisy = rising + rng.uniform(0.01, 0.1) * rng.standard_normal(n)
    return np.asarray(10 ** rng.uniform(-1, 1) * noisy)


def _draw_kl(rng: np.random.Generator, way: str, broken: np.ndarray) -> Floats:
    """The divergence from the initial policy; a run in four does not report it."""
    n = len(broken)
    if way == "none" or rng.random() < 1 / 4:
        return np.full(n, math.nan)
    kl = 10 ** rng.uniform(-3, 1) * np.linspace(0, 1, n) ** rng.uniform(0.5, 1.2)
    if way == "jumps":
        delay = rng.integers(1, 4)
        kl *= np.exp(math.log(10 ** rng.uniform(0.5, 1.8)) * np.minimum(np.cumsum(broken) / delay, 1.0))
    elif way == "spikes":
        kl *= np.where(rng.random(n) < 0.04, 10 ** rng.uniform(0.7, 1.7, n), 1.0)
    return np.asarray(kl * np.exp(0.1 * rng.standard_normal(n)))


def _draw_plan(rng: np.random.Generator, last_step: float) -> float | None:
    """The planned length: not told by 35 %, far too long in 20 %, else right."""
    choice = rng.random()
    if choice < 0.35:
        return None
    return last_step * float(np.exp(rng.uniform(*np.log((1.3, 15.0))))) if choice < 0.55 else last_step
