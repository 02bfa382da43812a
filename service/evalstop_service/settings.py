"""Settings, from the environment (EVALSTOP_...) and the command line; read by cli and app alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import sqlalchemy as sa
from pydantic import AfterValidator, Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from evalstop_service.rules import random_assignment
from evalstop_service.security import address_policy, encryption, scopes


def _database_url(url: str) -> str:
    usable = url.startswith(("sqlite:///", "postgresql://"))
    try:
        sa.make_url(url)
    except (ValueError, sa.exc.ArgumentError):
        usable = False
    if not usable:
        raise ValueError("a database is named as sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME")
    return url


def _keys(given: SecretStr) -> SecretStr:
    encryption.parse_keys(given.get_secret_value())
    return given


def _issuer(url: str) -> str:
    parts = urlsplit(url)
    local = parts.hostname in ("localhost", "127.0.0.1", "::1")
    if not parts.hostname or not (parts.scheme == "https" or (parts.scheme == "http" and local)) or parts.query:
        raise ValueError("an issuer is an https URL, exactly as the provider calls itself")
    return url


def _grants(text: str) -> str:
    scopes.parse(text)
    return text


def _web_address(url: str) -> str:
    if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", url):
        raise ValueError("a server is named as http://HOST:PORT or https://HOST/PATH, without a password or a query")
    return url


def _networks(text: str) -> str:
    address_policy.parse_address_policy(text)
    return text


Positive = Annotated[float, Field(gt=0)]


class Settings(BaseSettings):
    """Each setting with its unit and default; `EVALSTOP_PORT=9000` sets `port`."""

    model_config = SettingsConfigDict(env_prefix="EVALSTOP_", env_file=None, extra="ignore")

    data_folder: Path = Field(Path(".evalstop"), description="where the embedded database is kept")
    database_url: Annotated[str, AfterValidator(_database_url)] | None = Field(
        None, description="postgresql://USER:PASSWORD@HOST/NAME; None is the embedded database in data_folder"
    )
    sqlite_synchronous: Literal["FULL", "NORMAL", "EXTRA"] = Field(
        "FULL", description="NORMAL is faster and may lose the last second when the power fails"
    )
    database_connections: Annotated[int, Field(ge=2)] = Field(20, description="the most a process opens")

    held_out_share: Annotated[float, Field(ge=0, le=1)] = Field(
        random_assignment.HELD_OUT_SHARE,
        description="of a project that the command line makes: of its stops, let run to learn",
    )

    host: str = Field("127.0.0.1", description="the address to listen on")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8787, description="0 takes any free one")
    trusted_proxies: str = Field(
        "127.0.0.1", description="addresses, separated by commas, whose X-Forwarded-For and -Proto are believed"
    )
    max_body_bytes: Annotated[int, Field(ge=1024)] = Field(8 * 2**20, description="larger requests are answered 413")
    connections: Annotated[int, Field(ge=1)] = Field(
        10_000, description="the most open at one time, as far as the system lets a process have them"
    )
    request_seconds: Positive = Field(
        20.0, description="within which a request has to arrive, and one more for every 64 KiB of it"
    )
    answer_seconds: Positive = Field(
        30.0, description="within which an answer has to be taken, and one more for every 64 KiB of it"
    )
    max_stream_bytes: Annotated[int, Field(ge=1024)] = Field(
        256 * 2**20, description="of a stream of lines, packed and unpacked; what is larger is cut off by 413"
    )
    streams: Annotated[int, Field(ge=1)] = Field(8, description="streams of lines taken in at one time; others wait")
    key_cache_seconds: Annotated[float, Field(ge=0)] = Field(
        5.0, description="how long a replica may go on taking a key that another one revoked"
    )
    live_runs: Annotated[int, Field(ge=1)] = Field(10_000, description="runs that a process keeps in memory")

    commit_flushers: Annotated[int, Field(ge=1)] = Field(
        4,
        description="commits at one time, by threads and as many by the event loop; the embedded database has one",
    )
    commit_requests: Annotated[int, Field(ge=1)] = Field(1000, description="the most requests in one transaction")
    commit_observations: Annotated[int, Field(ge=1)] = Field(20_000, description="the most observations in one")
    waiting_observations: Annotated[int, Field(ge=1)] = Field(
        200_000, description="as many may wait for a commit; what comes then is answered 503"
    )

    session_secret: SecretStr | None = Field(
        None, description="signs the sessions of the pages, the same for all replicas; None makes one at each start"
    )

    oidc_issuer: Annotated[str, AfterValidator(_issuer)] | None = Field(
        None, description="the URL of an OpenID provider that people may sign in by; None is by keys alone"
    )
    oidc_client_id: str | None = Field(None, description="what the provider knows this service as")
    oidc_client_secret: SecretStr | None = Field(None, description="None for a public client, which has PKCE alone")
    oidc_grants: Annotated[str, AfterValidator(_grants)] | None = Field(
        None, description="who gets which role in which project: JSON, or the path of a file that holds it"
    )
    oidc_groups_claim: str = Field("groups", description="the claim that lists somebody's groups")
    oidc_name_claim: str = Field("name", description="the claim to call somebody by who has no verified e-mail address")
    oidc_scopes: str = Field("openid email profile", description="what is asked for; some providers want groups, too")

    secret_keys: Annotated[SecretStr, AfterValidator(_keys)] | None = Field(
        None, description="seal webhook secrets at rest; each 32 bytes in base64, the first seals, all open"
    )

    webhook_networks: Annotated[str, AfterValidator(_networks)] | None = Field(
        None, description="where webhooks may go besides public addresses: CIDRs, separated by commas, or any"
    )
    delivery_timeout_seconds: Positive = Field(10.0, description="how long an endpoint may take to answer")
    delivery_lease_seconds: Positive = Field(60.0, description="after this a delivery of a dead worker is taken over")
    delivery_poll_seconds: Positive = Field(1.0, description="how often a worker looks for work when nothing wakes it")
    delivery_concurrency: Annotated[int, Field(ge=1)] = Field(32, description="deliveries under way at one time")
    delivery_concurrency_per_endpoint: Annotated[int, Field(ge=1)] = Field(8, description="of those, to one endpoint")
    delivery_max_attempts: Annotated[int, Field(ge=1)] = Field(100, description="after so many a delivery is dead")
    delivery_first_pause_seconds: Positive = Field(1.0, description="the pause after the first failure; it doubles")
    delivery_longest_pause_seconds: Positive = Field(900.0, description="where the doubling ends")
    delivery_breaker_failures: Annotated[int, Field(ge=1)] = Field(
        10, description="after so many failures one after the other an endpoint is left alone for a while"
    )
    delivery_breaker_seconds: Positive = Field(30.0, description="for so long; then one attempt is made")

    mlflow_tee_url: Annotated[str, AfterValidator(_web_address)] | None = Field(
        None, description="an MLflow server that gets everything that is logged by its API here; None is nobody"
    )
    mlflow_tee_token: SecretStr | None = Field(None, description="the bearer token for it; None sends none")

    metrics_public: bool = Field(
        True, description="/metrics needs no key; it tells of the installation as a whole and of nobody's runs"
    )
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        None, description="where `deliver` shows its /metrics; None is nowhere"
    )
    access_log: bool = Field(False, description="log each request")
    log_format: Literal["text", "json"] = Field("text", description="for people, or a JSON object a line")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="what is less grave is not logged"
    )

    @field_validator("delivery_lease_seconds")
    @classmethod
    def outlasts_an_attempt(cls, seconds: float, others: ValidationInfo) -> float:
        timeout_seconds = others.data.get("delivery_timeout_seconds", 0.0)
        if seconds <= timeout_seconds:
            raise ValueError(f"it must be longer than EVALSTOP_DELIVERY_TIMEOUT_SECONDS, which is {timeout_seconds:g}")
        return seconds

    @model_validator(mode="after")
    def oidc_is_whole(self) -> Settings:
        needed = {"EVALSTOP_OIDC_ISSUER": self.oidc_issuer, "EVALSTOP_OIDC_CLIENT_ID": self.oidc_client_id}
        needed["EVALSTOP_OIDC_GRANTS"] = self.oidc_grants
        missing = [name for name, value in needed.items() if value is None]
        if missing and len(missing) < len(needed):
            raise ValueError(f"to sign in by OpenID set {', '.join(missing)} as well")
        return self

    @property
    def url(self) -> str:
        """The URL of the database in use."""
        return self.database_url or f"sqlite:///{self.data_folder.resolve() / 'evalstop.db'}"
