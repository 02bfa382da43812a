"""Artifacts of MLflow's clients, stored as they arrive, and logged models, which are accepted and not kept.

An artifact or a model named after a step is a checkpoint of this step. Clients write directly to roots other than
`mlflow-artifacts:`; of such artifacts only those of `log_model` are known here.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from uuid import UUID

from cachetools import TTLCache, cachedmethod
from fastapi import APIRouter, Depends, Request
from fastapi.responses import FileResponse

from evalstop_service.store import projects, run_details, runs
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.web.api.json_body import JsonRoute
from evalstop_service.web.context import Caller, Db, Ingest, ReadOrIngest
from evalstop_service.web.limits import in_thread
from evalstop_service.web.mlflow import requests
from evalstop_service.web.mlflow.experiments import Root, load_experiment
from evalstop_service.web.mlflow.protocol import API, MlflowError, invalid_parameter, not_found
from evalstop_service.web.mlflow.requests import Document, is_uuid
from evalstop_service.web.mlflow.run_logger import Logger, RunLogger, find_checkpoint, load_recorded, load_run

_log = logging.getLogger(__name__)

PREFIX = f"{API}/mlflow-artifacts/artifacts"
SCHEME = "mlflow-artifacts:"
"""URIs with this scheme are served by the tracking server itself."""

_OF_RUN = re.compile(r"(?P<root>(?:.*?/)?(?P<run>[0-9a-f]{32})/artifacts)/(?P<path>.+)")

MIN_FREE_BYTES, MIN_FILE_BYTES = 1 << 30, 4096
"""Free space that stays on the disk, which may also hold the database; and what an empty file counts for."""
MEASURED_SECONDS = 60.0
"""How long the measured size of a project's folder is relied upon: it may then be more than its quota, by what arrives
meanwhile."""


class ArtifactFolder:
    """The artifacts: `root` is the URI below which experiments store theirs."""

    def __init__(self, folder: Path, root: str, min_free_bytes: int = MIN_FREE_BYTES) -> None:
        self.folder, self.root, self.min_free_bytes = folder, root, min_free_bytes
        self._used: TTLCache[UUID, int] = TTLCache(10_000, MEASURED_SECONDS)
        self._lock = threading.Lock()

    def locate(self, project_id: UUID, path: str) -> Path:
        """Where a file or folder of a project is. Raises MlflowError."""
        return Path(self.folder, project_id.hex, *split_path(path))

    def list_artifacts(self, project_id: UUID, path: str, prefix: str = "") -> list[Document]:
        """The contents of a folder, by name, with `prefix` before each; empty if there is none. Raises MlflowError."""
        folder = self.locate(project_id, path)
        entries = sorted(folder.iterdir(), key=lambda entry: entry.name) if folder.is_dir() else []
        return [
            {"path": prefix + entry.name, "is_dir": entry.is_dir()}
            | ({} if entry.is_dir() else {"file_size": entry.stat().st_size})
            for entry in entries
        ]

    def start_upload(self, project_id: UUID, path: str, quota_bytes: int) -> Upload:
        """Start writing or overwriting a file of a project that may have so many bytes. Raises MlflowError."""
        parts = split_path(path)
        # Files exist only below .../RUN/artifacts/: elsewhere one could take the place of a run's or project's folder.
        at = parts.index("artifacts") if "artifacts" in parts else 0
        if at + 1 >= len(parts) or not (at >= 2 or (at == 1 and is_uuid(parts[0]))):
            raise invalid_parameter(f"Invalid path {path!r:.300}: a file's path is EXPERIMENT/RUN/artifacts/FILE")
        temporary = self.folder / "uploads" / new_id().hex
        with _explaining():
            temporary.parent.mkdir(parents=True, exist_ok=True)
            on_disk = shutil.disk_usage(temporary.parent).free - self.min_free_bytes
        within_quota = quota_bytes - self._measure_project(project_id)
        message = f"the project's artifacts would exceed its quota of {quota_bytes} bytes (artifact_gigabytes)"
        too_large = invalid_parameter(message)
        if on_disk < within_quota:
            message = f"less than {self.min_free_bytes} bytes would remain free on the disk for artifacts"
            too_large = MlflowError(503, "TEMPORARILY_UNAVAILABLE", message)
        return Upload(self.locate(project_id, path), temporary, min(on_disk, within_quota), too_large)

    @cachedmethod(lambda self: self._used, lock=lambda self: self._lock)
    def _measure_project(self, project_id: UUID) -> int:
        """The size of a project's files."""
        return sum(
            max(Path(folder, name).lstat().st_size, MIN_FILE_BYTES)
            for folder, _, names in os.walk(self.folder / project_id.hex)
            for name in names
        )


def split_path(path: str) -> list[str]:
    """The parts of a path, which stays below its folder. Raises MlflowError."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if any(part == ".." or "\\" in part or not part.isprintable() for part in parts):
        raise invalid_parameter("Invalid path")
    return parts


@dataclass
class Upload:
    """An upload in progress: `temporary`, beside the projects' folders, is moved to `target` when it is complete."""

    target: Path
    temporary: Path
    room: int
    too_large: MlflowError
    size: int = 0

    def write(self, chunk: bytes) -> None:
        """Add to the file. What has no room is still read, so that the client sees the answer. Raises MlflowError."""
        self.size += len(chunk)
        if self.size <= self.room:
            with _explaining(), self.temporary.open("ab") as file:
                file.write(chunk)

    def finish(self) -> None:
        """Move the file to its destination. Raises MlflowError."""
        self.write(b"")  # creates an empty file
        if max(self.size, MIN_FILE_BYTES) > self.room:
            raise self.too_large
        with _explaining():
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self.temporary.replace(self.target)


@contextmanager
def _explaining() -> Iterator[None]:
    """Raise MlflowError: a path that no file can have is the client's error, anything else one of the disk."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG):
            message = f"Invalid path: {error.strerror}: a file stands where a folder would, or the reverse"
            raise invalid_parameter(message) from error
        _log.warning("an artifact cannot be stored: %s", error)
        message = f"the file cannot be stored: {error.strerror}"
        raise MlflowError(503, "TEMPORARILY_UNAVAILABLE", message) from error


async def _find_artifacts(request: Request) -> ArtifactFolder:
    artifacts: ArtifactFolder = request.app.state.artifacts
    return artifacts


Artifacts = Annotated[ArtifactFolder, Depends(_find_artifacts)]

router = APIRouter(prefix=PREFIX, route_class=JsonRoute)
tracking_router = APIRouter(prefix=f"{API}/mlflow", route_class=JsonRoute)


@router.get("")
def list_artifacts(caller: ReadOrIngest, artifacts: Artifacts, path: str = "") -> Document:
    """The files and folders in a folder."""
    return {"files": artifacts.list_artifacts(caller.project_id, path)}


@router.get("/{path:path}")
def download_artifact(path: str, caller: ReadOrIngest, artifacts: Artifacts) -> FileResponse:
    """A file."""
    file = artifacts.locate(caller.project_id, path)
    if not file.is_file():
        raise not_found(f"there is no artifact {path!r:.300}")
    return FileResponse(file, media_type="application/octet-stream", filename=file.name)


@router.put("/{path:path}")
async def upload_artifact(path: str, logger: Logger, artifacts: Artifacts, request: Request) -> Document:
    """Store a file as it arrives; one of a checkpoint registers it."""
    upload = await in_thread(_start_upload)(logger, artifacts, path)
    try:
        async for chunk in request.stream():
            await in_thread(upload.write)(chunk)
        await in_thread(upload.finish)()
    finally:
        upload.temporary.unlink(missing_ok=True)
    await in_thread(_register_upload)(logger, path)
    return {}


@tracking_router.get("/artifacts/list")
def list_artifacts_of_run(
    caller: ReadOrIngest, database: Db, root: Root, artifacts: Artifacts, run_id: UUID, path: str = ""
) -> Document:
    """The artifacts of a run that this service stores."""
    with database.reading() as tx:
        uri = load_recorded(tx, [load_run(tx, caller.project_id, run_id)], root)[0].artifact_uri
    folder = path.strip("/")
    stored_at, prefix = f"{uri.removeprefix(SCHEME)}/{folder}", f"{folder}/" if folder else ""
    files = artifacts.list_artifacts(caller.project_id, stored_at, prefix) if uri.startswith(SCHEME) else []
    return {"root_uri": uri, "files": files}


def _start_upload(logger: RunLogger, artifacts: ArtifactFolder, path: str) -> Upload:
    with logger.database.reading() as tx:
        quotas = projects.get_project(tx, logger.project_id).quotas
    return artifacts.start_upload(logger.project_id, path, quotas.artifact_gigabytes * 10**9)


def _register_upload(logger: RunLogger, path: str) -> None:
    match = _OF_RUN.fullmatch("/".join(split_path(path)))
    found = None if match is None else find_checkpoint(match["path"])
    if match is None or found is None:
        return
    with logger.database.reading() as tx:
        run = runs.find_run(tx, logger.project_id, UUID(match["run"]))
    # Epochs are steps only where the metrics have none beyond the epoch.
    if run is not None and not (found.by_epoch and run.last_step is not None and run.last_step > found.step):
        logger.register_checkpoint(run.id, found.step, f"{SCHEME}/{match['root']}/{found.path}")


_NO_RUN = "0" * 32
_MODEL_ID = re.compile(r"m-(\d{1,9})-([0-9a-f]{32})-[0-9a-f]{32}(?:-(\d{1,15}))?")
"""The id of a logged model says all that is needed to answer for it: its experiment, its run (`_NO_RUN` without one),
a part of its own, and its step if its name has one."""
_READY = "LOGGED_MODEL_READY"


def _describe_model(model_id: str, caller: Caller, database: Database, root: str, status: str = _READY) -> Document:
    """What MLflow's clients read of the model with this id, if its experiment exists. Raises MlflowError."""
    match = _MODEL_ID.fullmatch(model_id)
    if match is None:
        raise not_found(f"Logged model with ID '{model_id[:100]}' not found.")
    number, run, step = match.groups()
    with database.reading() as tx:
        experiment = load_experiment(tx, caller.project_id, number, root)
    return {
        "model_id": model_id,
        "experiment_id": number,
        "name": f"step-{step}" if step else model_id,
        "artifact_uri": f"{experiment.artifact_location.rstrip('/')}/models/{model_id}/artifacts",
        "status": status,
        "source_run_id": "" if run == _NO_RUN else run,
    }


@tracking_router.post("/logged-models")
def create_model(body: requests.CreateModel, caller: Ingest, database: Db, root: Root) -> Document:
    """Accept a model, which is not kept."""
    run = UUID(body.source_run_id).hex if is_uuid(body.source_run_id) else _NO_RUN
    named = find_checkpoint(body.name)
    step = "" if named is None else f"-{named.step}"
    model_id = f"m-{body.experiment_id}-{run}-{new_id().hex}{step}"
    info = _describe_model(model_id, caller, database, root, "LOGGED_MODEL_PENDING")
    return {"model": {"info": info | ({"name": body.name} if body.name else {})}}


@tracking_router.post("/logged-models/search")
def search_models(caller: ReadOrIngest) -> Document:
    """No models, as none are kept: MLflow's clients ask whenever they list a folder of a run's artifacts."""
    return {"models": []}


@tracking_router.get("/logged-models/{model_id}")
def get_model(model_id: str, caller: ReadOrIngest, database: Db, root: Root) -> Document:
    """Where the files of a model are."""
    return {"model": {"info": _describe_model(model_id, caller, database, root)}}


@tracking_router.patch("/logged-models/{model_id}")
def finalize_model(model_id: str, body: requests.FinalizeModel, caller: Ingest, logger: Logger, root: Root) -> Document:
    """Register a model that was saved completely as a checkpoint of the step in its name.

    A step that the client sent with it (`runs/outputs`) counts more.
    """
    model = _describe_model(model_id, caller, logger.database, root, body.status)
    named = find_checkpoint(model["name"])
    if body.status == _READY and model["source_run_id"] and named is not None:
        run_id, uri = UUID(model["source_run_id"]), model["artifact_uri"]
        with logger.database.reading() as tx:
            load_run(tx, logger.project_id, run_id)
            known = any(item.uri == uri for item in run_details.list_checkpoints(tx, run_id))
        if not known:
            logger.register_checkpoint(run_id, named.step, uri)
    return {"model": {"info": model}}


@tracking_router.patch("/logged-models/{model_id}/tags")
@tracking_router.post("/logged-models/{model_id}/params")
def accept_change(model_id: str, caller: Ingest) -> Document:
    """Accept a change of a model, which is not kept."""
    return {}


@tracking_router.post("/runs/outputs")
def log_outputs(body: requests.LogOutputs, caller: Ingest, logger: Logger, root: Root) -> Document:
    """Register the models that a run creates at a step (`log_model(step=...)`) as checkpoints."""
    with logger.database.reading() as tx:
        load_run(tx, logger.project_id, body.run_id)
    for output in body.models:
        if output.step and output.step > 0:  # clients send 0 for models without a step
            model = _describe_model(output.model_id, caller, logger.database, root)
            logger.register_checkpoint(body.run_id, output.step, model["artifact_uri"])
    return {}
