"""Access to a Slurm cluster through slurmrestd, with a JWT; discovers its version, and reads the errors in every
response.

The HTTP status is not enough: version 0.0.38 returns 500 for a missing job, another user's job and an expired token,
and 200 for a failed update; version 0.0.45 returns 200 for a job that cannot be cancelled, with the error in `status`,
and 403 if the controller does not answer.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from evalstop_client.errors import ConfigurationError, RequestRefused, SchedulerUnavailable
from evalstop_client.receivers.slurm.job_record import Record, parse_rest
from evalstop_client.receivers.stop.processes import read_token_from, run
from evalstop_client.service import object_in, trusted_certificates

TIMEOUT_SECONDS = 30.0
UNKNOWN_JOB = 2017  # ESLURM_INVALID_JOB_ID
ENDING = 2021  # ESLURM_ALREADY_DONE
FORBIDDEN = frozenset({2002, 2010, 2150})  # ESLURM_ACCESS_DENIED, ESLURM_USER_ID_MISSING, ESLURM_NOT_WHOLE_HET_JOB
TOKEN_REJECTED = frozenset({401, 511})
"""Statuses of recent versions; version 0.0.38 does not distinguish a rejected token from an absent controller."""

DESCRIPTIONS = ("/openapi/v3", "/openapi.json", "/openapi")


class Rest:
    """`url` is `http://host:port` or `unix:/path`; `token` is called before every request, because tokens expire."""

    def __init__(self, url: str, cluster: str, user: str | None, token: Callable[[], str]) -> None:
        self._cluster = cluster
        self._user = user
        self._token = token
        self._version: str | None = None
        if url.startswith("unix:"):
            transport = httpx.HTTPTransport(verify=False, uds=url.removeprefix("unix:").removeprefix("//"))
            self._client = httpx.Client(transport=transport, base_url="http://slurm", timeout=TIMEOUT_SECONDS)
        else:
            verify = url.startswith("https:") and trusted_certificates()  # plain HTTP needs no certificate
            self._client = httpx.Client(base_url=url, verify=verify, timeout=TIMEOUT_SECONDS)

    def close(self) -> None:
        self._client.close()

    def name(self) -> str:
        """As configured: slurmrestd names the cluster only in a job."""
        return self._cluster

    def jobs(self, job_id: str) -> list[Record]:
        body = self._request_object("GET", f"job/{job_id}")
        return [parse_rest(job) for job in body.get("jobs") or [] if isinstance(job, Mapping)]

    def steps(self, job: str) -> list[str]:
        """There is no such request."""
        raise RequestRefused("slurmrestd can only end whole jobs, and other runs of this job go on")

    def past(self, job_id: str) -> list[Record]:
        """Empty: accounting is not queried."""
        return []

    def signal(self, job: str, user: str, name: str, where: str) -> bool:
        """Only the whole job can be signalled."""
        if where != "full":
            return False
        self._request_object("DELETE", f"job/{job}", params={"signal": name})
        return True

    def cancel(self, job: str, user: str) -> None:
        self._request_object("DELETE", f"job/{job}")

    def kill(self, job: str, user: str) -> None:
        """DELETE with SIGKILL, and a plain one for jobs that KILL leaves in the queue."""
        self._request_object("DELETE", f"job/{job}", params={"signal": "KILL"})
        self._request_object("DELETE", f"job/{job}")

    def is_requeuable(self, job: str) -> bool:
        """False: slurmrestd cannot requeue."""
        return False

    def requeue_held(self, job: str) -> None:
        """There is no such request."""
        raise RequestRefused("slurmrestd can only cancel a job; use Slurm's commands to park and resume jobs")

    hold = release = requeue_held

    def move(self, job: str, partition: str) -> None:
        """There is no such request."""
        self.requeue_held(job)

    def comment(self, job: str, text: str) -> None:
        self._request_object("POST", f"job/{job}", change={"comment": text})

    def _request_object(
        self, method: str, path: str, params: Mapping[str, str] | None = None, change: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        version = self._version = self._version or self._discover_version()
        response = self._send_request(method, f"/slurm/{version}/{path}", params, change)
        body = object_in(response)
        errors = _list_errors(body or {})
        numbers = {error.get("error_number", error.get("code")) for error in errors}
        message = "; ".join(_describe_error(error) for error in errors)
        if numbers & {UNKNOWN_JOB, ENDING}:
            return {}
        if numbers & FORBIDDEN:
            raise RequestRefused(f"Slurm does not permit it: {message}")
        if body is None or errors or response.status_code >= 300:
            if response.status_code == 404:  # another version may have replaced the discovered one
                self._version = None
            token = response.request.headers["X-SLURM-USER-TOKEN"]
            advice = "; renew the token" if response.status_code in TOKEN_REJECTED or has_expired(token) else ""
            raise SchedulerUnavailable(
                f"slurmrestd: {method} {path}: {response.status_code}: {message or response.text[:200]}{advice}"
            )
        return body

    def _discover_version(self) -> str:
        for path in DESCRIPTIONS:
            body = object_in(self._send_request("GET", path))
            versions = re.findall(r"/slurm/v0\.0\.(\d+)/job/", " ".join((body or {}).get("paths") or {}))
            if versions:
                return f"v0.0.{max(int(number) for number in versions)}"
        raise SchedulerUnavailable("slurmrestd reports no API version; check the token")

    def _send_request(
        self, method: str, path: str, params: Mapping[str, str] | None = None, change: Mapping[str, str] | None = None
    ) -> httpx.Response:
        token = self._token()
        headers = {"X-SLURM-USER-TOKEN": token}
        user = self._user or parse_user(token)
        if user:
            headers["X-SLURM-USER-NAME"] = user
        try:
            return self._client.request(method, path, params=params, json=change, headers=headers)
        except (httpx.HTTPError, OSError) as error:
            raise SchedulerUnavailable(f"slurmrestd: {type(error).__name__}: {error}") from None


def validate_rest_url(url: str) -> str:
    """Return the URL without a trailing slash; raises ConfigurationError if it is unusable."""
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?|unix:/\S+", url):
        raise ConfigurationError(f"rest {url!r}: write it like http://127.0.0.1:6820 or unix:/run/slurmrestd.sock.")
    return url.rstrip("/")


def parse_token(text: str) -> str:
    """The token in a file or in the output of `scontrol token` (SLURM_JWT=...)."""
    return text.strip().removeprefix("SLURM_JWT=").strip()


def choose_token(command_line: str | None, file: Path | None, environment: Mapping[str, str]) -> Callable[[], str]:
    """Return what gets the token before a request: a command, a file, or the environment of the receiver."""
    if command_line:
        command = shlex.split(command_line)

        def by_command() -> str:
            result = run(command, environment, TIMEOUT_SECONDS)
            if result.exit_code != 0:
                raise SchedulerUnavailable(f"no token: {result.last_line}")
            return parse_token(result.output)

        return by_command
    if file:
        read = read_token_from(file)
        return lambda: parse_token(read())
    token = parse_token(os.environ.get("SLURM_JWT", ""))
    if not token:
        raise ConfigurationError("token: --rest needs --token-file, --token-command or SLURM_JWT.")
    return lambda: token


def parse_user(token: str) -> str | None:
    """The user of a token, from its claim `sun`: slurmrestd 22.05 requires the name with the token."""
    name = _parse_claims(token).get("sun")
    return name if isinstance(name, str) and name.isascii() and name.isprintable() else None


def has_expired(token: str) -> bool:
    """Whether a token's claim `exp` is in the past."""
    expires_at = _parse_claims(token).get("exp")
    return isinstance(expires_at, int | float) and expires_at <= time.time()


def _parse_claims(token: str) -> Mapping[str, Any]:
    payload = token.partition(".")[2].partition(".")[0]
    try:
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except ValueError:
        return {}
    return claims if isinstance(claims, dict) else {}


def _list_errors(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The errors of a request and, in recent versions, of each job that it cancels."""
    of_jobs = [status.get("error") for status in body.get("status") or [] if isinstance(status, Mapping)]
    errors = [error for error in (*(body.get("errors") or []), *of_jobs) if isinstance(error, Mapping)]
    return [error for error in errors if error.get("code") != 0]


def _describe_error(error: Mapping[str, Any]) -> str:
    description, reason = error.get("description"), error.get("error") or error.get("string")
    if description and reason and reason not in description:
        return f"{description}: {reason}"
    return str(description or reason or error)
