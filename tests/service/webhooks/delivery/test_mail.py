"""Events sent as e-mail through an SMTP server."""

from __future__ import annotations

import asyncio
import email
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.message import EmailMessage
from email.policy import default
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, Envelope
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from evalstop_service.store import endpoints
from evalstop_service.store.database import Database
from evalstop_service.store.queue import outbox
from evalstop_service.store.queue.outbox import DeliveryAttempt
from evalstop_service.webhooks.delivery.mail import EmailSettings, Mailer

from tests.service.webhooks.delivery.fakes import EPOCH, SeededProject, all_settled, deliver_until, seed_project

REFUSED_ADDRESS = "nobody@example.org"


class FakeMailServer:
    """An SMTP server that accepts mail for all addresses but one."""

    def __init__(self, **options: Any) -> None:
        self.received: list[Envelope] = []
        with socket.socket() as free:  # the controller must know its port: it connects to it to check that it listens
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.controller = Controller(self, hostname="127.0.0.1", port=self.port, **options)

    async def handle_RCPT(  # noqa: N802 - required by aiosmtpd
        self, _server: object, _session: object, envelope: Envelope, address: str, _options: object
    ) -> str:
        if address == REFUSED_ADDRESS:
            return "550 no such mailbox"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, _server: object, _session: object, envelope: Envelope) -> str:  # noqa: N802
        self.received.append(envelope)
        return "250 OK"

    @property
    def messages(self) -> list[EmailMessage]:
        contents = [envelope.original_content or b"" for envelope in self.received]
        parsed = [email.message_from_bytes(content, policy=default) for content in contents]
        return [message for message in parsed if isinstance(message, EmailMessage)]

    def build_settings(self, **options: Any) -> EmailSettings:
        defaults = {"smtp_encryption": "none", "email_domains": "example.org", "email_from": "evalstop@example.org"}
        return EmailSettings(smtp_host="127.0.0.1", smtp_port=self.port, **{**defaults, **options})


@contextmanager
def run_mail_server(**options: Any) -> Iterator[FakeMailServer]:
    server = FakeMailServer(**options)
    server.controller.start()
    try:
        yield server
    finally:
        server.controller.stop()


SendEvent = Callable[..., list[DeliveryAttempt]]


@pytest.fixture
def send(embedded_database: Database) -> SendEvent:
    """Return a function that sends an event by mail and returns the attempts."""

    def send_event(
        project: SeededProject, url: str, mail: EmailSettings | None, owner: str | None = None
    ) -> list[DeliveryAttempt]:
        with embedded_database.transaction() as tx:
            endpoints.add_endpoint(tx, project.id, url=url, event_types=["*"], now=EPOCH, format="email")
            run = {"id": str(project.run_id), "name": "ppo\r\nBcc: x@example.com", "attempt": 1, "labels": {}}
            data = {"project": {"id": str(project.id), "name": "Ω"}, "run": run | {"owner": owner}}
            project.add_event(tx, data=data, event_type="run.completed")
        asyncio.run(deliver_until(all_settled(embedded_database, project), embedded_database, mail=mail))
        with embedded_database.reading() as tx:
            return outbox.list_attempts(tx, project.list_deliveries(tx)[0])

    return send_event


@pytest.fixture
def project(embedded_database: Database) -> SeededProject:
    return seed_project(embedded_database)


def test_event_is_sent_as_mail(send: SendEvent, project: SeededProject) -> None:
    """The mail has one recipient, a subject and a message id; a run's name cannot add headers."""
    with run_mail_server() as server:
        (attempt,) = send(project, "mailto:ml-platform@example.org", server.build_settings())
    (envelope,), (message,) = server.received, server.messages
    assert (attempt.status_code, attempt.error) == (250, None)
    assert (envelope.mail_from, envelope.rcpt_tos) == ("evalstop@example.org", ["ml-platform@example.org"])
    assert message["Subject"] == "EvalStop: ppo Bcc: x@example.com has completed"
    assert message["Bcc"] is None
    assert message["Message-ID"].endswith("@example.org>")
    assert "project Ω" in message.get_content()


@pytest.mark.parametrize(
    ("owner", "arrives"),
    [
        ("dana@example.org", True),
        ("Dana@Example.org", True),
        ("dana@example.com", False),
        ("dana@sub.example.org", False),
        ("dana@example.org, lee@example.com", False),
        ("dana", False),
        (None, False),
    ],
)
def test_owner_gets_mail_only_in_allowed_domains(
    send: SendEvent, project: SeededProject, owner: str | None, arrives: bool
) -> None:
    """Owners are named by whoever opens the run, so mail goes to allowed domains only."""
    with run_mail_server() as server:
        (attempt,) = send(project, "mailto:owner", server.build_settings(), owner)
    assert [envelope.rcpt_tos for envelope in server.received] == ([[owner]] if arrives else [])
    assert attempt.error is None
    assert attempt.status_code == (250 if arrives else 204)


def test_refused_address_is_a_permanent_error(send: SendEvent, project: SeededProject) -> None:
    """A mailbox that does not exist fails the delivery with the server's reply."""
    with run_mail_server() as server:
        (attempt,) = send(project, f"mailto:{REFUSED_ADDRESS}", server.build_settings())
    assert (attempt.status_code, attempt.error) == (550, "SMTP 550: no such mailbox")


def test_mail_is_sent_over_starttls_with_sign_in(
    send: SendEvent, project: SeededProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """STARTTLS and the sign-in work with a trusted certificate."""
    context = create_tls_context(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "server.pem"))
    signed_in: list[bytes] = []

    def authenticate(_server: object, _session: object, _envelope: object, _mechanism: str, data: Any) -> AuthResult:
        signed_in.append(data.login)
        return AuthResult(success=data.password == b"secret")

    options = {"tls_context": context, "require_starttls": True, "authenticator": authenticate, "auth_required": True}
    with run_mail_server(**options) as server:
        mail = server.build_settings(smtp_encryption="starttls", smtp_user="evalstop", smtp_password="secret")
        (attempt,) = send(project, "mailto:ops@example.org", mail)
    assert (attempt.status_code, attempt.error, signed_in) == (250, None, [b"evalstop"])
    assert len(server.received) == 1


def test_untrusted_certificate_ends_the_connection(tmp_path: Path) -> None:
    """With an untrusted certificate the connection ends before the password is sent."""
    with run_mail_server(tls_context=create_tls_context(tmp_path), require_starttls=True) as server:
        mailer = Mailer(
            server.build_settings(smtp_encryption="starttls", smtp_user="evalstop", smtp_password="secret"), 5.0
        )
        answer = asyncio.run(mailer.send("mailto:ops@example.org", {"webhook-id": "1"}, "s\n\nt", "{}"))
        mailer.close()
    assert answer.status_code is None
    assert "certificate verify failed" in str(answer.error)
    assert server.received == []


def test_missing_mail_server_is_reported() -> None:
    """Without a mail server the attempt's error names the missing setting."""
    answer = asyncio.run(
        Mailer(EmailSettings(), 5.0).send("mailto:ops@example.org", {"webhook-id": "1"}, "s\n\nt", "{}")
    )
    assert (answer.status_code, answer.error) == (None, "not sent: EVALSTOP_SMTP_HOST is not set")


def create_tls_context(folder: Path) -> ssl.SSLContext:
    """Create a server's TLS context with a self-signed certificate for 127.0.0.1 in the folder."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "server.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(private)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    return context
