"""Nobody else on the machine reads the embedded database, and a copy of it gives no webhook secret away."""

from __future__ import annotations

import sqlite3
import stat
from pathlib import Path

import httpx
import pytest
from evalstop_service.settings import Settings
from pydantic import ValidationError

from tests.acceptance.programs import Program


def read_modes(folder: Path) -> dict[str, int]:
    """The permissions of a folder and of all that is in it, by name."""
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}


@pytest.mark.real
def test_the_embedded_database_is_its_owner_s_alone(tmp_path: Path) -> None:
    """The folder that `up` makes is 0700, all files in it 0600, those of a backup that was put there included; what a
    copy of the database holds of a webhook's secret opens with the key beside it alone."""
    folder = tmp_path / "data"
    key = ""
    service = Program(tmp_path / "log", "up", "--port", "0", "--json", EVALSTOP_DATA_FOLDER=str(folder))
    for start in range(2):
        ready = service.start_server()
        key = ready["key"] or key  # shown once
        headers = {"Authorization": f"Bearer {key}"}
        with httpx.Client(base_url=ready["url"], headers=headers, trust_env=False) as client:
            body = {"url": "http://127.0.0.1:9/", "event_types": ["run.stopped"]}
            secret = client.post("/api/v1/endpoints", json=body).raise_for_status().json()["secret"]
            tested = client.get("/api/v1/endpoints").raise_for_status().json()
            assert len(tested["items"]) == 1 + start
        modes = read_modes(folder)
        assert {"evalstop.db", "session.secret", "encryption.key"} < set(modes)
        assert modes.pop("data") == 0o700
        assert set(modes.values()) == {0o600}, modes
        service.terminate()
        service.wait(60)
        with sqlite3.connect(folder / "evalstop.db") as copy:
            kept = [row[0] for row in copy.execute("SELECT secret FROM endpoints")]
        assert all(one.startswith("encrypted:") and secret not in one for one in kept)
        (folder / "evalstop.db").chmod(0o644)


@pytest.mark.parametrize("secret", ["", "secret", "x" * 31])
def test_a_short_session_secret_is_refused(secret: str) -> None:
    """Sessions are signed with 32 characters at least: a short secret could be guessed from any cookie."""
    with pytest.raises(ValidationError, match="32"):
        Settings(session_secret=secret)
