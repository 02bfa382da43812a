"""The log: each line carries its context, JSON lines are parsable, and secrets are masked."""

from __future__ import annotations

import base64
import io
import json
import logging
import re
import secrets
import threading
import warnings
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from evalstop_service.observability import logs
from evalstop_service.store.database import Database
from evalstop_service.web import pages
from hypothesis import given
from hypothesis import strategies as st

from tests.service.running_service import run_service

logger = logging.getLogger("evalstop_service.somewhere")


class LogOutput(io.StringIO):
    """The log output, as text and as the JSON objects on its lines."""

    def parse_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.getvalue().splitlines()]


@pytest.fixture
def json_log() -> LogOutput:
    """The log of this process during the test as JSON, at level DEBUG."""
    return capture_log("json")


@pytest.fixture
def text_log() -> LogOutput:
    """The log of this process during the test as text, at level DEBUG."""
    return capture_log("text")


def capture_log(log_format: logs.Format) -> LogOutput:
    stream = LogOutput()
    logs.configure_logging("DEBUG", log_format, stream)
    return stream


def test_json_line_holds_message_context_and_exception(json_log: LogOutput) -> None:
    """A record is one JSON object on one line with time, level, logger, message, context and traceback."""
    with logs.log_context(run_id="r1", project_id="p1"):
        try:
            raise LookupError("gone\naway")
        except LookupError:
            logger.exception("cannot find %s", "it")
    [line] = json_log.parse_lines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    assert line["level"] == "ERROR"
    assert line["logger"] == "evalstop_service.somewhere"
    assert line["message"] == "cannot find it"
    assert (line["run_id"], line["project_id"]) == ("r1", "p1")
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("LookupError: gone\naway")


def test_text_message_stays_on_one_line(text_log: LogOutput) -> None:
    """Control characters are escaped, so that a message cannot forge another line."""
    with logs.log_context(delivery_id=7):
        logger.warning("from the caller: %s", "x\n2026-01-01T00:00:00.000Z INFO evalstop_service: all is well\x1b[2J")
    [line] = text_log.getvalue().splitlines()
    assert " WARNING evalstop_service.somewhere: from the caller: x\\n2026" in line
    assert line.endswith("\\u001b[2J [delivery_id=7]")


@given(st.text(st.characters(exclude_categories=())), st.text())
def test_any_text_is_logged_as_ascii_json(message: str, run_id: str) -> None:
    """Any message and context yield a JSON line of ASCII with the same message."""
    record = logging.LogRecord("name", logging.INFO, "", 0, "%s", (message,), None)
    with logs.log_context(run_id=run_id):
        line = logs.JsonFormatter().format(record)
    assert line.isascii()
    assert "\n" not in line
    assert json.loads(line)["message"] == logs.mask_secrets(message)
    assert logs.TextFormatter().format(record).isprintable() or not message.isprintable()


@given(st.sampled_from(["esk_{}", "whsec_{}", "/login?token={}", "Bearer {}", "postgresql://u:{}@db/x", "password={}"]))
def test_every_kind_of_secret_is_masked(template: str) -> None:
    """Keys, webhook secrets, sign-in links, bearer tokens and passwords are masked wherever they occur."""
    secret = secrets.token_urlsafe(32)
    text = f'in "{template.format(secret)}", and ({template.format(secret)}) and\n{template.format(secret)}'
    masked = logs.mask_secrets(text)
    assert secret not in masked
    assert masked.count("***") == 3
    assert masked.startswith('in "')


@given(st.text(max_size=50))
def test_text_without_secrets_is_unchanged(text: str) -> None:
    """Masking changes no text without one of the marks of a secret."""
    if not any(
        mark in text.lower() for mark in ("esk_", "whsec_", "token=", "session=", "bearer ", "://", "password=")
    ):
        assert logs.mask_secrets(text) == text


def test_context_ends_with_its_block(json_log: LogOutput) -> None:
    """Context applies within its block and inner blocks, in the same thread only."""
    with logs.log_context(run_id="r"):
        with logs.log_context(delivery_id="d"):
            logs.add_log_context(project_id="p")
            logger.info("inner")
        logger.info("outer")
        thread = threading.Thread(target=logger.info, args=("elsewhere",))
        thread.start()
        thread.join()
    logs.add_log_context(run_id="outside")
    logger.info("after", extra={"run_id": "its own"})
    contexts = [{name: line[name] for name in logs.CONTEXT_FIELDS if name in line} for line in json_log.parse_lines()]
    assert contexts == [
        {"run_id": "r", "project_id": "p", "delivery_id": "d"},
        {"run_id": "r"},
        {},
        {"run_id": "its own"},
    ]


def test_library_records_and_warnings_are_logged_alike(json_log: LogOutput) -> None:
    """Records of uvicorn and SQLAlchemy and warnings are JSON too; SQL statements are not logged."""
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    logging.getLogger("sqlalchemy.pool").error("a connection was lost")
    logging.getLogger("sqlalchemy.engine").info("SELECT secret FROM endpoints")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.warn("take care", UserWarning, stacklevel=1)
    assert [line["logger"] for line in json_log.parse_lines()] == ["uvicorn.error", "sqlalchemy.pool", "py.warnings"]


@pytest.mark.parametrize(
    "request_id", ["abc", "7f1c0e2a-1d7c-4f7e-9c55-0f7a5a3d2b1e", "Root=1-67891233-abcdef012345678912345678"]
)
def test_valid_request_id_is_kept(embedded_database: Database, json_log: LogOutput, request_id: str) -> None:
    """The caller's id is in the response header and in a problem."""
    with run_service(embedded_database) as service:
        response = service.client.get("/nowhere", headers={"X-Request-Id": request_id})
    assert response.headers.get_list("x-request-id") == [request_id]
    assert response.json()["request_id"] == request_id


@pytest.mark.parametrize("request_id", ["", "x" * 129, "a b", 'a"b', "a\tb", "a;b", "\xe9"])
def test_invalid_request_id_is_replaced(embedded_database: Database, request_id: str) -> None:
    """An invalid id is never echoed; each request gets a new id."""
    with run_service(embedded_database) as service:
        responses = [
            service.client.get("/livez", headers=[(b"X-Request-Id", request_id.encode("latin-1"))]) for _ in range(2)
        ]
    ids = [response.headers["x-request-id"] for response in responses]
    assert request_id not in ids
    assert all(logs.REQUEST_ID.fullmatch(id_) for id_ in ids)
    assert len(set(ids)) == 2


def test_debug_log_of_many_requests_contains_no_secret(database: Database, json_log: LogOutput) -> None:
    """Keys, endpoints, sign-in links, forged requests and errors, logged at DEBUG, reveal no secret."""
    with run_service(database) as service:
        client = service.client
        secrets_used = [service.key, "the secret of the sessions"]
        created_key = client.post("/api/v1/keys", json={"name": "k", "scopes": ["read"]}).json()
        secrets_used.append(created_key["key"])
        sign_in = pages.sign_in_token("the secret of the sessions", created_key["id"])
        secrets_used.append(sign_in)
        with httpx.Client(base_url=service.url, trust_env=False, timeout=60) as visitor:
            visitor.get("/login", params={"token": sign_in})
            assert len(visitor.cookies) == 1
            secrets_used += visitor.cookies.values()
            visitor.get("/runs")
        with_password = {"url": "https://user:pa55word@example.org/hook", "event_types": ["*"]}
        assert client.post("/api/v1/endpoints", json=with_password).status_code == 422
        secrets_used.append("pa55word")
        endpoint_body = {"url": "https://example.org/hook", "event_types": ["*"]}
        endpoint = client.post("/api/v1/endpoints", json=endpoint_body).raise_for_status().json()
        rotated = client.post(f"/api/v1/endpoints/{endpoint['id']}/rotate-secret").raise_for_status().json()
        secrets_used += [endpoint["secret"], rotated["secret"]]
        client.get("/api/v1/runs", headers={"Authorization": "Bearer esk_guessed-by-somebody"})
        secrets_used.append("guessed-by-somebody")
        with service.database.transaction() as tx:
            tx.exec_driver_sql("ALTER TABLE endpoints RENAME TO elsewhere")
        assert client.post("/api/v1/endpoints", json=endpoint_body).status_code >= 500
    errors = [line for line in json_log.parse_lines() if line["level"] == "ERROR"]
    assert any("endpoints" in line["message"] + line.get("exception", "") for line in errors)
    text = json_log.getvalue()
    for secret in secrets_used:
        assert secret.removeprefix("whsec_").removeprefix("esk_") not in text
    assert re.findall(r"(?:whsec|esk)_[A-Za-z0-9]", text) == []


def test_secret_in_statement_parameters_is_masked(json_log: LogOutput) -> None:
    """A database error shows the parameters of its statement with secrets masked."""
    secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
    error = sa.exc.ProgrammingError("INSERT INTO endpoints", {"secret": secret, "url": "https://x"}, Exception("no"))
    try:
        raise error
    except sa.exc.ProgrammingError:
        logger.exception("a request failed: %s", error)
    assert "whsec_***" in json_log.getvalue()
    assert secret.removeprefix("whsec_")[:8] not in json_log.getvalue()
