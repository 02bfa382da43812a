"""Describes the machine on which figures are measured: versions, cores and load."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from typing import Any


def describe_machine(*packages: str) -> dict[str, Any]:
    """The Python version, cores, load average, and the versions of these packages, as JSON values."""
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "load_average": round(os.getloadavg()[0], 1),
        "versions": {name: version(name) for name in packages},
    }


def format_machine(machine: dict[str, Any]) -> str:
    """Format the result of `describe_machine` as one line of text."""
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return (
        f"Python {machine['python']}, {machine['cores']} cores, Linux {machine['kernel']},"
        f" load average {machine['load_average']}; {versions}"
    )
