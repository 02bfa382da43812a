"""The folder with the artifacts of MLflow clients: one folder per project, with the paths that clients choose.

A file that cannot be stored is dropped, and the reason is logged: refusing it would end the training.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple
from uuid import UUID

from evalstop_service.store.ids import new_id
from evalstop_service.web.mlflow.errors import invalid_parameter

_log = logging.getLogger(__name__)

SCHEME = "mlflow-artifacts:"
"""URIs with this scheme are served by the tracking server itself."""

MIN_FREE_BYTES = 1 << 30
"""Minimum free space on the folder's disk, which may also hold the embedded database."""


class Artifact(NamedTuple):
    """A file or folder by its name; folders have no size."""

    name: str
    is_folder: bool
    size_bytes: int | None


@dataclass(frozen=True)
class ArtifactFolder:
    """The artifacts: `root` is the URI below which experiments store theirs, `max_bytes` the largest file."""

    folder: Path
    root: str
    max_bytes: int

    def locate(self, path: str) -> str:
        """The URI of a path below the root."""
        return f"{self.root.rstrip('/')}/{path}"

    def list_artifacts(self, project_id: UUID, path: str) -> list[Artifact]:
        """The contents of a folder, by name; empty if there is no such folder. Raises MlflowError."""
        folder = self._resolve_path(project_id, path)
        if not folder.is_dir():
            return []
        return sorted(
            Artifact(entry.name, entry.is_dir(), None if entry.is_dir() else entry.stat().st_size)
            for entry in folder.iterdir()
        )

    def find_file(self, project_id: UUID, path: str) -> Path | None:
        """Find a file; None if there is none. Raises MlflowError."""
        file = self._resolve_path(project_id, path)
        return file if file.is_file() else None

    def start_upload(self, project_id: UUID, path: str) -> Upload:
        """Start writing or overwriting a file. Raises MlflowError."""
        return Upload(self._resolve_path(project_id, path), self.folder / "uploads" / new_id().hex, self.max_bytes)

    def _resolve_path(self, project_id: UUID, path: str) -> Path:
        """The file of a path, which must be below the project's folder."""
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if any(part == ".." or "\\" in part or not part.isprintable() for part in parts):
            raise invalid_parameter("Invalid path")
        return Path(self.folder, project_id.hex, *parts)


class Upload:
    """An upload in progress. The file is written next to its destination and moved there when it is complete."""

    def __init__(self, target: Path, temporary: Path, max_bytes: int) -> None:
        self._target, self._temporary, self._max_bytes = target, temporary, max_bytes
        self._file: BinaryIO | None = None
        self._size = 0
        self.failure: str | None = None

    def write(self, chunk: bytes) -> None:
        """Add to the file, unless it failed before."""
        if self.failure is not None:
            return
        self._size += len(chunk)
        try:
            if self._file is None:
                self._temporary.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._temporary.open("wb")
            if self._size > self._max_bytes:
                self._record_failure(f"it is larger than {self._max_bytes} bytes (EVALSTOP_MLFLOW_ARTIFACT_BYTES)")
            elif shutil.disk_usage(self._temporary.parent).free - len(chunk) < MIN_FREE_BYTES:
                self._record_failure(f"less than {MIN_FREE_BYTES} bytes would remain free on the disk")
            else:
                self._file.write(chunk)
        except OSError as error:
            self._record_failure(str(error))

    def finish(self) -> bool:
        """Move the file to its destination; returns whether it was stored."""
        self.write(b"")  # creates the file even if it is empty
        if self.failure is None:
            try:
                self._close_file()
                self._target.parent.mkdir(parents=True, exist_ok=True)
                self._temporary.replace(self._target)
            except OSError as error:
                self._record_failure(str(error))
        if self.failure is not None:
            _log.warning("the artifact %s is dropped: %s", self._target, self.failure)
        return self.failure is None

    def abandon(self) -> None:
        """Discard what arrived when the client has disconnected."""
        self._close_file()
        self._temporary.unlink(missing_ok=True)

    def _record_failure(self, failure: str) -> None:
        self.failure = failure
        self.abandon()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
