"""Creates from the settings what other parts need: database, encryption, address policy, mail settings, grants."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pydantic import SecretStr

from evalstop_service.domain.decision_lifecycle import Mode
from evalstop_service.errors import InvalidSetting
from evalstop_service.projects.project_settings import NewProject
from evalstop_service.security import encryption
from evalstop_service.security.address_policy import AddressPolicy, parse_address_policy
from evalstop_service.security.encryption import Encryption
from evalstop_service.security.private_files import create_private_file, create_private_folder, keep_secret
from evalstop_service.security.scopes import Grants, parse_grants
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from evalstop_service.webhooks.delivery.mail import MailSettings

T = TypeVar("T")
V = TypeVar("V")

ENCRYPTION_KEY = "encryption.key"
"""File in the data folder with the key that encrypts endpoint secrets if EVALSTOP_SECRET_KEYS is not set."""


def create_database(settings: Settings) -> Database:
    """The database of the settings. The folder and file of an embedded one can be accessed only by their owner."""
    if settings.database_url is None:
        create_private_folder(settings.data_folder)
        create_private_file(settings.data_folder / "evalstop.db")  # SQLite gives its other files the same permissions
    return Database(settings.url, connections=settings.database_connections)


def create_encryption(settings: Settings) -> Encryption:
    """The encryption of endpoint secrets; raises InvalidSetting.

    Beside an embedded database lies a key generated at the first start; keys from the settings come before it.
    """
    keys = _parse("SECRET_KEYS", encryption.parse_keys, reveal(settings.secret_keys))
    key_file = settings.data_folder / ENCRYPTION_KEY
    if settings.database_url is None and key_file.exists():
        keys += _parse("DATA_FOLDER", encryption.parse_keys, key_file.read_text())
    return Encryption(keys)


def keep_encryption_key(settings: Settings) -> None:
    """Generate the key beside an embedded database, unless it exists or the settings have one."""
    if settings.database_url is None and settings.secret_keys is None:
        keep_secret(settings.data_folder / ENCRYPTION_KEY, encryption.generate_key)


def create_address_policy(settings: Settings) -> AddressPolicy:
    """The address policy of webhooks; raises InvalidSetting."""
    return _parse("WEBHOOK_NETWORKS", parse_address_policy, settings.webhook_networks)


def create_mail_settings(settings: Settings) -> MailSettings | None:
    """The SMTP server of the settings."""
    if settings.smtp_host is None or settings.email_from is None:
        return None
    return MailSettings(
        host=settings.smtp_host,
        port=settings.smtp_port,
        encryption=settings.smtp_encryption,
        user=settings.smtp_user,
        password=reveal(settings.smtp_password),
        sender=settings.email_from,
        domains=tuple(part.strip().lower() for part in (settings.email_domains or "").split(",") if part.strip()),
    )


def describe_project(settings: Settings, name: str) -> NewProject:
    """A project that is created with its first key."""
    return NewProject(
        name=name,
        held_out_share=settings.held_out_share,
        max_mode=Mode(settings.max_mode),
        veto_window_seconds=settings.veto_window_seconds,
    )


def check_settings(settings: Settings) -> None:
    """Raise InvalidSetting unless the settings of encryption, address policy and grants are valid."""
    create_encryption(settings)
    create_address_policy(settings)
    read_grants(settings)


def read_grants(settings: Settings) -> Grants | None:
    """The grants of roles by OpenID Connect; raises InvalidSetting."""
    if settings.oidc_grants is None:
        return None
    return Grants(_parse("OIDC_GRANTS", parse_grants, settings.oidc_grants), settings.oidc_groups_claim)


def _parse(name: str, parse: Callable[[V], T], value: V) -> T:
    try:
        return parse(value)
    except ValueError as error:
        raise InvalidSetting(f"EVALSTOP_{name}: {error}") from None


def reveal(value: SecretStr | None) -> str | None:
    """The text of a secret setting."""
    return None if value is None else value.get_secret_value()
