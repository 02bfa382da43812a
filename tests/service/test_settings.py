"""Invalid settings are refused when they are read, with the name of their variable."""

from __future__ import annotations

import pytest
from evalstop_service import cli


@pytest.mark.parametrize(
    ("name", "value"), [("EVALSTOP_DELIVERY_LEASE_SECONDS", "10"), ("EVALSTOP_DELIVERY_LONGEST_PAUSE_SECONDS", "0.5")]
)
def test_contradicting_settings_of_deliveries_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    """A lease no longer than the timeout, with which two workers could send the same delivery, and a longest pause
    shorter than the first: before a worker starts."""
    monkeypatch.setenv(name, value)
    assert cli.main(["deliver", "--database-url", "sqlite:///never-opened.db"]) == cli.USAGE
    assert f"{name}: " in capsys.readouterr().err


def test_unsupported_database_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the variable and the supported URL forms."""
    monkeypatch.setenv("EVALSTOP_DATABASE_URL", "mysql://db/evalstop")
    assert cli.main(["migrate"]) == cli.USAGE
    errors = capsys.readouterr().err
    assert "EVALSTOP_DATABASE_URL: " in errors
    assert "postgresql://" in errors
