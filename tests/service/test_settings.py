"""Settings that cannot work are refused where they are read, by the name under which they were set."""

from __future__ import annotations

import pytest
from evalstop_service import cli


def test_a_lease_that_an_attempt_can_outlive_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a lease no longer than the timeout two workers would send the same delivery: no command starts like that."""
    monkeypatch.setenv("EVALSTOP_DELIVERY_LEASE_SECONDS", "10")
    assert cli.main(["deliver", "--database-url", "sqlite:///never-opened.db"]) == cli.USAGE
    assert "EVALSTOP_DELIVERY_LEASE_SECONDS: " in capsys.readouterr().err


def test_a_database_of_another_kind_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A database that cannot be used is named with the forms that can be."""
    monkeypatch.setenv("EVALSTOP_DATABASE_URL", "mysql://db/evalstop")
    assert cli.main(["migrate"]) == cli.USAGE
    said = capsys.readouterr().err
    assert "EVALSTOP_DATABASE_URL: " in said
    assert "postgresql://" in said
