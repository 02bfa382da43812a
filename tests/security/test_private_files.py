"""File permissions of the SQLite database and its keys, secrets of the first start, and encrypted webhook secrets."""

from __future__ import annotations

import resource
import sqlite3
import stat
from pathlib import Path

import httpx
import pytest
from evalstop_service.security.private_files import keep_secret
from evalstop_service.settings import Settings
from pydantic import ValidationError

from tests.acceptance.programs import Program


def read_modes(folder: Path) -> dict[str, int]:
    """The permissions of a folder and of all files in it, by name."""
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}


@pytest.mark.real
def test_sqlite_files_are_private_and_secrets_encrypted(tmp_path: Path) -> None:
    """`up` creates a folder with mode 0700 and files with 0600, also for a restored copy, and encrypts webhook
    secrets."""
    folder = tmp_path / "data"
    key = ""
    service = Program(tmp_path / "log", "up", "--port", "0", "--json", EVALSTOP_DATA_FOLDER=str(folder))
    for start in range(2):
        ready = service.start_server()
        key = ready["key"] or key  # shown once
        headers = {"Authorization": f"Bearer {key}"}
        with httpx.Client(base_url=ready["url"], headers=headers, trust_env=False, timeout=60) as client:
            body = {"url": f"http://127.0.0.1:9/{start}", "event_types": ["run.stopped"]}
            secret = client.post("/api/v1/endpoints", json=body).raise_for_status().json()["secret"]
            listed = client.get("/api/v1/endpoints").raise_for_status().json()
            assert len(listed["items"]) == 1 + start
        modes = read_modes(folder)
        assert {"evalstop.db", "session.secret", "encryption.key"} < set(modes)
        assert modes.pop("data") == 0o700
        assert set(modes.values()) == {0o600}, modes
        service.terminate()
        service.wait(60)
        with sqlite3.connect(folder / "evalstop.db") as copy:
            stored_secrets = [row[0] for row in copy.execute("SELECT secret FROM endpoints")]
        assert all(
            stored_secret.startswith("encrypted:") and secret not in stored_secret for stored_secret in stored_secrets
        )
        (folder / "evalstop.db").chmod(0o644)


@pytest.mark.parametrize("secret", ["", "secret", "x" * 31])
def test_short_session_secret_is_refused(secret: str) -> None:
    """Sessions are signed with at least 32 characters, as a short secret could be guessed from a cookie."""
    with pytest.raises(ValidationError, match="32"):
        Settings(session_secret=secret)


def test_a_secret_is_generated_once(tmp_path: Path) -> None:
    """A secret stays the same, only its owner can read it, and nothing else remains in the folder."""
    file = tmp_path / "secret"
    assert keep_secret(file, lambda: "first") == "first"
    assert keep_secret(file, lambda: "second") == "first"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_processes_that_start_together_share_a_secret(tmp_path: Path) -> None:
    """A process that generates a secret while another one does takes the secret that was there first."""
    file = tmp_path / "secret"

    def generate() -> str:
        assert not file.exists()
        assert keep_secret(file, lambda: "of the other process") == "of the other process"
        return "own"

    assert keep_secret(file, generate) == "of the other process"


@pytest.mark.filterwarnings("ignore:Exception ignored while calling deallocator")  # Python 3.14: not closed by itself
def test_an_interrupted_start_leaves_no_empty_secret(tmp_path: Path) -> None:
    """A start that ends before the secret is written leaves no file, so that the next start generates the secret."""
    file = tmp_path / "secret"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            keep_secret(file, lambda: "never written")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    assert keep_secret(file, lambda: "of the next start") == "of the next start"
