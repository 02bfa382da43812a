"""Every line of the log says what it belongs to, machines can read it, and nothing in it opens a door."""

from __future__ import annotations

import base64
import io
import json
import logging
import re
import secrets
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from evalstop_service.observability import logs
from evalstop_service.store.database import Database
from evalstop_service.web import dashboard
from hypothesis import given
from hypothesis import strategies as st

from tests.service.running_service import run_service

log = logging.getLogger("evalstop_service.somewhere")


class Log(io.StringIO):
    """What was logged, as text and as the objects on its lines."""

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.getvalue().splitlines()]


@pytest.fixture
def written() -> Iterator[Log]:
    """The log of this process while the test lasts, as JSON, with everything in it."""
    yield from configured("json")


@pytest.fixture
def told() -> Iterator[Log]:
    """The same as text."""
    yield from configured("text")


def configured(form: logs.Format) -> Iterator[Log]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    stream = Log()
    logs.configure_logging("DEBUG", form, stream)
    yield stream
    logging.captureWarnings(False)
    root.handlers[:] = before[0]
    root.setLevel(before[1])


def test_a_line_is_an_object(written: Log) -> None:
    """A record is one JSON object on one line: time, level, logger, message, what it is about, and what went wrong."""
    with logs.log_context(run_id="r1", project_id="p1"):
        try:
            raise LookupError("gone\naway")
        except LookupError:
            log.exception("cannot find %s", "it")
    [line] = written.lines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    assert line["level"] == "ERROR"
    assert line["logger"] == "evalstop_service.somewhere"
    assert line["message"] == "cannot find it"
    assert (line["run_id"], line["project_id"]) == ("r1", "p1")
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("LookupError: gone\naway")


def test_a_line_is_a_line(told: Log) -> None:
    """As text a message stays on its line whatever it holds, so that nobody can forge one; a traceback follows it."""
    with logs.log_context(delivery_id=7):
        log.warning("from the caller: %s", "x\n2026-01-01T00:00:00.000Z INFO evalstop_service: all is well\x1b[2J")
    [line] = told.getvalue().splitlines()
    assert " WARNING evalstop_service.somewhere: from the caller: x\\n2026" in line
    assert line.endswith("\\u001b[2J [delivery_id=7]")


@given(st.text(st.characters(exclude_categories=())), st.text())
def test_any_text_can_be_logged(message: str, told: str) -> None:
    """Whatever stands in a message or a fact, the line is JSON that gives it back, and ASCII that any stream takes."""
    record = logging.LogRecord("name", logging.INFO, "", 0, "%s", (message,), None)
    with logs.log_context(run_id=told):
        line = logs.JsonFormatter().format(record)
    assert line.isascii()
    assert "\n" not in line
    assert json.loads(line)["message"] == logs.mask_secrets(message)
    assert logs.TextFormatter().format(record).isprintable() or not message.isprintable()


@given(st.sampled_from(["esk_{}", "whsec_{}", "/login?token={}", "Bearer {}", "postgresql://u:{}@db/x", "password={}"]))
def test_no_secret_survives(form: str) -> None:
    """Keys, webhook secrets, sign-in links, bearers and passwords are starred out wherever they stand."""
    secret = secrets.token_urlsafe(32)
    text = f'in "{form.format(secret)}", and ({form.format(secret)}) and\n{form.format(secret)}'
    cleaned = logs.mask_secrets(text)
    assert secret not in cleaned
    assert cleaned.count("***") == 3
    assert cleaned.startswith('in "')


@given(st.text(max_size=50))
def test_what_holds_no_secret_stays_as_it_is(text: str) -> None:
    """Where there is nothing to hide nothing is changed."""
    if not any(
        mark in text.lower() for mark in ("esk_", "whsec_", "token=", "session=", "bearer ", "://", "password=")
    ):
        assert logs.mask_secrets(text) == text


def test_facts_end_with_their_block(written: Log) -> None:
    """Facts are told within their block and its inner ones, and are forgotten behind it, in this thread alone."""
    with logs.log_context(run_id="r"):
        with logs.log_context(delivery_id="d"):
            logs.add_log_context(project_id="p")
            log.info("inner")
        log.info("outer")
        thread = threading.Thread(target=log.info, args=("elsewhere",))
        thread.start()
        thread.join()
    logs.add_log_context(run_id="nobody's")
    log.info("behind", extra={"run_id": "its own"})
    facts = [{name: line[name] for name in logs.CONTEXT_FIELDS if name in line} for line in written.lines()]
    assert facts == [{"run_id": "r", "project_id": "p", "delivery_id": "d"}, {"run_id": "r"}, {}, {"run_id": "its own"}]


def test_the_libraries_speak_the_same(written: Log) -> None:
    """Records of uvicorn and SQLAlchemy, and warnings, come as the same objects; statements are not logged at all."""
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    logging.getLogger("sqlalchemy.pool").error("a connection was lost")
    logging.getLogger("sqlalchemy.engine").info("SELECT secret FROM endpoints")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.warn("take care", UserWarning, stacklevel=1)
    assert [line["logger"] for line in written.lines()] == ["uvicorn.error", "sqlalchemy.pool", "py.warnings"]


@pytest.mark.parametrize(
    "wanted", ["abc", "7f1c0e2a-1d7c-4f7e-9c55-0f7a5a3d2b1e", "Root=1-67891233-abcdef012345678912345678"]
)
def test_a_request_keeps_the_id_that_it_came_with(embedded_database: Database, written: Log, wanted: str) -> None:
    """A caller's id comes back in the header and stands in the lines of its request."""
    with run_service(embedded_database, access_log=True) as service:
        answer = service.client.get("/livez", headers={"X-Request-Id": wanted})
    assert answer.headers.get_list("x-request-id") == [wanted]
    [line] = [line for line in written.lines() if line["logger"] == "evalstop_service.access"]
    assert line["request_id"] == wanted


@pytest.mark.parametrize("wanted", ["", "x" * 129, "a b", 'a"b', "a\tb", "a;b", "\xe9"])
def test_a_request_with_an_unfit_id_gets_another(embedded_database: Database, wanted: str) -> None:
    """An id that is none is replaced: what a caller sends is never passed on unread. Each request has its own."""
    with run_service(embedded_database) as service:
        given = [service.client.get("/livez", headers=[(b"X-Request-Id", wanted.encode("latin-1"))]) for _ in range(2)]
    ids = [answer.headers["x-request-id"] for answer in given]
    assert wanted not in ids
    assert all(logs.REQUEST_ID.fullmatch(one) for one in ids)
    assert len(set(ids)) == 2


def test_an_access_log_is_written_when_asked_for(embedded_database: Database, written: Log) -> None:
    """A line a request with its method, route, path without the query, status, time, and the run it was about."""
    with run_service(embedded_database, access_log=True) as service:
        run = service.client.post("/api/v1/runs", json={"name": "r"}).json()
        service.client.get(f"/api/v1/runs/{run['id']}")
        service.client.get("/nowhere", params={"token": "abc"})
    lines = [line for line in written.lines() if line["logger"] == "evalstop_service.access"]
    told = [(line["method"], line["route"], line["status"], line.get("run_id")) for line in lines]
    assert told == [
        ("POST", "/api/v1/runs", 201, None),
        ("GET", "/api/v1/runs/{run_id}", 200, run["id"]),
        ("GET", "(none)", 404, None),
    ]
    assert [line["path"] for line in lines[1:]] == [f"/api/v1/runs/{run['id']}", "/nowhere"]
    assert lines[1]["duration_ms"] > 0


def test_there_is_no_access_log_unasked(embedded_database: Database, written: Log) -> None:
    """Requests that end well leave no line."""
    with run_service(embedded_database) as service:
        assert service.client.get("/livez").status_code == 200
    assert [line for line in written.lines() if line["logger"].endswith("access")] == []


def test_nothing_in_the_log_opens_a_door(database: Database, written: Log) -> None:
    """A day of keys, endpoints, links, forged requests and faults, logged at DEBUG, leaves no secret there."""
    with run_service(database, access_log=True) as service:
        client = service.client
        found = [service.key, "the secret of the sessions"]
        made = client.post("/api/v1/keys", json={"name": "k", "scopes": ["read"]}).json()
        found.append(made["key"])
        sign_in = dashboard.sign_in_token("the secret of the sessions", made["id"])
        found.append(sign_in)
        with httpx.Client(base_url=service.url, trust_env=False) as visitor:
            visitor.get("/login", params={"token": sign_in})
            found += visitor.cookies.values()
            visitor.get("/runs")
        endpoint = client.post(
            "/api/v1/endpoints", json={"url": "https://user:pa55word@example.org/hook", "event_types": ["*"]}
        )
        if endpoint.status_code < 300:
            found += [endpoint.json()["secret"], "pa55word"]
            path = f"/api/v1/endpoints/{endpoint.json()['id']}/rotate-secret"
            found.append(client.post(path).json()["secret"])
        client.get("/api/v1/runs", headers={"Authorization": "Bearer esk_guessed-by-somebody"})
        found.append("guessed-by-somebody")
        with service.database.transaction() as tx:
            tx.exec_driver_sql("ALTER TABLE endpoints RENAME TO elsewhere")
        assert (
            client.post("/api/v1/endpoints", json={"url": "https://example.org/hook", "event_types": ["*"]}).status_code
            >= 500
        )
    text = written.getvalue()
    assert "elsewhere" in text or "endpoints" in text, "the fault is in the log"
    for secret in found:
        assert secret.removeprefix("whsec_").removeprefix("esk_") not in text
    assert re.findall(r"(?:whsec|esk)_[A-Za-z0-9]", text) == []


def test_parameters_of_a_statement_are_cleaned(written: Log) -> None:
    """An error of the database that shows the parameters of its statement does not show a secret among them."""
    secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
    error = sa.exc.ProgrammingError("INSERT INTO endpoints", {"secret": secret, "url": "https://x"}, Exception("no"))
    try:
        raise error
    except sa.exc.ProgrammingError:
        log.exception("a request failed: %s", error)
    assert "whsec_***" in written.getvalue()
    assert secret.removeprefix("whsec_")[:8] not in written.getvalue()
