"""The command line `evalstop`: runs, decisions, endpoints, settings and keys over HTTP, and the service's commands."""

from evalstop_client.cli.entry import main

__all__ = ["main"]
