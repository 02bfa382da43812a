"""What changes together when a policy breaks: the score at once, its noise, the KL and the proxy.

Source      Original, after public reports of collapsed RL runs: nearly all of them stayed down. KL jumps by 3 to 60
            times within three evals, the proxy falls with the score or, if it is exploited, rises; on a floor the noise
            vanishes. A changed grader is no break: it moves the eval alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evalstop_lab.worlds.shapes import draw_log_uniform
from evalstop_lab.worlds.truth import Floats

LATEST = (2, 7)  # evals that are left after a late break


@dataclass(frozen=True, eq=False)
class Break:
    """A break after the eval at index `at`; the arrays have one entry per eval.

    `loss` is of the score, as a share of its gain; `heals` says whether it is 0 again at the end. `spread` and
    `proxy_spread` multiply the noise, `kl` the KL; `proxy` is added to the proxy, as a share of its range.
    """

    at: int
    loss: Floats
    heals: bool
    spread: Floats
    proxy_spread: Floats
    kl: Floats
    proxy: Floats


def draw_break(rng: np.random.Generator, n: int, risen: Floats, heals: bool) -> Break:
    """Draw a break of a run with the rise `risen` (of n evals), which heals, or stays down for good."""
    at = int(np.clip(round(rng.uniform(0.05, 0.85 if heals else 0.97) * (n - 1)), 1, n - 2))
    if not heals and n >= 8 and rng.random() < 0.25:
        at = n - 1 - int(rng.integers(*LATEST))
    since = np.maximum(np.arange(n) - at, 0)
    sudden = np.minimum(since / int(rng.choice([1, 1, 1, 2, 3])), 1.0)
    dead = not heals and rng.random() < 0.35
    course = _draw_healing(rng, n, since) if heals else np.ones(n) if dead else _draw_course(rng, n - at, since)
    depth = draw_log_uniform(rng, 0.2, 2.5)
    if dead:  # to a floor, often where the run began
        depth = max(float(risen[at] - risen[0]), 0.15) * draw_log_uniform(rng, 0.8, 3)
    broken = since > 0 if not heals else (since > 0) & (course > 0.05)
    quiet = rng.choice([0.0, rng.uniform(0, 0.15)]) if dead else np.exp(rng.uniform(-1.2, 0.7))
    kl = np.ones(n)
    if rng.random() < 0.7:
        ramp = np.minimum(since / int(rng.integers(1, 4)), 1.0)
        after = course if heals else np.exp(rng.uniform(-0.5, 0.5) * since / n)
        kl = np.exp(np.log(draw_log_uniform(rng, 3, 60)) * ramp * after)
    kind, proxy = rng.random(), np.zeros(n)
    if kind < 0.6:  # falls with the score
        proxy = -rng.uniform(0.2, 1.5) * sudden * course
    elif kind < 0.8:  # is exploited
        proxy = rng.uniform(0.2, 1.5) * np.minimum(since / int(rng.integers(1, 6)), 1.0) * (course if heals else 1.0)
    proxy_quiet = rng.uniform(0, 0.4) if dead and kind < 0.6 else 1.0
    return Break(
        at,
        depth * sudden * course,
        heals,
        np.where(broken, quiet, 1.0),
        np.where(broken, proxy_quiet, 1.0),
        kl,
        proxy,
    )


def _draw_course(rng: np.random.Generator, remaining: int, since: Floats) -> Floats:
    """How the fall goes on for good: it stays, heals in part, or deepens."""
    kind = rng.random()
    if kind < 0.5:
        return np.asarray(1 + rng.uniform(-0.2, 0.2) * since / remaining)
    if kind < 0.8:
        left = rng.uniform(0.3, 0.85)
        return np.asarray(left + (1 - left) * np.exp(-since / draw_log_uniform(rng, 1, 0.3 * remaining + 2)))
    return np.asarray(1 + rng.uniform(0.1, 1.0) * since / remaining)


def _draw_healing(rng: np.random.Generator, n: int, since: Floats) -> Floats:
    """1 at first, and 0 after a number of evals: the run was rolled back, or found its way back."""
    width = min(draw_log_uniform(rng, 2, 40), max(0.3 * n, 2.0))
    held = rng.uniform(0.1, 0.95) * width
    return np.interp(since, [0, held, width], [1.0, 1.0, 0.0])
