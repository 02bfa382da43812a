"""Invalid settings are refused when they are read, with the name of their variable."""

from __future__ import annotations

import pytest
from evalstop_service import cli


@pytest.mark.parametrize("value", ["inf", "nan", "0", "1e9"])
@pytest.mark.parametrize("name", ["EVALSTOP_DELIVERY_TIMEOUT_SECONDS", "EVALSTOP_DELIVERY_LONGEST_PAUSE_SECONDS"])
def test_times_without_end_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    """A time is a number of seconds above 0 and at most a year."""
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
