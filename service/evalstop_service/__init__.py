"""The EvalStop service: ingests metrics, decides, tracks the best checkpoint, delivers signed stop events."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evalstop_service.app import create_app
    from evalstop_service.configuration import create_database
    from evalstop_service.settings import Settings

__all__ = ["Settings", "create_app", "create_database"]

_MODULES = {"Settings": "settings", "create_app": "app", "create_database": "configuration"}


def __getattr__(name: str) -> object:
    """Import the package's names on demand: a command does not wait for what it does not use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"evalstop_service.{_MODULES[name]}"), name)
