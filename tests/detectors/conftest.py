"""How the laws of the detectors are tried: no test fails for being slow on a busy machine."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("detectors", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("detectors")
