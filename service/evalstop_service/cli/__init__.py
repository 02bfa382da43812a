"""The command line: `evalstop up`, or `serve`, `deliver` and `migrate` apart; projects and keys by hand."""

from evalstop_service.cli.command import FAILED, OK, USAGE
from evalstop_service.cli.entry import main, parser

__all__ = ["FAILED", "OK", "USAGE", "main", "parser"]
