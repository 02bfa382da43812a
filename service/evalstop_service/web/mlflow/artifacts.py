"""Routes of artifacts that this service stores: upload, download, list; clients write directly to other stores."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import FileResponse
from starlette.requests import ClientDisconnect

from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.web.limits import in_thread
from evalstop_service.web.mlflow.artifact_folder import ArtifactFolder
from evalstop_service.web.mlflow.authentication import Ingest, MlflowRoute, ReadOrIngest
from evalstop_service.web.mlflow.errors import not_found
from evalstop_service.web.mlflow.requests import Document

PREFIX = "/mlflow-artifacts/artifacts"

router = APIRouter(prefix=PREFIX, route_class=MlflowRoute)


async def _find_artifacts(request: Request) -> ArtifactFolder:
    artifacts: ArtifactFolder = request.app.state.artifacts
    return artifacts


Artifacts = Annotated[ArtifactFolder, Depends(_find_artifacts)]


@router.get("")
def list_artifacts(caller: ReadOrIngest, artifacts: Artifacts, path: str = "") -> Document:
    """The files and folders in a folder."""
    return {"files": file_documents(artifacts, caller, path)}


@router.get("/{path:path}")
def download_artifact(path: str, caller: ReadOrIngest, artifacts: Artifacts) -> FileResponse:
    """A file."""
    file = artifacts.find_file(caller.project_id, path)
    if file is None:
        raise not_found(f"there is no artifact {path!r:.300}")
    return FileResponse(file, media_type="application/octet-stream", filename=file.name)


@router.put("/{path:path}")
async def upload_artifact(path: str, caller: Ingest, artifacts: Artifacts, request: Request) -> Document:
    """Store a file as it arrives; one that cannot be stored is dropped, counted and logged."""
    upload = artifacts.start_upload(caller.project_id, path)
    try:
        async for chunk in request.stream():
            await in_thread(upload.write)(chunk)
        stored = await in_thread(upload.finish)()
    except ClientDisconnect:
        upload.abandon()
        raise
    if not stored:
        service_metrics: ServiceMetrics = request.app.state.service_metrics
        service_metrics.mlflow_left_out.labels("artifact").inc()
    return {}


def file_documents(artifacts: ArtifactFolder, caller: ReadOrIngest, folder: str, prefix: str = "") -> list[Document]:
    """The contents of a folder, in MLflow's format; `prefix` precedes each name."""
    return [
        {"path": prefix + item.name, "is_dir": item.is_folder}
        | ({} if item.size_bytes is None else {"file_size": item.size_bytes})
        for item in artifacts.list_artifacts(caller.project_id, folder)
    ]
