"""A real OpenID provider for tests: Django with django-oauth-toolkit, in its own process.

`python provider_process.py FOLDER` prints its address once it listens on a free port of loopback, and runs until its
standard input is closed. A user's password is their name.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import django
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from django.conf import settings

CLIENT_ID, CLIENT_SECRET = "evalstop", "a secret between the two"

USER_GROUPS = {"dana": ["ml-oncall"], "kim": ["everyone", "ml-oncall"], "mallory": []}
"""The users and their groups."""

_LOGIN = """<form method="post">{% csrf_token %}{{ form }}<button>Sign in</button></form>"""


def _create_signing_key() -> str:
    key = rsa.generate_private_key(65537, 2048)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


def _configure(folder: Path) -> None:
    settings.configure(
        SECRET_KEY="secret of the provider",
        ALLOWED_HOSTS=["localhost"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": folder / "provider.db"}},
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        INSTALLED_APPS=[
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.sessions",
            "oauth2_provider",
        ],
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.middleware.csrf.CsrfViewMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
        ],
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "OPTIONS": {
                    "loaders": [
                        ("django.template.loaders.locmem.Loader", {"registration/login.html": _LOGIN}),
                        "django.template.loaders.app_directories.Loader",
                    ]
                },
            }
        ],
        PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],
        ROOT_URLCONF=__name__,
        USE_TZ=True,
        OAUTH2_PROVIDER={
            "OIDC_ENABLED": True,
            "OIDC_RSA_PRIVATE_KEY": _create_signing_key(),
            "PKCE_REQUIRED": True,
            "SCOPES": {"openid": "who", "email": "where", "profile": "what"},
            "OAUTH2_VALIDATOR_CLASS": f"{__name__}.Validator",
        },
    )


urlpatterns: list[Any] = []


def main() -> None:
    """Serve the provider until standard input is closed."""
    sys.modules["provider_process"] = sys.modules[__name__]
    _configure(Path(sys.argv[1]))
    django.setup()

    from django.contrib.auth.models import User
    from django.contrib.auth.views import LoginView
    from django.core.management import call_command
    from django.core.wsgi import get_wsgi_application
    from django.urls import include, path
    from oauth2_provider.models import Application
    from oauth2_provider.oauth2_validators import OAuth2Validator

    class Validator(OAuth2Validator):  # type: ignore[misc]
        oidc_claim_scope = None

        def get_additional_claims(self, request: Any) -> dict[str, Any]:
            name = request.user.username
            return {
                "name": name.title(),
                "email": f"{name}@example.com",
                "email_verified": name != "mallory",
                "groups": USER_GROUPS[name],
            }

    globals()["Validator"] = Validator
    urlpatterns.extend(
        [
            path("accounts/login/", LoginView.as_view()),
            path("o/", include("oauth2_provider.urls", namespace="oauth2_provider")),
        ]
    )
    call_command("migrate", verbosity=0)
    for name in USER_GROUPS:
        User.objects.create_user(name, password=name)
    Application.objects.create(
        client_id=CLIENT_ID,
        client_secret=CLIENT_SECRET,
        client_type=Application.CLIENT_CONFIDENTIAL,
        authorization_grant_type=Application.GRANT_AUTHORIZATION_CODE,
        redirect_uris="http://127.0.0.1/openid/callback",  # any port matches, because it is loopback
        algorithm=Application.RS256_ALGORITHM,
        skip_authorization=True,
    )

    class QuietHandler(WSGIRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = make_server("127.0.0.1", 0, get_wsgi_application(), handler_class=QuietHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://localhost:{server.server_port}/o", flush=True)  # for a browser a different site than 127.0.0.1
    sys.stdin.read()


if __name__ == "__main__":
    main()
