"""The command line: `evalstop up`, or separate `serve`, `deliver` and `migrate`; the first key, and the emergencies."""

from evalstop_service.cli.entry import FAILED, OK, USAGE, main, parser

__all__ = ["FAILED", "OK", "USAGE", "main", "parser"]
