"""Options shared by the receivers' command lines, and their parsing."""

from __future__ import annotations

import argparse
import logging
import math
import os
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path

from evalstop_client.errors import ConfigurationError
from evalstop_client.receivers.stop.state_machine import StopTimeouts
from evalstop_client.receivers.stop.webhooks import ReceiverServer
from evalstop_client.settings import validate_key, validate_url
from evalstop_client.signature import check_secret

logger = logging.getLogger("evalstop_client.receivers")


def add_service_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the service: secrets, URL, key."""
    add = parser.add_argument
    add("--secret-env", default="EVALSTOP_WEBHOOK_SECRET", metavar="NAME", help="variable with the secret(s) whsec_...")
    add("--secret-file", type=Path, metavar="FILE", help="file with the secret(s), read at every webhook")
    add(
        "--public-key",
        action="append",
        default=[],
        metavar="whpk_...",
        help="verify with this public key instead of a secret: a receiver that has only this key cannot forge events",
    )
    add_url_options(parser, "report")
    add("--tls-cert", type=Path, metavar="FILE", help="serve HTTPS with this certificate and its chain, as PEM")
    add("--tls-key", type=Path, metavar="FILE", help="the private key of --tls-cert, unless that file has it")
    add("--metrics-key-env", metavar="NAME", help="variable with the bearer token that /metrics requires")
    add("--ready-file", type=Path, metavar="FILE", help="write the address as JSON to FILE once listening")


def add_receiver_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of receivers that run beside a scheduler."""
    add = parser.add_argument
    add("--listen", metavar="HOST:PORT", help="address for webhooks (default: 127.0.0.1:9000, or none with --pull)")
    add(
        "--pull",
        metavar="ENDPOINT_ID",
        help="fetch events from this pull endpoint of the service, for hosts without inbound connections",
    )
    add(
        "--state",
        type=Path,
        metavar="FOLDER",
        help="folder of the journal (default: receiver-<scheduler> in the user's state folder)",
    )
    to_cancel = "time for a checkpoint, from the signal to the cancel; 0 cancels immediately"
    add_seconds(parser, "--checkpoint-grace-seconds", StopTimeouts.checkpoint_seconds, to_cancel)
    to_kill = "time from the cancel to the kill; longer than the scheduler's grace period"
    add_seconds(parser, "--grace-seconds", StopTimeouts.cancel_seconds, to_kill)
    to_give_up = "time from the cancel until the stop is reported as failed; polling continues"
    add_seconds(parser, "--give-up-seconds", StopTimeouts.give_up_seconds, to_give_up)
    add_seconds(parser, "--poll-seconds", StopTimeouts.poll_seconds, "time between two checks of the job")


def add_url_options(parser: argparse.ArgumentParser, scope: str) -> None:
    """Add the options for the service's URL and for a key of this scope."""
    url = os.environ.get("EVALSTOP_URL")
    parser.add_argument("--url", default=url, help="the service to report to (default: $EVALSTOP_URL)")
    key = f"variable with a key of scope {scope} (default: %(default)s)"
    parser.add_argument("--key-env", default="EVALSTOP_KEY", metavar="NAME", help=key)


def add_seconds(parser: argparse.ArgumentParser, option: str, default: float, text: str) -> None:
    text = f"{text} (default: %(default)g)"
    parser.add_argument(option, type=_parse_seconds, default=default, metavar="S", help=text)


def parse_timeouts(options: argparse.Namespace) -> StopTimeouts:
    """How long each part of a stop may take."""
    return StopTimeouts(
        checkpoint_seconds=options.checkpoint_grace_seconds,
        cancel_seconds=options.grace_seconds,
        give_up_seconds=options.give_up_seconds,
        poll_seconds=max(0.05, options.poll_seconds),
    )


def parse_service(options: argparse.Namespace) -> tuple[str | None, str | None]:
    url = validate_url(options.url) if options.url else None
    return url, validate_key(os.environ.get(options.key_env))


def require_service(options: argparse.Namespace) -> tuple[str, str | None]:
    """Like `parse_service`; raises ConfigurationError without a url."""
    url, key = parse_service(options)
    if url is None:
        raise ConfigurationError("url: name the service with --url or EVALSTOP_URL.")
    return url, key


def load_secrets(variable: str, file: Path | None, public_keys: Sequence[str] = ()) -> Callable[[], Sequence[str]]:
    """A function that returns the current public keys, or the secrets in `file` or `variable`, separated by
    whitespace."""
    if public_keys or file is None:
        secrets = public_keys or os.environ.get(variable, "").split()
        if not secrets:
            raise ConfigurationError(
                f"webhook secret: {variable} is not set; or name a file with --secret-file, or a --public-key."
            )
        for secret in secrets:
            check_secret(secret)
        return lambda: secrets

    def read() -> list[str]:
        try:
            secrets = file.read_text().split()
            for secret in secrets:
                check_secret(secret)
        except (OSError, UnicodeDecodeError, ConfigurationError) as error:
            logger.error("no secret in %s, so all webhooks are refused: %s", file, error)
            return []
        if not secrets:
            logger.error("no secret in %s, so all webhooks are refused: it is empty", file)
        return secrets

    read()  # logs what is wrong at the start, not at the first stop; the file may still come
    return read


def listen(address: str, options: argparse.Namespace) -> ReceiverServer:
    """A server for webhooks, with TLS if the options name a certificate."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(f"listen {address!r}: write host:port, such as 127.0.0.1:9000.")
    tls, metrics_key = _load_certificate(options.tls_cert, options.tls_key), None
    if options.metrics_key_env and not (metrics_key := os.environ.get(options.metrics_key_env)):
        raise ConfigurationError(f"metrics key: {options.metrics_key_env} is not set.")
    try:
        return ReceiverServer(host, int(port), tls=tls, metrics_key=metrics_key)
    except OSError as error:
        raise ConfigurationError(f"listen {address!r}: {error}.") from None


def _load_certificate(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if certificate is None:
        if key is not None:
            raise ConfigurationError("tls: --tls-key requires --tls-cert.")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        raise ConfigurationError(f"tls: {certificate} and {key or certificate}: {error}.") from None
    return context


def choose_state_folder(chosen: Path | None, scheduler: str) -> Path:
    if chosen is not None:
        return chosen
    state = os.environ.get("XDG_STATE_HOME")
    try:
        root = Path(state) if state else Path("~/.local/state").expanduser()
    except RuntimeError:  # a container's user need not have a home
        raise ConfigurationError("state: this user has no home; name a folder with --state.") from None
    return root / "evalstop" / f"receiver-{scheduler}"


def write_atomically(path: Path, text: str) -> None:
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text)
    draft.replace(path)


def _parse_seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 86_400:
        raise argparse.ArgumentTypeError(f"{text}: it must be from 0 to 86400 seconds")
    return number
