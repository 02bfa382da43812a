"""The command line: `evalstop up`, or separate `serve`, `deliver` and `migrate`; administration of projects and
keys."""

from evalstop_service.cli.command import FAILED, OK, USAGE
from evalstop_service.cli.entry import main, parser

__all__ = ["FAILED", "OK", "USAGE", "main", "parser"]
