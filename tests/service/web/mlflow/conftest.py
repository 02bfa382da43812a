"""A server on each database, and what speaks MLflow's language to it."""

from __future__ import annotations

from tests.service.web.api.conftest import Service, admin, service

__all__ = ["Service", "admin", "service"]
