"""Artifacts of MLflow's clients: stored in a folder per project, within limits; some are checkpoints."""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest
from evalstop_service.web.mlflow.artifacts import ArtifactFolder
from evalstop_service.web.mlflow.protocol import MlflowError
from evalstop_service.web.mlflow.run_logger import Checkpoint, find_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.certificates import get_ssl_context
from tests.service.web.api.conftest import Service
from tests.service.web.mlflow.conftest import MlflowClient, expect_error, expect_json

PROJECT = uuid.UUID(int=1)
ARTIFACTS = "1/run/artifacts"


@pytest.fixture
def folder(tmp_path: Path) -> ArtifactFolder:
    return ArtifactFolder(tmp_path / "artifacts", "mlflow-artifacts:/")


def upload(folder: ArtifactFolder, path: str, *chunks: bytes, quota_bytes: int = 10**9) -> None:
    new_upload = folder.start_upload(PROJECT, path, quota_bytes)
    try:
        for chunk in chunks:
            new_upload.write(chunk)
        new_upload.finish()
    finally:
        new_upload.temporary.unlink(missing_ok=True)


def test_uploaded_file_is_listed_and_found(folder: ArtifactFolder) -> None:
    """A second upload replaces the file; other projects do not see it."""
    upload(folder, f"{ARTIFACTS}/model/weights.bin", b"first", b"part")
    upload(folder, f"{ARTIFACTS}/model/weights.bin", b"second")
    upload(folder, f"{ARTIFACTS}/empty")
    assert folder.list_artifacts(PROJECT, f"{ARTIFACTS}/.") == [
        {"path": "empty", "is_dir": False, "file_size": 0},
        {"path": "model", "is_dir": True},
    ]
    assert folder.locate(PROJECT, f"/{ARTIFACTS}/model/weights.bin").read_bytes() == b"second"
    assert folder.list_artifacts(uuid.UUID(int=2), ARTIFACTS) == []


@pytest.mark.parametrize("path", ["..", "../x", "a/../../x", "a\\..\\x", "a\x00", "..\\x", "a/..", "a\nb"])
def test_path_out_of_the_folder_is_refused(folder: ArtifactFolder, path: str) -> None:
    """A path that leaves the project's folder, or could on another system, is refused."""
    with pytest.raises(MlflowError, match="Invalid path"):
        folder.start_upload(PROJECT, path, 10**9)
    for operation in (folder.list_artifacts, folder.locate):
        with pytest.raises(MlflowError, match="Invalid path"):
            operation(PROJECT, path)


@given(st.lists(st.sampled_from(["", ".", "7", "run", "artifacts", "models", "0" * 32]), max_size=5))
def test_no_file_takes_the_place_of_a_folder(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    """Whatever is uploaded first, the artifacts of any experiment and run can be uploaded afterwards."""
    folder = ArtifactFolder(tmp_path_factory.mktemp("artifacts"), "mlflow-artifacts:/")
    with contextlib.suppress(MlflowError):
        upload(folder, "/".join(parts), b"x")
    for path in ("7/run/artifacts/model.bin", "7/" + "0" * 32 + "/artifacts/model.bin", "0/models/m-1/artifacts/x"):
        upload(folder, path, b"x")


def test_file_that_cannot_be_stored_is_an_error(folder: ArtifactFolder) -> None:
    """A file over the quota, or whose folder is a file, leaves nothing behind."""
    with pytest.raises(MlflowError, match="quota of 10000 bytes"):
        upload(folder, f"{ARTIFACTS}/large", b"x" * 6000, b"x" * 6000, b"x", quota_bytes=10_000)
    upload(folder, f"{ARTIFACTS}/a", b"x")
    with pytest.raises(MlflowError, match="a file stands where a folder would"):
        upload(folder, f"{ARTIFACTS}/a/b", b"x")
    assert [item["path"] for item in folder.list_artifacts(PROJECT, ARTIFACTS)] == ["a"]
    assert list((folder.folder / "uploads").iterdir()) == []


def test_files_of_another_process_count_towards_the_quota(folder: ArtifactFolder) -> None:
    """What lies in the folder is measured, not what this process stored; a small file counts for 4 KiB."""
    upload(folder, f"{ARTIFACTS}/a", b"x")
    again = ArtifactFolder(folder.folder, folder.root)
    upload(again, f"{ARTIFACTS}/b", b"x", quota_bytes=8192)
    again = ArtifactFolder(folder.folder, folder.root)
    with pytest.raises(MlflowError, match="quota"):
        upload(again, f"{ARTIFACTS}/c", b"x", quota_bytes=12_000)


def test_upload_waits_for_room_on_a_full_disk(tmp_path: Path) -> None:
    """The minimum of free space stays free; clients retry meanwhile."""
    folder = ArtifactFolder(tmp_path, "mlflow-artifacts:/", min_free_bytes=1 << 60)
    with pytest.raises(MlflowError, match="would remain free") as refusal:
        upload(folder, f"{ARTIFACTS}/a", b"x")
    assert refusal.value.status == 503
    assert not folder.locate(PROJECT, f"{ARTIFACTS}/a").exists()


@pytest.mark.parametrize(
    ("path", "checkpoint"),
    [
        ("checkpoint-500/model.safetensors", (500, "checkpoint-500")),
        ("model/checkpoints/epoch=2-step=300/epoch=2-step=300.ckpt", (299, "model/checkpoints/epoch=2-step=300")),
        ("epoch=2-val_loss=0.51-step=0300.ckpt", (299, "epoch=2-val_loss=0.51-step=0300.ckpt")),
        ("checkpoints/global_step_40/checkpoint.pth", (40, "checkpoints/global_step_40")),
        ("checkpoints/epoch_3/checkpoint.pth", (3, "checkpoints/epoch_3", True)),
        ("step-7.pt", (7, "step-7.pt")),
        ("step_7/weights/0.bin", (7, "step_7")),
        ("out/Checkpoint_8/optimizer/step-3.bin", (8, "out/Checkpoint_8")),
        ("checkpoint-9/trainer_state.json", (9, "checkpoint-9")),
        ("ckpt-1.index", (1, "ckpt-1.index")),
        ("checkpoint-500", (500, "checkpoint-500")),
        ("step-500/samples.json", None),
        ("step-500.png", None),
        ("checkpoint-500.json", None),
        ("plots/footstep-5.bin", None),
        ("checkpoint/weights.bin", None),
        ("latest_checkpoint.pth", None),
        ("checkpoint-" + "9" * 16, None),
        ("", None),
    ],
)
def test_artifact_named_after_a_step_is_its_checkpoint(path: str, checkpoint: tuple[Any, ...] | None) -> None:
    """Folders and files named as by transformers, Lightning and autologging are checkpoints; notes are not."""
    assert find_checkpoint(path) == (checkpoint if checkpoint is None else Checkpoint(*checkpoint))


def put(client: MlflowClient, path: str, content: bytes = b"x") -> httpx.Response:
    return client.http.put(f"../mlflow-artifacts/artifacts/{path}", content=content)


def list_checkpoints(client: MlflowClient, run_id: str) -> dict[int, str]:
    items = expect_json(client.api.get(f"/runs/{run_id}/checkpoints"))["items"]
    return {item["step"]: item["uri"] for item in items}


def log_model(client: MlflowClient, run_id: str, name: str, step: int | None, status: str) -> str:
    """Log a model as MLflow 3 does; returns the URI of its files."""
    body: dict[str, Any] = {"experiment_id": "0", "name": name, "source_run_id": run_id}
    model = client.post("logged-models", body)["model"]["info"]
    if step is not None:
        client.post("runs/outputs", {"run_id": run_id, "models": [{"model_id": model["model_id"], "step": str(step)}]})
    expect_json(client.http.patch(f"logged-models/{model['model_id']}", json={"status": status}))
    uri: str = model["artifact_uri"]
    return uri


def test_artifacts_and_models_named_after_a_step_are_checkpoints(client: MlflowClient) -> None:
    """Uploaded files, models of MLflow 3, by name or by step; the step that a client sends counts most."""
    run_id = client.create_run()
    root = f"mlflow-artifacts:/0/{run_id}/artifacts"
    for path in ("checkpoint-1/model.bin", "checkpoint-1/config.json", "step-2.pt", "notes.txt", "step-3/a.png"):
        assert put(client, f"0/{run_id}/artifacts/{path}").status_code == 200
    client.post("runs/log-metric", {"run_id": run_id, "key": "eval_accuracy", "value": 1, "step": 3, "timestamp": 1})
    for epoch in (2, 3):  # the metrics of a run at step 3 do not count epochs, if the second epoch ends now
        put(client, f"0/{run_id}/artifacts/checkpoints/epoch_{epoch}/checkpoint.pth")
    named = log_model(client, run_id, "checkpoint-5", 0, "LOGGED_MODEL_READY")
    stepped = log_model(client, run_id, "policy", 6, "LOGGED_MODEL_READY")
    both = log_model(client, run_id, "checkpoint-1000", 7, "LOGGED_MODEL_READY")
    only_named = log_model(client, run_id, "step-8", None, "LOGGED_MODEL_READY")
    log_model(client, run_id, "checkpoint-9", 0, "LOGGED_MODEL_UPLOAD_FAILED")
    log_model(client, run_id, "policy", 0, "LOGGED_MODEL_READY")
    put(client, f"0/{'1' * 32}/artifacts/checkpoint-1/model.bin")  # of no run
    assert list_checkpoints(client, run_id) == {
        **{
            1: f"{root}/checkpoint-1",
            2: f"{root}/step-2.pt",
            3: f"{root}/checkpoints/epoch_3",
        },
        **{5: named, 6: stepped, 7: both, 8: only_named},
    }


@pytest.mark.parametrize("path", ["", "./", "%2e", "//", "7", "7/", "7/run", "7/run/artifacts", "7/run/artifacts/%2e"])
def test_artifact_without_a_place_is_refused(client: MlflowClient, path: str) -> None:
    """An empty path, or a file where a folder of the project, an experiment or a run belongs, disturbs nobody."""
    expect_error(put(client, path), 400, "INVALID_PARAMETER_VALUE")
    assert put(client, "7/run/artifacts/model.bin").status_code == 200


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
    upload_below_a_file = send_request("PUT", "/0/a/artifacts/weights.bin/x", ingest, content=b"x")
    expect_error(upload_below_a_file, 400, "INVALID_PARAMETER_VALUE")
    for path in ("/..%2f..%2fx", "/a/%2e%2e/%2e%2e/x", "/%2e%2e%5cx"):
        assert send_request("PUT", path, ingest, content=b"x").status_code == 400
        assert send_request("GET", path, ingest).status_code == 400


def test_printed_run_links_are_redirected_to_the_pages(service: Service) -> None:
    """`/mlflow/#/experiments/0/runs/ID`, which clients print, leads to the pages; browsers keep its end."""
    response = httpx.get(f"{service.url}/mlflow/", trust_env=False, verify=get_ssl_context(), timeout=60)
    assert (response.status_code, response.headers["Location"]) == (307, "/runs")
