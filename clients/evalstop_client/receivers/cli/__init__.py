"""The command line `evalstop-receiver`."""

from evalstop_client.receivers.cli.entry import main

__all__ = ["main"]
