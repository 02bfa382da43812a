"""MLflow and Optuna, installed from the package index into an environment of their own, once."""

from __future__ import annotations

import hashlib
import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

REQUIREMENTS = ("mlflow==3.17.2", "optuna==5.0.0", "psycopg2-binary==2.9.13")


@dataclass(frozen=True)
class Outside:
    """Where that environment is kept."""

    cache: Path

    def python(self) -> Path:
        """The Python of an environment that holds exactly these versions; installs it when it is not there."""
        name = hashlib.sha256(" ".join(REQUIREMENTS).encode()).hexdigest()[:12]
        folder = self.cache / f"contenders-{name}"
        python, ready = folder / "bin" / "python", folder / ".ready"
        if not ready.exists():
            Console(stderr=True).print(f"installing {', '.join(REQUIREMENTS)} into {folder}, a minute or two")
            venv.create(folder, clear=True, with_pip=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
            ready.touch()
        return python

    def versions(self) -> dict[str, str]:
        """What is compared with, by name."""
        return dict(item.split("==", 1) for item in REQUIREMENTS)
