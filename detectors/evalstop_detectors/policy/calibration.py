"""Finds the threshold for a risk: the share of healthy runs that a detector would stop, as calibrated.

A calibration belongs to a detector with exactly its parameters. Those of shipped policies are in a file that
`python -m evalstop_lab.calibrate.shipped` writes; only the detector, its parameters and the thresholds are read here,
the rest documents it.
"""

from __future__ import annotations

import json
import math
from importlib import resources
from operator import itemgetter
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from evalstop_detectors.detectors.detector import Detector
from evalstop_detectors.errors import InvalidPolicy
from evalstop_detectors.policy.catalog import DETECTORS
from evalstop_detectors.policy.policy import Member, Policy

SHIPPED_FILE = resources.files("evalstop_detectors.policy").joinpath("shipped_calibrations.json")


class Risk(Struct, frozen=True, forbid_unknown_fields=True):
    """A threshold given as a risk: the share of healthy runs that this detector alone would stop."""

    risk: Annotated[float, Meta(gt=0, lt=1, description="from 0 to 1")]


def _read_calibrations() -> dict[Detector[Any], dict[float, float]]:
    return {
        msgspec.convert(item["params"], DETECTORS[item["detector"]]): {
            level["rate"]: level["threshold"] for level in sorted(item["thresholds"], key=itemgetter("rate"))
        }
        for item in msgspec.json.decode(SHIPPED_FILE.read_bytes())
    }


SHIPPED = _read_calibrations()
"""The thresholds of each calibrated detector, by risk."""


def find_threshold(detector: Detector[Any], risk: float) -> float:
    """The threshold for this risk by the shipped calibrations; raises InvalidPolicy when there is none."""
    thresholds = SHIPPED.get(detector, {})
    if risk in thresholds:
        return thresholds[risk]
    params = json.dumps(msgspec.to_builtins(detector))
    there_are = (
        "risks of " + ", ".join(f"{rate:g}" for rate in thresholds) if thresholds else "none with these parameters"
    )
    raise InvalidPolicy(
        f"there is no threshold of {detector.name} {params} for a risk of {risk:g}; there are {there_are}. Give the"
        f" number that `evalstop-lab calibrate {detector.name} --params '{params}' --rates {risk:g}` finds"
    )


def compute_stated_risk(policy: Policy) -> float | None:
    """The largest share of healthy runs that a policy states to stop, by its members' thresholds; None: not stated.

    Shipped calibrations state it for their thresholds, and some detectors for their own; any other number states
    nothing. Where several members must agree, Markov's inequality bounds how often they do.
    """
    bound = math.fsum(map(_risk_of, policy.members)) / policy.at_least
    return bound if bound < 1 else None


def _risk_of(member: Member) -> float:
    detector, stop_at = member.detector, member.thresholds.stop_at
    if stop_at is None:
        return 0.0
    for risk, threshold in SHIPPED.get(detector, {}).items():
        if threshold == stop_at:
            return risk
    stated = detector.state_risk(stop_at)
    return 1.0 if stated is None else stated
