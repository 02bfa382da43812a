"""All detectors by the names that policies use."""

from __future__ import annotations

from typing import Any

from evalstop_detectors.detectors.bocpd import Bocpd
from evalstop_detectors.detectors.cusum import Cusum
from evalstop_detectors.detectors.detector import Detector
from evalstop_detectors.detectors.divergence import Divergence
from evalstop_detectors.detectors.e_process import EProcess
from evalstop_detectors.detectors.ema_decline import EmaDecline
from evalstop_detectors.detectors.fixed_progress import FixedProgress
from evalstop_detectors.detectors.floor import Floor
from evalstop_detectors.detectors.focus import Focus
from evalstop_detectors.detectors.gao_fit import GaoFit
from evalstop_detectors.detectors.k_below_best import KBelowBest
from evalstop_detectors.detectors.k_decline import KDecline
from evalstop_detectors.detectors.loss_plateau import LossPlateau
from evalstop_detectors.detectors.non_finite import NonFinite
from evalstop_detectors.detectors.plateau_drop import PlateauDrop
from evalstop_detectors.detectors.posterior import Posterior
from evalstop_detectors.detectors.river_drift import RiverDrift

DETECTORS: dict[str, type[Detector[Any]]] = {
    "bocpd": Bocpd,
    "cusum": Cusum,
    "divergence": Divergence,
    "e_process": EProcess,
    "ema_decline": EmaDecline,
    "floor": Floor,
    "fixed_progress": FixedProgress,
    "focus": Focus,
    "gao_fit": GaoFit,
    "k_below_best": KBelowBest,
    "k_decline": KDecline,
    "loss_plateau": LossPlateau,
    "non_finite": NonFinite,
    "plateau_drop": PlateauDrop,
    "posterior": Posterior,
    "river_drift": RiverDrift,
}


def explain_unknown(name: str) -> str:
    """The error message for an unknown detector name."""
    return f"there is no detector {name!r}; there are {', '.join(DETECTORS)}"
