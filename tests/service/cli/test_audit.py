"""The commands of the audit log, on an embedded database."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from pathlib import Path

import pytest
from evalstop_service import cli
from evalstop_service.clock import rfc3339, utc_now
from evalstop_service.projects.audit_trail import INSTALLATION_NAME
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from evalstop_service.store.tables import audit_log

SYSLOG = re.compile(r"<109>1 \d{4}-\d\d-\d\dT[\d:.]+Z \S+ evalstop - [a-z_.]+ - (\{.*\})")


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Database:
    """An installation with the project `p`, a key of it and a key of the installation."""
    monkeypatch.setenv("EVALSTOP_DATA_FOLDER", str(tmp_path))
    assert cli.main(["migrate", "--database-url", Settings().url]) == 0
    assert cli.main(["admin", "project", "create", "p"]) == 0
    for scope in (["--project", "p"], ["--installation"]):
        assert cli.main(["admin", "key", "create", "--name", "a", *scope]) == 0
    return Database(Settings().url)


def test_verify_names_the_first_changed_entry(database: Database, capsys: pytest.CaptureFixture[str]) -> None:
    """`audit verify` exits with 0 while all entries match, and with 1 and the first changed entry otherwise."""
    capsys.readouterr()
    assert cli.main(["audit", "verify", "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)
    assert {name: report["entries"] for name, report in reports.items()} == {"p": 2, INSTALLATION_NAME: 1}
    known_hash = reports["p"]["hash"]
    assert cli.main(["audit", "verify", "--project", "p", "--contains", known_hash]) == 0
    with database.transaction() as tx:
        tx.execute(audit_log.update().where(audit_log.c.position == 2).values(subject="key b"))
    capsys.readouterr()
    assert cli.main(["audit", "verify"]) == 1
    assert re.search(r"p: entry 2 \(id [0-9a-f-]+, key.created\) was changed", capsys.readouterr().out)
    assert cli.main(["audit", "verify", "--project", "nobody"]) == 1
    assert cli.main(["audit", "verify", "--contains", known_hash]) == 1


def test_verify_fails_for_an_emptied_log(database: Database) -> None:
    """Creating a project writes an entry, so a project without entries had its log emptied."""
    with database.transaction() as tx:
        tx.execute(audit_log.delete())
    assert cli.main(["audit", "verify", "--project", "p"]) == 1


def test_export_writes_json_lines_or_syslog(database: Database, capsys: pytest.CaptureFixture[str]) -> None:
    """Entries of all projects or of one, since a time, as JSON lines or syslog."""
    capsys.readouterr()

    def export(*options: str) -> list[str]:
        assert cli.main(["audit", "export", *options]) == 0
        return capsys.readouterr().out.splitlines()

    entries = [json.loads(line) for line in export()]
    assert [entry["action"] for entry in entries] == ["project.created", "key.created", "key.created"]
    assert len(export("--project", "p")) == 2
    assert export("--since", rfc3339(utc_now() + timedelta(hours=1))) == []
    matches = [SYSLOG.fullmatch(line) for line in export("--format", "syslog")]
    assert [json.loads(match[1]) for match in matches if match] == entries


def test_prune_removes_old_entries(database: Database, capsys: pytest.CaptureFixture[str]) -> None:
    """Entries older than the given age are removed, and the rest still verifies."""
    assert cli.main(["audit", "prune", "--project", "p", "--older-than-days", "1"]) == 0
    assert "p: 0 entries removed" in capsys.readouterr().out
    assert cli.main(["audit", "prune", "--project", "p", "--older-than-days", "0"]) == 0
    assert "p: 2 entries removed" in capsys.readouterr().out
    assert cli.main(["audit", "verify"]) == 0


@pytest.mark.parametrize("days", ["-1", "1e9", "nan", "soon"])
def test_impossible_age_removes_nothing(database: Database, days: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A negative number of days would remove every entry; like one without a date, it is wrong usage."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["audit", "prune", "--project", "p", "--older-than-days", days])
    assert ended.value.code == 2
    assert f"{days}: it must be from 0 to 36500 days" in capsys.readouterr().err
    with database.reading() as tx:
        assert len(tx.execute(audit_log.select()).all()) == 3


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--since", "soon", "soon: it must be a time such as 2026-01-31T00:00Z"),
        ("--since", "0001-01-01T00:00+01:00", "it must be a time such as"),
        ("--format", "xml", "invalid choice: 'xml'"),
    ],
)
def test_wrong_option_of_an_export_is_explained(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message says what is wanted, in no words of the program's own."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["audit", "export", option, value])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
