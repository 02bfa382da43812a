"""Artifacts of MLflow's clients: stored in a folder per project, with limits that fail no job."""

from __future__ import annotations

import uuid
from pathlib import Path

import httpx
import pytest
from evalstop_service.web.mlflow import artifact_folder
from evalstop_service.web.mlflow.artifact_folder import Artifact, ArtifactFolder
from evalstop_service.web.mlflow.errors import MlflowError

from tests.fixtures.certificates import get_ssl_context
from tests.service.web.api.conftest import Service

PROJECT = uuid.UUID(int=1)


@pytest.fixture
def folder(tmp_path: Path) -> ArtifactFolder:
    return ArtifactFolder(tmp_path / "artifacts", "mlflow-artifacts:/", max_bytes=100)


def upload(folder: ArtifactFolder, path: str, *chunks: bytes) -> bool:
    new_upload = folder.start_upload(PROJECT, path)
    for chunk in chunks:
        new_upload.write(chunk)
    return new_upload.finish()


def test_uploaded_file_is_listed_and_found(folder: ArtifactFolder) -> None:
    """A second upload replaces the file; other projects do not see it."""
    assert upload(folder, "1/run/artifacts/model/weights.bin", b"first", b"part")
    assert upload(folder, "1/run/artifacts/model/weights.bin", b"second")
    assert upload(folder, "1/run/artifacts/empty")
    assert folder.list_artifacts(PROJECT, "1/run/artifacts/.") == [
        Artifact("empty", False, 0),
        Artifact("model", True, None),
    ]
    file = folder.find_file(PROJECT, "/1/run/artifacts/model/weights.bin")
    assert file is not None
    assert file.read_bytes() == b"second"
    assert folder.list_artifacts(uuid.UUID(int=2), "1/run/artifacts") == []


@pytest.mark.parametrize("path", ["..", "../x", "a/../../x", "a\\..\\x", "a\x00", "..\\x", "a/..", "a\nb"])
def test_path_out_of_the_folder_is_refused(folder: ArtifactFolder, path: str) -> None:
    """A path that leaves the project's folder, or could on another system, is refused."""
    for operation in (folder.list_artifacts, folder.find_file, folder.start_upload):
        with pytest.raises(MlflowError, match="Invalid path"):
            operation(PROJECT, path)


def test_file_that_cannot_be_stored_is_dropped_with_a_warning(
    folder: ArtifactFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that is too large, or whose folder is a file, leaves nothing behind."""
    assert not upload(folder, "large", b"x" * 60, b"x" * 60, b"x")
    assert upload(folder, "a", b"x")
    assert not upload(folder, "a/b", b"x")
    assert [item.name for item in folder.list_artifacts(PROJECT, "")] == ["a"]
    assert list((folder.folder / "uploads").iterdir()) == []
    assert "larger than 100 bytes" in caplog.text


def test_upload_is_dropped_when_the_disk_is_nearly_full(
    folder: ArtifactFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The minimum of free space stays free."""
    monkeypatch.setattr(artifact_folder, "MIN_FREE_BYTES", 1 << 60)
    assert not upload(folder, "a", b"x")
    assert folder.find_file(PROJECT, "a") is None


def test_artifacts_are_accessible_with_keys_of_the_project_only(service: Service) -> None:
    """Files over the size limit of other bodies are uploaded and downloaded over HTTP."""
    root = f"{service.url}/mlflow/api/2.0/mlflow-artifacts/artifacts"
    project = service.create_project()
    ingest, read, other = (
        service.create_key(project, "ingest"),
        service.create_key(project, "read"),
        service.create_key(service.create_project()),
    )
    content = b"0123456789abcdef" * 640 * 1024  # 10 MiB

    def send_request(method: str, path: str, key: str, **options: object) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.request(method, f"{root}{path}", headers=headers, timeout=60, trust_env=False, **options)  # type: ignore[arg-type]

    assert send_request("PUT", "/0/a/artifacts/weights.bin", ingest, content=content).status_code == 200
    assert send_request("PUT", "/0/a/artifacts/weights.bin", read, content=b"x").status_code == 403
    assert (
        httpx.put(f"{root}/0/a", content=b"x", trust_env=False, verify=get_ssl_context(), timeout=60).status_code == 401
    )
    files = send_request("GET", "?path=0/a/artifacts", read).json()["files"]
    assert files == [{"path": "weights.bin", "is_dir": False, "file_size": len(content)}]
    assert send_request("GET", "/0/a/artifacts/weights.bin", ingest).content == content
    assert send_request("GET", "/0/a/artifacts/weights.bin", other).status_code == 404
    for path in ("/..%2f..%2fx", "/a/%2e%2e/%2e%2e/x", "/%2e%2e%5cx"):
        assert send_request("PUT", path, ingest, content=b"x").status_code == 400
        assert send_request("GET", path, ingest).status_code == 400


def test_printed_run_links_are_redirected_by_a_page(service: Service) -> None:
    """`/mlflow/#/experiments/0/runs/ID`, which clients print, is a page with a script that its policy allows."""
    response = httpx.get(f"{service.url}/mlflow/", trust_env=False, verify=get_ssl_context(), timeout=60)
    assert response.status_code == 200
    assert "location.hash" in response.text
    assert "script-src 'sha256-" in response.headers["Content-Security-Policy"]
