"""Events as e-mail, sent over a socket to a real mail server."""

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
from evalstop_service.store.queue import deliveries
from evalstop_service.store.queue.deliveries import DeliveryAttempt
from evalstop_service.webhooks.delivery.mail import Mailer, MailSettings

from tests.service.webhooks.delivery.fakes import EPOCH, Scene, a_scene, deliver_until, settled

REFUSED = "nobody@example.org"


class FakeMailServer:
    """Takes mail for everybody but one address, from whoever signs in as it wants."""

    def __init__(self, **options: Any) -> None:
        self.received: list[Envelope] = []
        with socket.socket() as free:  # the controller asks its own port whether it listens: it must know it
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.controller = Controller(self, hostname="127.0.0.1", port=self.port, **options)

    async def handle_RCPT(  # noqa: N802 - the name that aiosmtpd asks for
        self, _server: object, _session: object, envelope: Envelope, address: str, _options: object
    ) -> str:
        if address == REFUSED:
            return "550 no such mailbox"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, _server: object, _session: object, envelope: Envelope) -> str:  # noqa: N802
        self.received.append(envelope)
        return "250 OK"

    @property
    def mails(self) -> list[EmailMessage]:
        contents = [envelope.original_content or b"" for envelope in self.received]
        found = [email.message_from_bytes(content, policy=default) for content in contents]
        return [message for message in found if isinstance(message, EmailMessage)]

    def settings(self, **terms: Any) -> MailSettings:
        usual = {"encryption": "none", "user": None, "password": None, "domains": ("example.org",)}
        return MailSettings("127.0.0.1", self.port, sender="evalstop@example.org", **{**usual, **terms})


@contextmanager
def mail_server(**options: Any) -> Iterator[FakeMailServer]:
    server = FakeMailServer(**options)
    server.controller.start()
    try:
        yield server
    finally:
        server.controller.stop()


Send = Callable[..., list[DeliveryAttempt]]


@pytest.fixture
def send(embedded_database: Database) -> Send:
    """Sends an event to an address as mail, and gives the attempts."""

    def send_event(
        scene: Scene, url: str, mail: MailSettings | None, owner: str | None = None
    ) -> list[DeliveryAttempt]:
        with embedded_database.transaction() as tx:
            endpoints.add_endpoint(tx, scene.project_id, url=url, event_types=["*"], now=EPOCH, format="email")
            run = {"id": str(scene.run_id), "name": "ppo\r\nBcc: x@example.com", "attempt": 1, "labels": {}}
            data = {"project": {"id": str(scene.project_id), "name": "Ω"}, "run": run | {"owner": owner}}
            scene.announce(tx, data=data, type="run.completed")
        asyncio.run(deliver_until(settled(embedded_database, scene), embedded_database, mail=mail))
        with embedded_database.reading() as tx:
            return deliveries.list_attempts(tx, scene.all(tx)[0])

    return send_event


@pytest.fixture
def scene(embedded_database: Database) -> Scene:
    return a_scene(embedded_database)


def test_an_event_arrives_as_mail(send: Send, scene: Scene) -> None:
    """The message has one recipient, a subject, the event's id as its own, and no header that a run's name made."""
    with mail_server() as server:
        (attempt,) = send(scene, "mailto:ml-platform@example.org", server.settings())
    (envelope,), (message,) = server.received, server.mails
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
def test_owners_get_mail_within_the_domains_that_are_allowed(
    send: Send, scene: Scene, owner: str | None, arrives: bool
) -> None:
    """Whoever opens runs names their owners, and cannot have mail sent to strangers."""
    with mail_server() as server:
        (attempt,) = send(scene, "mailto:owner", server.settings(), owner)
    assert [envelope.rcpt_tos for envelope in server.received] == ([[owner]] if arrives else [])
    assert attempt.error is None
    assert attempt.status_code == (250 if arrives else 204)


def test_an_address_that_is_refused_is_given_up(send: Send, scene: Scene) -> None:
    """A mailbox that does not exist is not tried again for a day; without a server the delivery says so."""
    with mail_server() as server:
        (attempt,) = send(scene, f"mailto:{REFUSED}", server.settings())
    assert (attempt.status_code, attempt.error) == (550, "SMTP 550: no such mailbox")


def test_mail_is_sent_over_tls_to_a_server_that_proves_itself(
    send: Send, scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """STARTTLS and the sign-in work with a certificate that is trusted; with another one nothing is sent."""
    context = make_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "server.pem"))
    signed_in: list[bytes] = []

    def authenticate(_server: object, _session: object, _envelope: object, _mechanism: str, data: Any) -> AuthResult:
        signed_in.append(data.login)
        return AuthResult(success=data.password == b"secret")

    options = {"tls_context": context, "require_starttls": True, "authenticator": authenticate, "auth_required": True}
    with mail_server(**options) as server:
        mail = server.settings(encryption="starttls", user="evalstop", password="secret")
        (attempt,) = send(scene, "mailto:ops@example.org", mail)
    assert (attempt.status_code, attempt.error, signed_in) == (250, None, [b"evalstop"])
    assert len(server.received) == 1


def test_nothing_is_said_to_a_server_that_does_not_prove_itself(embedded_database: Database, tmp_path: Path) -> None:
    """A certificate that nobody vouches for ends the connection before the password is sent."""
    with mail_server(tls_context=make_certificate(tmp_path), require_starttls=True) as server:
        mailer = Mailer(server.settings(encryption="starttls", user="evalstop", password="secret"), 5.0)
        answer = asyncio.run(mailer.send("mailto:ops@example.org", {"webhook-id": "1"}, "s\n\nt", "{}"))
        mailer.close()
    assert answer.status_code is None
    assert "certificate verify failed" in str(answer.error)
    assert server.received == []


def test_without_a_server_nothing_is_sent() -> None:
    """The delivery says which setting is missing."""
    answer = asyncio.run(Mailer(None, 5.0).send("mailto:ops@example.org", {"webhook-id": "1"}, "s\n\nt", "{}"))
    assert (answer.status_code, answer.error) == (None, "not sent: EVALSTOP_SMTP_HOST is not set")


def make_certificate(folder: Path) -> ssl.SSLContext:
    """A server's context with a certificate of its own for 127.0.0.1, which lies in the folder."""
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
