"""Labeled runs, drawn and recorded, on which detectors are calibrated and evaluated."""

from evalstop_lab.worlds.families import CALIBRATION, FAMILIES, HELD_OUT, REPORTING, Group, list_families
from evalstop_lab.worlds.noise import LEVELS, NoiseKind
from evalstop_lab.worlds.truth import Label, Truth, label_curve
from evalstop_lab.worlds.world import (
    CALIBRATION_SEED,
    REPORTING_SEED,
    World,
    add_planned_steps,
    draw_world,
    plan_worlds,
)

__all__ = [
    "CALIBRATION",
    "CALIBRATION_SEED",
    "FAMILIES",
    "HELD_OUT",
    "LEVELS",
    "REPORTING",
    "REPORTING_SEED",
    "Group",
    "Label",
    "NoiseKind",
    "Truth",
    "World",
    "add_planned_steps",
    "draw_world",
    "label_curve",
    "list_families",
    "plan_worlds",
]
