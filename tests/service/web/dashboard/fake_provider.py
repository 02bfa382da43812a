"""An OpenID provider that lies as it is told to."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from joserfc import jwt
from joserfc.jwk import OctKey, RSAKey

CLIENT_ID, CLIENT_SECRET = "evalstop", "a secret between the two"


class FakeProvider:
    """What it says: each part can be set to something else, and a claim to None, which leaves it out."""

    def __init__(self) -> None:
        self.address = ""
        self.key = self.signs_with = RSAKey.generate_key(2048, {"kid": "one"})
        self.tell_truth()

    def tell_truth(self) -> None:
        """Be honest again."""
        self.signs_with = self.key
        self.algorithm = "RS256"
        self.metadata: dict[str, Any] = {}
        self.claims: dict[str, Any] = {}
        self.userinfo: dict[str, Any] = {"sub": "1", "email": "dana@example.com", "email_verified": True}
        self.raw: dict[str, bytes] = {}
        self.broken: set[str] = set()
        self.nonce = ""
        self.asked: dict[str, str] = {}

    def call(self, subject: Any) -> None:
        """Name the visitor so, wherever it is told."""
        self.claims["sub"] = self.userinfo["sub"] = subject

    def answer(self, path: str, body: str) -> tuple[int, bytes]:
        """What is answered for a path, whatever was asked."""
        if path in self.broken:
            return 503, b""
        if path in self.raw:
            return 200, self.raw[path]
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
                self.asked = {name: values[0] for name, values in parse_qs(body).items()}
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
        kept = {name: value for name, value in claims.items() if value is not None}
        if self.algorithm == "none":
            parts = (json.dumps(part).encode() for part in (header, kept))
            return ".".join(_unpadded(part) for part in parts) + "."
        key = OctKey.import_key(CLIENT_SECRET) if self.algorithm == "HS256" else self.signs_with
        return jwt.encode(header, kept, key, algorithms=[self.algorithm])


@contextmanager
def lying() -> Iterator[FakeProvider]:
    """A provider on a free port of loopback."""
    provider = FakeProvider()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("content-length", 0))
            status, body = provider.answer(self.path, self.rfile.read(length).decode())
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        provider.address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield provider
        server.shutdown()


def _unpadded(part: bytes) -> str:
    return base64.urlsafe_b64encode(part).rstrip(b"=").decode()
