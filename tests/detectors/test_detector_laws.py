"""What detectors are made of: short runs computed by hand, thresholds, words, portable sums, and their examples."""

from __future__ import annotations

import ast
import doctest
import importlib
import math
import pkgutil
from pathlib import Path

import evalstop_detectors
import msgspec
import numpy as np
import pytest
from evalstop_detectors import (
    DETECTORS,
    Evidence,
    Kind,
    MetricRole,
    Observation,
    Policy,
    Thresholds,
    advance,
    choose_best,
)
from evalstop_detectors.detectors.gao_fit import GaoFit
from evalstop_detectors.detectors.k_decline import KDecline
from evalstop_detectors.detectors.non_finite import NonFinite
from evalstop_detectors.summation import add_up
from evalstop_detectors.wording import format_count, format_percent

from tests.detectors.strategies import AnyDetector, collect_values, eval_series


@pytest.mark.parametrize(
    ("detector", "scores", "expected"),
    [
        (KDecline(), [3, 2, 1, 1, 0], [0, 1, 2, 0, 1]),
        (KDecline(), [3, 2, math.nan, 1, -math.inf, 0], [0, 1, 1, 2, 2, 3]),
        (KDecline(min_delta=1), [3, 2, 0.5, -2], [0, 0, 1, 2]),
        (KDecline(), [1.7e308, -1.7e308], [0, 1]),
        (NonFinite(), [math.nan, 1, math.inf, math.nan, 0], [1, 0, 1, 2, 0]),
    ],
)
def test_short_runs_give_known_counts(detector: AnyDetector, scores: list[float], expected: list[float]) -> None:
    """The counts equal those computed by hand, also with NaN and infinities."""
    assert collect_values(detector, eval_series(scores)) == expected


@pytest.mark.parametrize(
    ("detector", "expected"),
    [
        (KDecline(k=1), Thresholds(None, 1)),
        (KDecline(k=3), Thresholds(2, 3)),
        (NonFinite(), Thresholds(1, None)),
        (GaoFit(), Thresholds(0.99, None)),
    ],
)
def test_thresholds_follow_from_the_parameters(detector: AnyDetector, expected: Thresholds) -> None:
    """Counting detectors suspect at k - 1 and stop at k; baselines only stop; non_finite and gao_fit only suspect."""
    assert detector.thresholds == expected


@pytest.mark.parametrize(
    ("kind", "value", "reached"),
    [(Kind.COUNT, 3, True), (Kind.COUNT, 2, False), (Kind.FRACTION, 3.5, True)],
)
def test_threshold_is_reached_from_below(kind: Kind, value: float, reached: bool) -> None:
    """Evidence reaches a threshold at the same value or a larger one; None is never reached."""
    assert Evidence(kind, value).reaches(3) is reached
    assert not Evidence(kind, value).reaches(None)
    assert Evidence(kind, 3).reaches(3)


def test_observation_converts_numpy_scalars() -> None:
    """Integers and NumPy scalars become plain numbers, so that every state can be stored."""
    observation = Observation(MetricRole.EVAL, 7, np.float64(0.5), np.float64(1), np.float64(0.25))
    assert [type(item) for item in msgspec.structs.astuple(observation)[1:5]] == [int, float, float, float]
    assert Observation(MetricRole.EVAL, 1, 2**53 + 1).value == 2.0**53
    assert type(Observation(MetricRole.EVAL, np.int64(7), 1.0).step) is int  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Observation(MetricRole.EVAL, 1.5, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("number", "words"), [(0, "0 more evals"), (1, "1 more eval"), (2, "2 more evals")])
def test_count_of_one_is_singular(number: int, words: str) -> None:
    """A noun is plural for every count but 1."""
    assert format_count(number, "more eval") == words


def test_percentage_has_a_space_before_the_sign() -> None:
    """A share is written in percent with the given number of decimals."""
    assert [format_percent(0.468), format_percent(0.468, 1)] == ["47 %", "46.8 %"]


PACKAGE = Path(evalstop_detectors.__file__).parent


def test_no_detector_uses_the_builtin_sum() -> None:
    """No detector uses `sum` or `statistics`, which round differently from Python 3.12 on."""
    violations = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Name) and node.id == "sum")
        or (isinstance(node, ast.ImportFrom) and node.module == "statistics")
        or (isinstance(node, ast.Import) and "statistics" in [alias.name for alias in node.names])
    ]
    assert violations == [], "use evalstop_detectors.summation.add_up or math.fsum"


def test_sums_are_not_compensated() -> None:
    """`add_up` rounds as plain double precision: in 1e16 + 1 the 1 is lost on every version."""
    assert add_up([1e16, 1.0, -1e16]) == 0.0
    assert add_up([]) == 0.0
    assert str(add_up([-0.0])) == "0.0"


MODULES = [info.name for info in pkgutil.walk_packages(evalstop_detectors.__path__, "evalstop_detectors.")]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_pass(name: str) -> None:
    """Every example of the module prints what its docstring says."""
    assert doctest.testmod(importlib.import_module(name), raise_on_error=True).failed == 0


@pytest.mark.parametrize("item", [*DETECTORS.values(), Policy, advance, choose_best])
def test_docstring_has_an_example(item: object) -> None:
    """Every detector, Policy, advance and choose_best have an example."""
    assert ">>> " in (item.__doc__ or "")
