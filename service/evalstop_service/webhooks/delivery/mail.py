"""Sends messages by SMTP through the configured server; never raises for an error of that server.

smtplib blocks, so it runs in separate threads: a mail server that hangs must not delay stops. Recipients are the
addresses of endpoints, which admins set, and owners of runs in the configured domains: anyone who may open a run may
name an owner, and must not be able to send mail to strangers.
"""

from __future__ import annotations

import asyncio
import re
import smtplib
import ssl
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from email.message import EmailMessage
from email.utils import formatdate
from typing import Annotated, Literal, Self

import msgspec
from pydantic import BaseModel, Field, SecretStr, model_validator

from evalstop_service.webhooks.channels import OWNER, SCHEME, is_address
from evalstop_service.webhooks.retry import Answer

THREADS = 4

Port = Annotated[int, Field(ge=0, le=65535)]


class EmailSettings(BaseModel):
    """E-mail"""

    smtp_host: str | None = None
    """SMTP server for endpoints of the format `email`. None sends no e-mail."""

    smtp_port: Port = 587
    """Port of the SMTP server."""

    smtp_encryption: Literal["starttls", "tls", "none"] = "starttls"
    """`starttls`, `tls` from the first byte on, or `none` for a server on the same machine."""

    smtp_user: str | None = None
    """User name for the SMTP server. None does not authenticate."""

    smtp_password: SecretStr | None = None
    """Password for the SMTP server."""

    email_from: str | None = None
    """Sender address of messages; required with `EVALSTOP_SMTP_HOST`."""

    email_domains: str | None = None
    """Domains, separated by commas, of run owners who get e-mail. None sends none to owners."""

    @model_validator(mode="after")
    def _check_sender(self) -> Self:
        if self.smtp_host is not None and not re.fullmatch(r"[^\s@<>]+@[^\s@<>]+", self.email_from or ""):
            raise ValueError("EVALSTOP_EMAIL_FROM: with EVALSTOP_SMTP_HOST it must be an address such as a@example.org")
        return self

    def may_write_to(self, owner: str) -> bool:
        """Whether the owner of a run gets mail at this address."""
        domains = [part.strip().lower() for part in (self.email_domains or "").split(",")]
        return is_address(owner) and owner.rpartition("@")[2].lower() in domains


class Mailer:
    """Sends one message at a time in each of a few threads; `timeout_seconds`: for the whole message."""

    def __init__(self, settings: EmailSettings, timeout_seconds: float) -> None:
        self._settings = settings
        self._timeout_seconds = timeout_seconds
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="mail")

    def close(self) -> None:
        """Start no further messages; does not wait for those in progress."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def send(self, url: str, headers: Mapping[str, str], text: str, event: str) -> Answer:
        """Send a rendered message to `mailto:ADDRESS`, or to the owner of the run that the event is about."""
        started = time.perf_counter()

        def answer(code: int | None, error: str | None, excerpt: str | None = None) -> Answer:
            return Answer(code, error, (time.perf_counter() - started) * 1000, excerpt)

        if self._settings.smtp_host is None or self._settings.email_from is None:
            return answer(None, "not sent: EVALSTOP_SMTP_HOST is not set")
        recipient = url.removeprefix(SCHEME)
        if recipient == OWNER:
            owner = _read_owner(event)
            if owner is None or not self._settings.may_write_to(owner):
                return answer(204, None, "no owner to send it to")
            recipient = owner
        message = write_message(self._settings.email_from, recipient, headers["webhook-id"], text)
        sending = asyncio.get_running_loop().run_in_executor(self._threads, self._transmit, message)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await sending
        except smtplib.SMTPResponseException as error:
            return answer(error.smtp_code, f"SMTP {error.smtp_code}: {_decode(error.smtp_error)}")
        except smtplib.SMTPRecipientsRefused as error:
            code, reason = error.recipients[recipient]
            return answer(code, f"SMTP {code}: {_decode(reason)}")
        except TimeoutError:
            return answer(None, f"no answer within {self._timeout_seconds:g} s")
        except (OSError, smtplib.SMTPException) as error:
            return answer(None, f"{type(error).__name__}: {error}"[:300])
        return answer(250, None, f"accepted by {self._settings.smtp_host}")

    def _transmit(self, message: EmailMessage) -> None:
        settings, context = self._settings, ssl.create_default_context()
        where = (settings.smtp_host or "", settings.smtp_port)
        if settings.smtp_encryption == "tls":
            server: smtplib.SMTP = smtplib.SMTP_SSL(*where, timeout=self._timeout_seconds, context=context)
        else:
            server = smtplib.SMTP(*where, timeout=self._timeout_seconds)
        with server:
            if settings.smtp_encryption == "starttls":
                server.starttls(context=context)
            if settings.smtp_user is not None:
                password = settings.smtp_password
                server.login(settings.smtp_user, password.get_secret_value() if password is not None else "")
            server.send_message(message)


def _read_owner(event: str) -> str | None:
    data = msgspec.json.decode(event).get("data", {})
    owner: str | None = (data.get("run") or {}).get("owner")
    return owner


def write_message(sender: str, recipient: str, event_id: str, text: str) -> EmailMessage:
    """The message; a repeated one has the same id, so that the recipient's mail program shows it once."""
    subject, _, content = text.partition("\n\n")
    message = EmailMessage()
    message["From"], message["To"] = sender, recipient
    message["Subject"] = f"EvalStop: {subject}"
    message["Date"] = formatdate(usegmt=True)
    message["Message-ID"] = f"<{event_id}@{sender.rpartition('@')[2].rstrip('>')}>"
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(content)
    return message


def _decode(reason: bytes | str) -> str:
    text = reason.decode(errors="replace") if isinstance(reason, bytes) else reason
    return " ".join(text.split())[:300]
