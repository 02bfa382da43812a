"""The families of runs: each draws a noiseless curve; the catalog says which of them calibration may see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from evalstop_lab.worlds.curves import Curve
from evalstop_lab.worlds.dips import DIPS
from evalstop_lab.worlds.hacking import HACKING
from evalstop_lab.worlds.healthy import HEALTHY
from evalstop_lab.worlds.truth import Label

Draw = Callable[[np.random.Generator, int], Curve]


class Group(StrEnum):
    """What kind of run a family holds."""

    HEALTHY = "healthy"
    DIP = "dip"
    HACKING = "hacking"

    @property
    def label(self) -> Label:
        return Label.HACKING if self is Group.HACKING else Label.HEALTHY


@dataclass(frozen=True)
class Family:
    """A way to draw noiseless curves, all of one label."""

    name: str
    group: Group
    draw: Draw


FAMILIES: dict[str, Family] = {
    name: Family(name, group, draw)
    for group, draws in ((Group.HEALTHY, HEALTHY), (Group.DIP, DIPS), (Group.HACKING, HACKING))
    for name, draw in draws.items()
}

# Neither thresholds nor parameters may be chosen with these in sight: they stand for what nobody thought of.
HELD_OUT = frozenset({"step_back", "swells", "drift_and_jump", "waves_down", "two_falls"})

# Reported by themselves and in no mix: a sag within the tolerance of the label is healthy by definition only.
STRESS = frozenset({"sag"})

CALIBRATION = tuple(name for name in FAMILIES if name not in HELD_OUT | STRESS)
REPORTING = tuple(name for name in FAMILIES if name not in STRESS)


def of_group(*groups: Group, among: tuple[str, ...] = REPORTING) -> tuple[str, ...]:
    """The names of the families of these groups."""
    return tuple(name for name in among if FAMILIES[name].group in groups)
