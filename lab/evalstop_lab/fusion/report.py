"""How fusion does on families that it was not fitted on, beside plateau_drop alone, and whether it is calibrated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from evalstop_detectors import Kind
from evalstop_detectors.detectors.fusion import FEATURES, FusionModel

from evalstop_lab.benchmarks.standing import RATES, Passed, alarm_at
from evalstop_lab.fusion.fit import exported, fit, posteriors
from evalstop_lab.fusion.passages import Passage
from evalstop_lab.worlds import CALIBRATION, FAMILIES, HELD_OUT, Group, Label, World
from evalstop_lab.worlds.scoring import Fate, Share, clopper_pearson, fate, wilson

Ground = Sequence[tuple[World, Passage]]
Judge = Callable[[Passage], Passed]

BINS = (0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98, 1.0)


def by_model(model: FusionModel, ground: Ground) -> list[Passed]:
    """What a policy of fusion with this model alone would record."""
    return [Passed(world, item.records(Kind.POSTERIOR, posteriors(model, item.values))) for world, item in ground]


def by_member(name: str, ground: Ground) -> list[Passed]:
    """What the member alone would record."""
    column = [*FEATURES].index(name)  # type: ignore[arg-type]
    return [Passed(world, item.records(Kind.STATISTIC, item.values[:, column])) for world, item in ground]


def known_families(model: FusionModel, calibration: Ground, reporting: Ground) -> dict[str, Any]:
    """Recall, premature and false stops of the model fitted on all calibration families, and of plateau_drop."""
    found: dict[str, Any] = {}
    contenders = {"fusion": _of(model), "plateau_drop": _plateau_drop}
    for name, judged in contenders.items():
        on_calibration, on_reporting = judged(calibration), judged(reporting)
        found[name] = {
            f"{rate:g}": _figures(on_reporting, alarm_at(on_calibration, rate))
            | {"alarm": alarm_at(on_calibration, rate)}
            for rate in RATES
        }
    return found


def left_out(training: Sequence[Passage], calibration: Ground, reporting: Ground) -> dict[str, dict[str, Any]]:
    """Each calibration family in turn out of fitting and of thresholds; what becomes of its runs.

    Of a healthy family the share that is stopped, of a hacking one the share that is stopped rightly.
    """
    found: dict[str, dict[str, Any]] = {}
    for family in CALIBRATION:
        model = exported(fit([item for item in training if item.group != family]))
        others = [pair for pair in calibration if pair[0].family != family]
        own = [pair for pair in reporting if pair[0].family == family]
        found[family] = _on_one_family(model, others, own)
    return found


def never_seen(model: FusionModel, calibration: Ground, reporting: Ground) -> dict[str, dict[str, Any]]:
    """The same of the families that neither fitting nor calibration ever sees."""
    return {
        family: _on_one_family(model, calibration, [pair for pair in reporting if pair[0].family == family])
        for family in FAMILIES
        if family in HELD_OUT
    }


def reliability(model: FusionModel, passages: Iterable[Passage]) -> list[dict[str, float]]:
    """Of the evals with a probability in each bin: how many, their mean probability, the share past the turn."""
    posterior, past, weight = [], [], []
    for item in passages:
        posterior.append(posteriors(model, item.values))
        past.append(item.past)
        weight.append(np.full(len(item.past), 1 / max(len(item.past), 1)))
    p, y, w = np.concatenate(posterior), np.concatenate(past), np.concatenate(weight)
    bins = np.digitize(p, BINS[1:-1])
    return [
        {
            "from": BINS[index],
            "to": BINS[index + 1],
            "evals": int((bins == index).sum()),
            "probability": float(np.average(p[bins == index], weights=w[bins == index])),
            "past": float(np.average(y[bins == index], weights=w[bins == index])),
        }
        for index in range(len(BINS) - 1)
        if (bins == index).any()
    ]


def _of(model: FusionModel) -> Callable[[Ground], list[Passed]]:
    return lambda ground: by_model(model, ground)


def _plateau_drop(ground: Ground) -> list[Passed]:
    return by_member("plateau_drop", ground)


def _on_one_family(model: FusionModel, others: Ground, own: Ground) -> dict[str, Any]:
    found: dict[str, Any] = {"runs": len(own)}
    for name, judged in {"fusion": _of(model), "plateau_drop": _plateau_drop}.items():
        calibration, reporting = judged(others), judged(own)
        found[name] = {}
        for rate in RATES:
            figures = _figures(reporting, alarm_at(calibration, rate))
            hacking = FAMILIES[own[0][0].family].group is Group.HACKING
            found[name][f"{rate:g}"] = figures["recall" if hacking else "false_stops"]
    return found


def _figures(passed: Sequence[Passed], alarm: float) -> dict[str, Any]:
    fates = [(fate(item.outcome(alarm), item.world.truth), item.world.truth.label) for item in passed]
    hacking = sum(label is Label.HACKING for _, label in fates)
    healthy = sum(label is Label.HEALTHY for _, label in fates)
    kinds = [kind for kind, _ in fates]
    return {
        "recall": _share(wilson(kinds.count(Fate.RIGHT), hacking)),
        "premature": _share(wilson(kinds.count(Fate.PREMATURE), hacking)),
        "false_stops": _share(clopper_pearson(kinds.count(Fate.FALSE_STOP), healthy)),
    }


def _share(share: Share) -> dict[str, Any]:
    return asdict(share) | {"value": share.value if share.n else None}
