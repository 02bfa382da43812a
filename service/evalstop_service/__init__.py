"""The EvalStop service: takes in metrics, decides, keeps the best checkpoint, delivers signed stop events."""

from evalstop_service.app import create_app, create_database
from evalstop_service.settings import Settings

__all__ = ["Settings", "create_app", "create_database"]
