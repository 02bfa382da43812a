"""The version of this distribution, in one place."""

from importlib import metadata

try:
    __version__ = metadata.version("evalstop-client")
except metadata.PackageNotFoundError:  # read from a source tree that was never installed
    __version__ = "0"
