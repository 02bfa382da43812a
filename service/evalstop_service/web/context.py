"""The dependencies of routes: the database, the clock, and the caller that a key authenticates."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from threading import Event
from typing import Annotated, TypeVar
from uuid import UUID

from fastapi import Depends, Request
from fastapi.openapi.models import HTTPBearer
from fastapi.security.base import SecurityBase

from evalstop_service.clock import Clock
from evalstop_service.ingest import Committer
from evalstop_service.observability import logs
from evalstop_service.projects.key_cache import KeyCache
from evalstop_service.security.address_policy import AddressPolicy
from evalstop_service.security.encryption import Encryption
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database, read_now
from evalstop_service.store.keys import Key
from evalstop_service.web.limits import LIMITS, RECEIVED_AT, Limits, hold_place, in_thread, is_decision_path, set_sender
from evalstop_service.web.problems import Problem, ProblemKind, refuse_unknown_parameters
from evalstop_service.webhooks.delivery.mail import EmailSettings
from evalstop_service.webhooks.links import locate_run

T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """What create_app passes to the routes.

    `shutdown` is set when the server accepts no more requests; those that wait or last long then end soon.
    """

    database: Database
    clock: Clock
    committer: Committer
    key_cache: KeyCache
    address_policy: AddressPolicy
    encryption: Encryption
    delivery_timeout_seconds: float
    public_url: str | None
    mail: EmailSettings
    limits: Limits
    shutdown: Event = field(default_factory=Event)

    def read_time(self) -> datetime:
        """The database's time: that of commands that set the end of a veto window or a deadline."""
        with self.database.reading() as tx:
            return read_now(tx, self.clock)

    def locate_run(self, run_id: UUID) -> str | None:
        """The URL of a run's page, if the service has a public URL."""
        return None if self.public_url is None else locate_run(self.public_url, run_id)


@dataclass(frozen=True)
class Caller:
    """A key with the scope that the route requires, in its project."""

    key: Key
    project_id: UUID

    def require_endpoint(self, *endpoint_ids: UUID) -> None:
        """Raise Problem when the key is bound to endpoints and none of these is among them."""
        if self.key.endpoint_ids and set(self.key.endpoint_ids).isdisjoint(endpoint_ids):
            raise Problem(403, ProblemKind.SCOPE_MISSING, "the key is bound to endpoints, and this belongs to others")

    @property
    def actor(self) -> str:
        """The actor that the audit log names."""
        return f"key {self.key.name}"

    def author(self, now: datetime) -> Author:
        """The author of a change that is made now."""
        return Author(self.project_id, self.actor, now, f"key {self.key.id}")


def read_context(request: Request) -> Context:
    """The context of the app that answers this request."""
    context: Context = request.app.state.context
    return context


# Dependencies that do not wait are coroutines all the same: FastAPI calls any other function in a thread of its own,
# and each change of threads waits for the interpreter's lock, long in a busy process.


def _part(read: Callable[[Context], T]) -> Callable[[Request], Awaitable[T]]:
    """A dependency: what `read` returns of the context. None depends on another one: FastAPI would take longer to
    resolve both than most routes take."""

    async def part(request: Request) -> T:
        return read(read_context(request))

    return part


Ctx = Annotated[Context, Depends(_part(lambda context: context))]
Db = Annotated[Database, Depends(_part(lambda context: context.database))]


async def _read_time(request: Request) -> datetime:
    received_at: datetime | None = request.scope.get(RECEIVED_AT)
    return received_at or read_context(request).clock()


@in_thread
def _read_database_time(request: Request) -> datetime:
    return read_context(request).read_time()


Now = Annotated[datetime, Depends(_read_time)]
"""When the request began: a veto at its first byte, others once the caller is known."""
DatabaseNow = Annotated[datetime, Depends(_read_database_time)]
"""See `Context.read_time`."""
Tell = Annotated[Clock, Depends(_part(lambda context: context.clock))]
"""The clock, for responses after a wait."""
Commit = Annotated[Committer, Depends(_part(lambda context: context.committer))]


def refuse_key(detail: str) -> Problem:
    """The problem for a request without a valid key; `detail` says what to send."""
    detail += "; `evalstop key create` creates one"
    return Problem(401, ProblemKind.NO_KEY, detail, headers={"WWW-Authenticate": "Bearer"})


UNAUTHORIZED = refuse_key(
    "send `Authorization: Bearer esk_...` with a key that is not revoked, expired or bound to other networks"
)
_UNAUTHORIZED_MLFLOW = refuse_key(
    "set MLFLOW_TRACKING_TOKEN to an active key, or MLFLOW_TRACKING_PASSWORD with any MLFLOW_TRACKING_USERNAME"
)


def _is_mlflow(request: Request) -> bool:
    """Whether a client of MLflow asks: it may send its key as a password, and parameters that are unknown here."""
    return bool(request.scope.get("root_path") == "/mlflow")


def read_secret(header: str) -> str | None:
    """The secret in an `Authorization` header, bearer or basic; None if there is none."""
    scheme, _, credentials = header.partition(" ")
    match scheme.lower():
        case "bearer":
            return credentials.strip()
        case "basic":
            try:
                name, colon, password = base64.b64decode(credentials, validate=True).decode().partition(":")
            except ValueError:
                return None
            return password if colon and name else None
    return None


def read_address(request: Request) -> str:
    """The client address of a request, as reported by trusted proxies; empty if there is none."""
    return request.client.host if request.client else ""


class _BearerKey(SecurityBase):
    """A dependency: the valid key of a request. JsonRoute calls it too, before the body is read and parsed."""

    scheme_name = "HTTPBearer"
    model = HTTPBearer(description="A key created by `evalstop key create` or POST /api/v1/keys.")

    async def __call__(self, request: Request) -> Key:
        """Raise Problem unless the request has a valid key."""
        header = request.headers.get("authorization", "")
        secret = read_secret(header) if header[:6].lower() == "bearer" or _is_mlflow(request) else None
        key = None
        if secret is not None:
            urgent = is_decision_path(request.scope["path"])
            key_cache = read_context(request).key_cache
            threads = LIMITS.get().authentication
            key = await key_cache.authenticate_in_thread(secret, read_address(request), urgent, threads)
        if key is None:
            raise _UNAUTHORIZED_MLFLOW if _is_mlflow(request) else UNAUTHORIZED
        set_sender(key.id, key.project_id)
        return key


authenticate_request = _BearerKey()

AnyKey = Annotated[Key, Depends(authenticate_request)]


def may(*scopes: str, bound: bool = False) -> Callable[..., Awaitable[Caller]]:
    """A dependency: the caller, if the key is bound to a project and has one of the scopes (or `admin`).

    Keys that are bound to endpoints are refused unless `bound`: the route then checks the endpoint itself.

    The request counts against its sender's share until it is answered, except on decision paths: a veto must be
    accepted whatever else its key requests.
    """

    async def caller(key: AnyKey, request: Request) -> Caller:
        granted = allowed(key, *scopes)
        if key.endpoint_ids and not bound:
            raise Problem(403, ProblemKind.SCOPE_MISSING, "the key is bound to endpoints, and this belongs to none")
        if not _is_mlflow(request):
            refuse_unknown_parameters(request)
        if not is_decision_path(request.scope["path"]):
            hold_place(LIMITS.get().requests)
        return granted

    return caller


def allowed(key: Key, *scopes: str) -> Caller:
    """The caller behind a key, if it is bound to a project and has one of the scopes (or `admin`). Raises Problem."""
    if not {*scopes, "admin"} & set(key.scopes):
        raise Problem(403, ProblemKind.SCOPE_MISSING, f"the key has {_list(key.scopes)}; this needs {_list(scopes)}")
    if key.project_id is None:
        detail = "a key to the installation can only create and list projects, and create their keys"
        raise Problem(403, ProblemKind.SCOPE_MISSING, detail)
    logs.add_log_context(project_id=key.project_id)
    return Caller(key, key.project_id)


def _list(scopes: tuple[str, ...]) -> str:
    return " or ".join(scopes)


Ingest = Annotated[Caller, Depends(may("ingest"))]
Read = Annotated[Caller, Depends(may("read"))]
ReadOrIngest = Annotated[Caller, Depends(may("read", "ingest"))]
IngestOrOperate = Annotated[Caller, Depends(may("ingest", "operate"))]
IngestOrReport = Annotated[Caller, Depends(may("ingest", "report", "operate"))]
AnyScope = Annotated[Caller, Depends(may("read", "ingest", "report", "operate"))]
AnyScopeOrBound = Annotated[Caller, Depends(may("read", "ingest", "report", "operate", bound=True))]
Operate = Annotated[Caller, Depends(may("operate"))]
Report = Annotated[Caller, Depends(may("report", "operate", bound=True))]
ReadOrReport = Annotated[Caller, Depends(may("read", "report", bound=True))]
Admin = Annotated[Caller, Depends(may("admin"))]


async def installation(key: AnyKey) -> Key:
    """A dependency: the key, if it is a key to the installation."""
    if key.project_id is not None or "admin" not in key.scopes:
        detail = "this requires a key to the installation; `evalstop admin key create --installation` creates one"
        raise Problem(403, ProblemKind.SCOPE_MISSING, detail)
    return key


Installation = Annotated[Key, Depends(installation)]
