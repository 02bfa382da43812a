"""Every detector by its name, as policies call it."""

from __future__ import annotations

from typing import Any

from evalstop_detectors.detector import Detector
from evalstop_detectors.e_process import EProcess
from evalstop_detectors.ema_decline import EmaDecline
from evalstop_detectors.fixed_progress import FixedProgress
from evalstop_detectors.floor import Floor
from evalstop_detectors.k_below_best import KBelowBest
from evalstop_detectors.k_decline import KDecline
from evalstop_detectors.loss_plateau import LossPlateau
from evalstop_detectors.non_finite import NonFinite
from evalstop_detectors.plateau_drop import PlateauDrop

DETECTORS: dict[str, type[Detector[Any]]] = {
    "e_process": EProcess,
    "ema_decline": EmaDecline,
    "floor": Floor,
    "fixed_progress": FixedProgress,
    "k_below_best": KBelowBest,
    "k_decline": KDecline,
    "loss_plateau": LossPlateau,
    "non_finite": NonFinite,
    "plateau_drop": PlateauDrop,
}
