"""A fake OpenID provider whose answers a test can falsify."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs

from joserfc import jwt
from joserfc.jwk import OctKey, RSAKey

from tests.fixtures.http_server import serve_handler

CLIENT_ID, CLIENT_SECRET = "evalstop", "a secret between the two"


class FakeProvider:
    """The provider's answers. Each part can be replaced; a claim set to None is left out."""

    def __init__(self) -> None:
        self.address = ""
        self.key = self.signing_key = RSAKey.generate_key(2048, {"kid": "one"})
        self.reset()

    def reset(self) -> None:
        """Give valid answers again."""
        self.signing_key = self.key
        self.algorithm = "RS256"
        self.metadata: dict[str, Any] = {}
        self.claims: dict[str, Any] = {}
        self.userinfo: dict[str, Any] = {"sub": "1", "email": "dana@example.com", "email_verified": True}
        self.raw_bodies: dict[str, bytes] = {}
        self.unavailable_paths: set[str] = set()
        self.nonce = ""
        self.token_request: dict[str, str] = {}

    def set_subject(self, subject: Any) -> None:
        """Use this subject in the token and in the user info."""
        self.claims["sub"] = self.userinfo["sub"] = subject

    def respond(self, path: str, body: str) -> tuple[int, bytes]:
        """The status and body for a request."""
        if path in self.unavailable_paths:
            return 503, b""
        if path in self.raw_bodies:
            return 200, self.raw_bodies[path]
        return 200, json.dumps(self._document(path, body)).encode()

    def _document(self, path: str, body: str) -> Any:
        match path:
            case "/.well-known/openid-configuration":
                return {
                    "issuer": self.address,
                    "authorization_endpoint": f"{self.address}/authorize",
                    "token_endpoint": f"{self.address}/token",
                    "jwks_uri": f"{self.address}/jwks",
                    "userinfo_endpoint": f"{self.address}/userinfo",
                    "id_token_signing_alg_values_supported": ["none", "HS256", "RS256"],
                } | self.metadata
            case "/jwks":
                return {"keys": [self.key.as_dict(private=False)]}
            case "/userinfo":
                return self.userinfo
            case _:
                self.token_request = {name: values[0] for name, values in parse_qs(body).items()}
                return {"access_token": "at", "token_type": "Bearer", "id_token": self._token()}

    def _token(self) -> str:
        now = int(time.time())
        claims = {
            "iss": self.address,
            "aud": CLIENT_ID,
            "sub": "1",
            "iat": now,
            "exp": now + 300,
            "nonce": self.nonce,
        } | self.claims
        header = {"alg": self.algorithm, "kid": "one"}
        present = {name: value for name, value in claims.items() if value is not None}
        if self.algorithm == "none":
            encoded_parts = (json.dumps(part).encode() for part in (header, present))
            return ".".join(_encode_base64url(part) for part in encoded_parts) + "."
        key = OctKey.import_key(CLIENT_SECRET) if self.algorithm == "HS256" else self.signing_key
        return jwt.encode(header, present, key, algorithms=[self.algorithm])


@contextmanager
def start_fake_provider() -> Iterator[FakeProvider]:
    """Serve a fake provider on a free port of loopback."""
    provider = FakeProvider()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("content-length", 0))
            status, body = provider.respond(self.path, self.rfile.read(length).decode())
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

    with serve_handler(Handler) as provider.address:
        yield provider


def _encode_base64url(part: bytes) -> str:
    return base64.urlsafe_b64encode(part).rstrip(b"=").decode()
