"""Secrets that are generated at the first start, by whichever process finishes first."""

from __future__ import annotations

import resource
import stat
from pathlib import Path

import pytest
from evalstop_service.security.private_files import keep_secret


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
