"""Invalid settings are refused when they are read, with the name of their variable."""

from __future__ import annotations

import pytest
from evalstop_service import cli


def test_lease_shorter_than_the_timeout_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a lease no longer than the timeout, two workers could send the same delivery."""
    monkeypatch.setenv("EVALSTOP_DELIVERY_LEASE_SECONDS", "10")
    assert cli.main(["deliver", "--database-url", "sqlite:///never-opened.db"]) == cli.USAGE
    assert "EVALSTOP_DELIVERY_LEASE_SECONDS: " in capsys.readouterr().err


def test_first_pause_longer_than_the_longest_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the variable, before a worker starts."""
    monkeypatch.setenv("EVALSTOP_DELIVERY_LONGEST_PAUSE_SECONDS", "0.5")
    assert cli.main(["deliver", "--database-url", "sqlite:///never-opened.db"]) == cli.USAGE
    assert "EVALSTOP_DELIVERY_LONGEST_PAUSE_SECONDS: " in capsys.readouterr().err


def test_unsupported_database_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the variable and the supported URL forms."""
    monkeypatch.setenv("EVALSTOP_DATABASE_URL", "mysql://db/evalstop")
    assert cli.main(["migrate"]) == cli.USAGE
    errors = capsys.readouterr().err
    assert "EVALSTOP_DATABASE_URL: " in errors
    assert "postgresql://" in errors
