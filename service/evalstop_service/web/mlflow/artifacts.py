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
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple
from uuid import UUID

from cachetools import TTLCache
from fastapi import APIRouter, Depends, Request
from fastapi.responses import FileResponse
from starlette.requests import ClientDisconnect

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
        self._lock = threading.Lock()
        self._used: TTLCache[UUID, int] = TTLCache(10_000, MEASURED_SECONDS)

    def list_artifacts(self, project_id: UUID, path: str, prefix: str = "") -> list[Document]:
        """The contents of a folder, by name, with `prefix` before each; empty if there is none. Raises MlflowError."""
        folder = Path(self.folder, project_id.hex, *split_path(path))
        entries = sorted(folder.iterdir(), key=lambda entry: entry.name) if folder.is_dir() else []
        return [
            {"path": prefix + entry.name, "is_dir": entry.is_dir()}
            | ({} if entry.is_dir() else {"file_size": entry.stat().st_size})
            for entry in entries
        ]

    def find_file(self, project_id: UUID, path: str) -> Path | None:
        """Find a file; None if there is none. Raises MlflowError."""
        file = Path(self.folder, project_id.hex, *split_path(path))
        return file if file.is_file() else None

    def start_upload(self, project_id: UUID, path: str, quota_bytes: int) -> Upload:
        """Start writing or overwriting a file of a project that may have so many bytes. Raises MlflowError."""
        parts = split_path(path)
        # Files exist only below .../RUN/artifacts/: elsewhere one could take the place of a run's or project's folder.
        at = parts.index("artifacts") if "artifacts" in parts else 0
        if at + 1 >= len(parts) or not (at >= 2 or (at == 1 and is_uuid(parts[0]))):
            raise invalid_parameter(f"Invalid path {path!r:.300}: a file's path is EXPERIMENT/RUN/artifacts/FILE")
        room = quota_bytes - self._measure_project(project_id)
        return Upload(self, Path(self.folder, project_id.hex, *parts), room, quota_bytes)

    def _measure_project(self, project_id: UUID) -> int:
        """The size of a project's files."""
        with self._lock:
            used = self._used.get(project_id)
        if used is None:
            used = sum(
                max(Path(folder, name).lstat().st_size, MIN_FILE_BYTES)
                for folder, _, names in os.walk(self.folder / project_id.hex)
                for name in names
            )
            with self._lock:
                self._used[project_id] = used
        return used


def split_path(path: str) -> list[str]:
    """The parts of a path, which stays below its folder. Raises MlflowError."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if any(part == ".." or "\\" in part or not part.isprintable() for part in parts):
        raise invalid_parameter("Invalid path")
    return parts


class Upload:
    """An upload in progress. The file is written beside the projects' folders and moved when it is complete."""

    def __init__(self, artifacts: ArtifactFolder, target: Path, room: int, quota_bytes: int) -> None:
        self._artifacts, self._target, self._room, self._quota_bytes = artifacts, target, room, quota_bytes
        self._temporary = artifacts.folder / "uploads" / new_id().hex
        self._file: BinaryIO | None = None
        self._size = 0
        self._failure: MlflowError | None = None

    def write(self, chunk: bytes) -> None:
        """Add to the file, unless it failed before: the rest is still read, so that the client sees the answer."""
        if self._failure is not None:
            return
        try:
            if self._file is None:
                self._temporary.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._temporary.open("wb")
            self._size += len(chunk)
            least_free = self._artifacts.min_free_bytes
            if shutil.disk_usage(self._temporary.parent).free - len(chunk) < least_free:
                message = f"less than {least_free} bytes would remain free on the disk for artifacts"
                self._fail(MlflowError(503, "TEMPORARILY_UNAVAILABLE", message))
            elif max(self._size, MIN_FILE_BYTES) > self._room:
                message = f"the project's artifacts would exceed its quota of {self._quota_bytes} bytes"
                self._fail(invalid_parameter(f"{message} (artifact_gigabytes)"))
            else:
                self._file.write(chunk)
        except OSError as error:
            self._fail(_explain(error))

    def finish(self) -> None:
        """Move the file to its destination. Raises MlflowError if it could not be stored."""
        self.write(b"")  # creates the file even if it is empty
        if self._failure is None:
            try:
                self._close_file()
                self._target.parent.mkdir(parents=True, exist_ok=True)
                self._temporary.replace(self._target)
            except OSError as error:
                self._fail(_explain(error))
        if self._failure is not None:
            _log.warning("the artifact %s is not stored: %s", self._target, self._failure)
            raise self._failure

    def abandon(self) -> None:
        """Discard what arrived when the client has disconnected."""
        self._close_file()
        self._temporary.unlink(missing_ok=True)

    def _fail(self, failure: MlflowError) -> None:
        self._failure = failure
        self.abandon()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()


def _explain(error: OSError) -> MlflowError:
    """A path that no file can have is the client's error, anything else one of the disk."""
    if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG):
        return invalid_parameter(f"Invalid path: {error.strerror}: a file stands where a folder would, or the reverse")
    return MlflowError(503, "TEMPORARILY_UNAVAILABLE", f"the file cannot be stored: {error.strerror}")


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
    file = artifacts.find_file(caller.project_id, path)
    if file is None:
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
    except ClientDisconnect:
        upload.abandon()
        raise
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


class _Model(NamedTuple):
    """A logged model; MLflow's clients read `info`."""

    run_id: UUID
    step: int | None
    info: Document

    @property
    def uri(self) -> str:
        """Where the client stores its files."""
        return str(self.info["artifact_uri"])


def _find_model(model_id: str, caller: Caller, database: Database, root: str, status: str = _READY) -> _Model:
    """The model with this id, if its experiment exists. Raises MlflowError."""
    match = _MODEL_ID.fullmatch(model_id)
    if match is None:
        raise not_found(f"Logged model with ID '{model_id[:100]}' not found.")
    number, run, step = match.groups()
    with database.reading() as tx:
        experiment = load_experiment(tx, caller.project_id, number, root)
    info: Document = {
        "model_id": model_id,
        "experiment_id": number,
        "name": f"step-{step}" if step else model_id,
        "artifact_uri": f"{experiment.artifact_location.rstrip('/')}/models/{model_id}/artifacts",
        "status": status,
        "source_run_id": "" if run == _NO_RUN else run,
    }
    return _Model(UUID(run), int(step) if step else None, info)


@tracking_router.post("/logged-models")
def create_model(body: requests.CreateModel, caller: Ingest, database: Db, root: Root) -> Document:
    """Accept a model, which is not kept."""
    run = UUID(body.source_run_id).hex if is_uuid(body.source_run_id) else _NO_RUN
    named = find_checkpoint(body.name)
    step = "" if named is None else f"-{named.step}"
    model_id = f"m-{body.experiment_id}-{run}-{new_id().hex}{step}"
    info = _find_model(model_id, caller, database, root, "LOGGED_MODEL_PENDING").info
    return {"model": {"info": info | ({"name": body.name} if body.name else {})}}


@tracking_router.post("/logged-models/search")
def search_models(caller: ReadOrIngest) -> Document:
    """No models, as none are kept: MLflow's clients ask whenever they list a folder of a run's artifacts."""
    return {"models": []}


@tracking_router.get("/logged-models/{model_id}")
def get_model(model_id: str, caller: ReadOrIngest, database: Db, root: Root) -> Document:
    """Where the files of a model are."""
    return {"model": {"info": _find_model(model_id, caller, database, root).info}}


@tracking_router.patch("/logged-models/{model_id}")
def finalize_model(model_id: str, body: requests.FinalizeModel, caller: Ingest, logger: Logger, root: Root) -> Document:
    """Register a model that was saved completely as a checkpoint of the step in its name.

    A step that the client sent with it (`runs/outputs`) counts more.
    """
    model = _find_model(model_id, caller, logger.database, root, body.status)
    if body.status == _READY and model.info["source_run_id"] and model.step is not None:
        with logger.database.reading() as tx:
            load_run(tx, logger.project_id, model.run_id)
            known = any(item.uri == model.uri for item in run_details.list_checkpoints(tx, model.run_id))
        if not known:
            logger.register_checkpoint(model.run_id, model.step, model.uri)
    return {"model": {"info": model.info}}


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
            model = _find_model(output.model_id, caller, logger.database, root)
            logger.register_checkpoint(body.run_id, output.step, model.uri)
    return {}
