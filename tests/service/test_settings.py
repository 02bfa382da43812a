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


@pytest.mark.parametrize("value", ["inf", "nan", "0", "1e9"])
@pytest.mark.parametrize("name", ["EVALSTOP_DELIVERY_TIMEOUT_SECONDS", "EVALSTOP_DELIVERY_LEASE_SECONDS"])
def test_times_without_end_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    """A time is a number of seconds above 0 and at most a year."""
    monkeypatch.setenv(name, value)
    assert cli.main(["deliver", "--database-url", "sqlite:///never-opened.db"]) == cli.USAGE
    assert f"{name}: " in capsys.readouterr().err


def test_port_without_keys_is_refused_where_metrics_need_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Metrics that need a key are not served without one on another port."""
    monkeypatch.setenv("EVALSTOP_METRICS_PUBLIC", "false")
    monkeypatch.setenv("EVALSTOP_METRICS_PORT", "9000")
    assert cli.main(["deliver", "--database-url", "sqlite:///never-opened.db"]) == cli.USAGE
    assert "EVALSTOP_METRICS_PORT: " in capsys.readouterr().err


def test_key_is_not_cached_for_ever(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A revoked key would never stop working elsewhere."""
    monkeypatch.setenv("EVALSTOP_KEY_CACHE_SECONDS", "inf")
    assert cli.main(["deliver", "--database-url", "sqlite:///never-opened.db"]) == cli.USAGE
    assert "EVALSTOP_KEY_CACHE_SECONDS: " in capsys.readouterr().err


def test_unsupported_database_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the variable and the supported URL forms."""
    monkeypatch.setenv("EVALSTOP_DATABASE_URL", "mysql://db/evalstop")
    assert cli.main(["migrate"]) == cli.USAGE
    errors = capsys.readouterr().err
    assert "EVALSTOP_DATABASE_URL: " in errors
    assert "postgresql://" in errors
