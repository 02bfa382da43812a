"""The catalog of families of runs: each draws noiseless curves; some are excluded from calibration."""

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
    """The kind of a family's runs."""

    HEALTHY = "healthy"
    DIP = "dip"
    HACKING = "hacking"

    @property
    def label(self) -> Label:
        return Label.HACKING if self is Group.HACKING else Label.HEALTHY


@dataclass(frozen=True)
class Family:
    """Draws noiseless curves, all of one label."""

    name: str
    group: Group
    draw: Draw


FAMILIES: dict[str, Family] = {
    name: Family(name, group, draw)
    for group, draws in ((Group.HEALTHY, HEALTHY), (Group.DIP, DIPS), (Group.HACKING, HACKING))
    for name, draw in draws.items()
}

# Never used to choose thresholds or parameters: they represent curves that nobody anticipated.
HELD_OUT = frozenset({"step_back", "swells", "drift_and_jump", "waves_down", "two_falls"})

CALIBRATION = tuple(name for name in FAMILIES if name not in HELD_OUT)
REPORTING = tuple(FAMILIES)


def list_families(*groups: Group, among: tuple[str, ...] = REPORTING) -> tuple[str, ...]:
    """The names of the families in these groups."""
    return tuple(name for name in among if FAMILIES[name].group in groups)
