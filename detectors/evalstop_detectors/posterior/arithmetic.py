"""The arithmetic of features, on floats for one run and on numpy arrays for many; bitwise equal."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from evalstop_detectors.posterior.features import Arithmetic

_ROOT_HALF = 0.7071067811865476
# log2(m) = 2/ln 2 (z + z^3/3 + ...) with z = (m - 1)/(m + 1): to 1e-8 for m in [sqrt(1/2), sqrt(2)].
_SERIES = tuple(2.8853900817779268 / power for power in (1, 3, 5, 7, 9))


def _log2_of_one(x: float) -> float:
    mantissa, exponent = math.frexp(x)
    if mantissa < _ROOT_HALF:
        mantissa, exponent = mantissa * 2.0, exponent - 1
    z = (mantissa - 1.0) / (mantissa + 1.0)
    q = z * z
    a, b, c, d, e = _SERIES
    return exponent + z * (a + q * (b + q * (c + q * (d + q * e))))


def _log2_of_many(x: Any) -> Any:
    mantissa, exponent = np.frexp(x)
    small = mantissa < _ROOT_HALF
    mantissa = np.where(small, mantissa * 2.0, mantissa)
    z = (mantissa - 1.0) / (mantissa + 1.0)
    q = z * z
    a, b, c, d, e = _SERIES
    return (exponent - small) + z * (a + q * (b + q * (c + q * (d + q * e))))


ONE = Arithmetic(
    lambda condition, yes, no: yes if condition else no,
    lambda a, b: a if a <= b else b,
    lambda a, b: a if a >= b else b,
    math.sqrt,
    _log2_of_one,
    abs,
)
MANY = Arithmetic(np.where, np.minimum, np.maximum, np.sqrt, _log2_of_many, np.abs)
