"""Labeled runs, drawn and recorded, on which detectors are calibrated and evaluated."""

from evalstop_lab.worlds.families import CALIBRATION, FAMILIES, HELD_OUT, REPORTING, STRESS, Family, Group, of_group
from evalstop_lab.worlds.noise import LEVELS, Noise, NoiseKind
from evalstop_lab.worlds.real import load
from evalstop_lab.worlds.truth import Label, Truth, judge
from evalstop_lab.worlds.world import CALIBRATION_SEED, LENGTHS, REPORTING_SEED, World, make, plan, sample, tell_length

__all__ = [
    "CALIBRATION",
    "CALIBRATION_SEED",
    "FAMILIES",
    "HELD_OUT",
    "LENGTHS",
    "LEVELS",
    "REPORTING",
    "REPORTING_SEED",
    "STRESS",
    "Family",
    "Group",
    "Label",
    "Noise",
    "NoiseKind",
    "Truth",
    "World",
    "judge",
    "load",
    "make",
    "of_group",
    "plan",
    "sample",
    "tell_length",
]
