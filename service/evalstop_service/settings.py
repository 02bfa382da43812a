"""Settings from environment variables (EVALSTOP_...) and command-line options, in groups by theme, and what other
parts need of them.

`EVALSTOP_PORT=9000` sets `port`. The docstring of a setting states its unit and what None means.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

import sqlalchemy as sa
from pydantic import AfterValidator, BaseModel, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from evalstop_service.errors import ServiceError
from evalstop_service.projects.project_settings import NewProject
from evalstop_service.security import encryption
from evalstop_service.security.address_policy import AddressPolicy, parse_address_policy
from evalstop_service.security.encryption import Encryption
from evalstop_service.security.private_files import create_private_file, create_private_folder, keep_secret
from evalstop_service.security.scopes import Grants, parse_grants
from evalstop_service.store.database import Database
from evalstop_service.webhooks.delivery.mail import EmailSettings, Port


def _read_database_url(url: str) -> str:
    url = re.sub("^postgres://", "postgresql://", url)
    address = r"[\w.:%-]+(?:,[\w.:%-]+)+|%2[Ff][\w.:%-]+"
    if several := re.fullmatch(rf"(postgresql://(?:[^@/?]*@)?)({address})(/[^?]*)?(?:\?(.*))?", url):
        # libpq's HOST:PORT,HOST:PORT and sockets as its parameters `host` and `port`, which both drivers understand.
        account, servers, name, query = several.groups("")
        hosts, ports = zip(*(server.partition(":")[::2] for server in servers.split(",")), strict=True)
        listed = f"host={','.join(hosts)}&port={','.join(port or '5432' for port in ports)}"
        url = f"{account}{name or '/'}?{listed}{query and '&'}{query}"
    with suppress(ValueError, sa.exc.ArgumentError):
        if url.startswith(("sqlite:///", "postgresql://")) and sa.make_url(url):
            return url
    raise ValueError("write a database as sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME")


def _check_issuer(url: str) -> str:
    parts = urlsplit(url)
    local = parts.hostname in ("localhost", "127.0.0.1", "::1")
    if not parts.hostname or not (parts.scheme == "https" or (parts.scheme == "http" and local)) or parts.query:
        raise ValueError("an issuer is an https URL, exactly as the provider publishes it")
    return url


def _check_public_url(url: str) -> str:
    if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", url):
        raise ValueError("write a server as http://HOST:PORT or https://HOST/PATH, without a password or a query")
    return url.rstrip("/")


def _check_artifact_root(uri: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9+.\-]*:/[^\s?#]*", uri):
        raise ValueError("write a root as a URI, such as mlflow-artifacts:/ or s3://BUCKET/PATH")
    return uri


def _parsed_by(parse: Callable[[str], object]) -> AfterValidator:
    """Refuses a text that cannot be parsed; what it means is parsed again where it is used."""

    def check(value: str | SecretStr) -> str | SecretStr:
        parse(value.get_secret_value() if isinstance(value, SecretStr) else value)
        return value

    return AfterValidator(check)


Seconds = Annotated[float, Field(gt=0, le=366 * 86_400, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class DatabaseSettings(BaseModel):
    """Database"""

    data_folder: Path = Path(".evalstop")
    """Folder of the embedded database, and of the session secret and encryption key that `evalstop up` creates."""

    database_url: Annotated[str, AfterValidator(_read_database_url)] | None = None
    """`postgresql://USER:PASSWORD@HOST/NAME`, or several `HOST:PORT` with commas between them. None uses the embedded
    database in the data folder."""

    database_connections: Annotated[int, Field(ge=3)] = 20
    """Maximum number of connections that a process opens, a quarter of them for posts; at least 3."""


class HttpSettings(BaseModel):
    """HTTP"""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: Port = 8787
    """Port to listen on; 0 takes any free port."""

    public_url: Annotated[str, AfterValidator(_check_public_url)] | None = None
    """Address at which people reach the dashboard, such as `https://evalstop.example.org`; events and messages link to
    it. With a path, such as `https://tools.example.org/evalstop`, all is served below it, whether a proxy passes the
    path on or strips it. None adds no links; `evalstop up` uses the address it listens on."""

    trusted_proxies: str = ""
    """Addresses and networks of proxies, separated by commas, whose `X-Forwarded-For` and `X-Forwarded-Proto` are
    trusted; empty trusts nobody, `*` trusts all."""

    connections: Count = 10_000
    """Maximum number of open connections, as far as the system's limit on open files allows; more are answered 503."""


class IngestionSettings(BaseModel):
    """Ingestion"""

    cache_mib: Count = 256
    """Memory for runs that a process keeps, in MiB: about 25 kB for a run with 400 evals, 32 bytes for each further
    eval."""


class MlflowSettings(BaseModel):
    """MLflow"""

    mlflow_artifact_root: Annotated[str, AfterValidator(_check_artifact_root)] = "mlflow-artifacts:/"
    """Root URI of artifacts for experiments without an artifact location. The default stores them in this service, in
    `artifacts` in the data folder, which all replicas must share; clients write directly to others, such as
    `s3://bucket/path` or `file:///shared/path`."""


class ProjectSettings(BaseModel):
    """Projects"""

    max_mode: Literal["shadow", "enforce"] = "shadow"
    """Highest mode that runs may request in a project created with its first key: `shadow` or `enforce`."""

    veto_window_seconds: Annotated[float, Field(ge=0)] = 900.0
    """Seconds in which people can veto a stop in a project created with its first key; 0: stops go out at once."""

    held_out_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of stops that a project created with its first key holds out, to measure whether they were right."""


class SignInSettings(BaseModel):
    """Keys and signing in"""

    session_secret: Annotated[SecretStr, Field(min_length=32)] | None = None
    """Signs the sessions of the dashboard, 32 characters or more; the same for all replicas. None creates one at each
    start."""

    oidc_issuer: Annotated[str, AfterValidator(_check_issuer)] | None = None
    """URL of the OpenID provider that people sign in with. None allows signing in only with keys."""

    oidc_client_id: str | None = None
    """Client id of this service at the provider; required with an issuer."""

    oidc_client_secret: SecretStr | None = None
    """Client secret at the provider. None is for a public client, which uses only PKCE."""

    oidc_grants: Annotated[str, _parsed_by(parse_grants)] | None = None
    """Who has which role in which project: JSON, or the path of a file that holds it; required with an issuer."""

    oidc_groups_claim: str = "groups"
    """Claim that lists a person's groups."""

    oidc_scopes: str = "openid email profile"
    """Scopes to request from the provider; some providers require `groups` as well."""

    @model_validator(mode="after")
    def _check_oidc(self) -> Self:
        needed = {
            "EVALSTOP_OIDC_ISSUER": self.oidc_issuer,
            "EVALSTOP_OIDC_CLIENT_ID": self.oidc_client_id,
            "EVALSTOP_OIDC_GRANTS": self.oidc_grants,
        }
        missing = [name for name, value in needed.items() if value is None]
        if missing and len(missing) < len(needed):
            raise ValueError(f"{', '.join(missing)}: must be set as well to sign in with OpenID")
        return self


class WebhookSettings(BaseModel):
    """Webhooks"""

    webhook_networks: Annotated[str, _parsed_by(parse_address_policy)] | None = None
    """Networks that webhooks may reach in addition to public addresses: CIDRs separated by commas, or `any`."""

    secret_keys: Annotated[SecretStr, _parsed_by(encryption.parse_keys)] | None = None
    """Keys that encrypt webhook secrets in the database, separated by commas, each 32 bytes in base64. The first
    encrypts, all decrypt; rotating the secret of an endpoint encrypts what it keeps with the first. None uses the key
    that `evalstop up` creates in the data folder, or plain text without one."""

    delivery_timeout_seconds: Seconds = 10.0
    """Seconds in which an endpoint must answer. After twice as long another worker takes over what a dead one held."""

    delivery_longest_pause_seconds: Seconds = 900.0
    """Longest pause between two attempts, in seconds. The first lasts a second, each other twice the one before."""


class ObservabilitySettings(BaseModel):
    """Observability"""

    metrics_port: Port | None = None
    """Port on which `evalstop deliver` serves `/metrics`. None serves none."""

    log_format: Literal["text", "json"] = "text"
    """`text` for people, or `json` for one JSON object a line."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level that is logged."""


class Settings(
    DatabaseSettings,
    HttpSettings,
    IngestionSettings,
    MlflowSettings,
    ProjectSettings,
    SignInSettings,
    WebhookSettings,
    EmailSettings,
    ObservabilitySettings,
    BaseSettings,
):
    """All settings of the service."""

    model_config = SettingsConfigDict(env_prefix="EVALSTOP_", env_file=None, extra="ignore")

    @property
    def url(self) -> str:
        """The URL of the database in use."""
        return self.database_url or f"sqlite:///{self.database_file}"

    @property
    def database_file(self) -> Path:
        """Where the embedded database is."""
        return self.data_folder.resolve() / "evalstop.db"

    @property
    def encryption_key_file(self) -> Path:
        """The key that encrypts endpoint secrets beside an embedded database if EVALSTOP_SECRET_KEYS is not set."""
        return self.data_folder / "encryption.key"

    def create_database(self) -> Database:
        """The database. The folder and file of an embedded one can be accessed only by their owner."""
        if self.database_url is None:
            create_private_folder(self.data_folder)
            create_private_file(self.database_file)  # SQLite gives its other files the same permissions
        return Database(self.url, connections=self.database_connections)

    def create_encryption(self) -> Encryption:
        """The encryption of endpoint secrets.

        Beside an embedded database lies a key generated at the first start; keys from the settings come before it.
        """
        keys = encryption.parse_keys(reveal(self.secret_keys))
        if self.database_url is None and self.encryption_key_file.exists():
            try:
                keys += encryption.parse_keys(self.encryption_key_file.read_text())
            except ValueError as error:
                raise ServiceError(f"{self.encryption_key_file}: {error}") from None
        return Encryption(keys)

    def keep_encryption_key(self) -> None:
        """Generate the key beside an embedded database, unless it exists or the settings have one."""
        if self.database_url is None and self.secret_keys is None:
            keep_secret(self.encryption_key_file, encryption.generate_key)

    @property
    def address_policy(self) -> AddressPolicy:
        """The address policy of webhooks."""
        return parse_address_policy(self.webhook_networks)

    @property
    def grants(self) -> Grants | None:
        """The grants of roles by OpenID Connect; None: nobody signs in that way."""
        return Grants(parse_grants(self.oidc_grants), self.oidc_groups_claim) if self.oidc_grants else None

    def describe_project(self, name: str) -> NewProject:
        """A project that is created with its first key."""
        return NewProject(name=name, **{field: getattr(self, field) for field in ProjectSettings.model_fields})


def reveal(value: SecretStr | None) -> str | None:
    """The text of a secret setting."""
    return None if value is None else value.get_secret_value()


GROUPS = Settings.__bases__[:-1]
"""The groups by theme, for the reference in the documentation."""
