"""The command of the audit log, on an embedded database."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from evalstop_service import cli
from evalstop_service.projects.audit_trail import INSTALLATION_NAME
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from evalstop_service.store.tables import audit_log


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Database:
    """An installation with the project `p`, a key of it and a key of the installation."""
    monkeypatch.setenv("EVALSTOP_DATA_FOLDER", str(tmp_path))
    assert cli.main(["migrate", "--database-url", Settings().url]) == 0
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
