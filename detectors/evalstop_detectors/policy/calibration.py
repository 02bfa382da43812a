"""Finds the threshold for a risk: the share of healthy runs that a detector would stop, as calibrated.

A calibration belongs to a detector with exactly its parameters. It is the output of `evalstop-lab calibrate --json`;
only the detector, its parameters and the thresholds are read here, the rest documents it. Those of shipped policies are
in a file that `python -m evalstop_lab.calibrate.shipped` writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from evalstop_detectors.detectors.detector import Detector, Thresholds
from evalstop_detectors.detectors.plateau_drop import PlateauDrop
from evalstop_detectors.errors import InvalidPolicy
from evalstop_detectors.policy.catalog import DETECTORS, Ground, explain_unknown
from evalstop_detectors.policy.policy import Member, Policy

_CALIBRATED = PlateauDrop(sigmas=1.5, use_proxy=True)

SHIPPED_FILE = resources.files("evalstop_detectors.policy").joinpath("shipped_calibrations.json")

Share = Annotated[float, Meta(gt=0, lt=1)]


class Risk(Struct, frozen=True, forbid_unknown_fields=True):
    """A threshold given as a risk: the share of healthy runs that this detector alone would stop."""

    risk: Annotated[Share, Meta(description="from 0 to 1")]


class Level(Struct, frozen=True):
    """The threshold at which that share of healthy runs is stopped; None when no threshold is strict enough."""

    rate: Annotated[Share, Meta(description="share of healthy runs that are stopped, from 0 to 1")]
    threshold: Annotated[float | None, Meta(description="in the unit of the detector's evidence")]


class CalibrationDocument(Struct, frozen=True):
    """What is read of one calibration."""

    detector: Annotated[str, Meta(description="the detector that was calibrated")]
    params: Annotated[dict[str, Any], Meta(description="its parameters at that time")]
    thresholds: Annotated[list[Level], Meta(description="one for each evaluated risk")]


class Calibration(Struct, frozen=True):
    """The thresholds of one detector with its parameters."""

    detector: Detector[Any]
    levels: tuple[Level, ...]


def read_calibration(document: CalibrationDocument) -> Calibration:
    """Read one calibration; raises InvalidPolicy, or ValidationError for parameters that the detector does not have."""
    detector_type = DETECTORS.get(document.detector)
    if detector_type is None:
        raise InvalidPolicy(explain_unknown(document.detector), ("detector",))
    return Calibration(msgspec.convert(document.params, detector_type), tuple(document.thresholds))


def find_threshold(detector: Detector[Any], risk: float, own_calibrations: Sequence[Calibration]) -> float:
    """The threshold for this risk by the policy's own calibrations, else by the shipped ones.

    Raises InvalidPolicy when there is none.
    """
    for calibrations in (own_calibrations, SHIPPED):
        levels = {
            level.rate: level.threshold for item in calibrations if item.detector == detector for level in item.levels
        }
        if risk in levels:
            if (value := levels[risk]) is not None and value > 0:
                return value
            raise InvalidPolicy(
                f"no threshold of {detector.name} is strict enough for a risk of {risk:g}; take a larger risk, or null"
            )
    raise InvalidPolicy(_unknown(detector, risk, [*own_calibrations, *SHIPPED]))


def default_thresholds(detector: Detector[Any]) -> Thresholds:
    """The thresholds of a member whose policy sets none: those that the detector implies, or calibrated ones.

    plateau_drop implies none. It gets the thresholds that 5 % and 1 % of healthy runs reach with its default
    parameters, regardless of its own.
    """
    if not isinstance(detector, PlateauDrop):
        return detector.thresholds
    calibrated = {
        level.rate: level.threshold for item in SHIPPED if item.detector == _CALIBRATED for level in item.levels
    }
    return Thresholds(calibrated.get(0.05), calibrated.get(0.01))


def compute_stated_risk(policy: Policy) -> float | None:
    """The largest share of healthy runs that a policy states to stop, by its members' thresholds; None: not stated.

    Shipped calibrations state it for their thresholds, and some detectors for their own; any other number states
    nothing. Where votes are needed, Markov's inequality bounds how often they coincide. A policy that also stops
    runs that have levelled off does not state it.
    """
    if policy.stop_on != (Ground.TURNED,):
        return None
    votes = 0.0
    bound = 1.0
    for name, member in zip(policy.ids, policy.members, strict=True):
        risk = _risk_of(member)
        if name in policy.gate:
            bound = min(bound, risk)
        votes += min(member.weight, policy.at_least) / policy.at_least * risk
    bound = min(bound, votes)
    return bound if bound < 1 else None


def _risk_of(member: Member) -> float:
    detector, stop_at = member.detector, member.thresholds.stop_at
    if stop_at is None:
        return 0.0
    for item in SHIPPED:
        if item.detector == detector:
            for level in item.levels:
                if level.threshold == stop_at:
                    return level.rate
    stated = detector.state_risk(stop_at)
    return 1.0 if stated is None else stated


def _unknown(detector: Detector[Any], risk: float, calibrations: Iterable[Calibration]) -> str:
    params = json.dumps(msgspec.to_builtins(detector))
    rates = sorted({level.rate for item in calibrations if item.detector == detector for level in item.levels})
    there_are = "risks of " + ", ".join(f"{rate:g}" for rate in rates) if rates else "none with these parameters"
    return (
        f"there is no threshold of {detector.name} {params} for a risk of {risk:g}; there are {there_are}. Give a"
        f" number, or put under `calibration` what `evalstop-lab calibrate {detector.name} --params '{params}' --rates"
        f" {risk:g} --json` prints"
    )


SHIPPED: tuple[Calibration, ...] = tuple(
    map(read_calibration, msgspec.json.decode(SHIPPED_FILE.read_bytes(), type=list[CalibrationDocument]))
)
