"""The version of this distribution, in one place."""

from importlib import metadata

__version__ = metadata.version("evalstop-client")
