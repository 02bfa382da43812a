"""Dockerfile and docker-compose.yml agree with the settings and commands of the service."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from evalstop_service import cli
from evalstop_service.settings import Settings

from tests.fixtures.forked_service import running_service

ROOT = Path(__file__).parents[3]
SECRET_NAME = re.compile(r"PASSWORD|SECRET|KEY|TOKEN")
REQUIRED = re.compile(r"\$\{([A-Z_]+):\?[^}]+\}")
OPTIONAL = re.compile(r"\$\{[A-Z_]+:-([^}]*)\}")
EXAMPLE_SECRET = base64.b64encode(b"a secret of thirty-two characters"[:32]).decode()
SETTING_VARIABLES = {f"EVALSTOP_{name.upper()}" for name in Settings.model_fields}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The parsed docker-compose.yml."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return document


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The services of docker-compose.yml by name."""
    services: dict[str, dict[str, Any]] = compose["services"]
    return services


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions and their arguments."""
    lines = (line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#"))
    text = "\n".join(lines).replace("\\\n", " ")
    parts = (line.split(None, 1) for line in text.splitlines() if line.strip())
    return [(word, " ".join(rest.split())) for word, rest in parts]


@pytest.fixture(scope="module")
def image_environment(instructions: list[tuple[str, str]]) -> dict[str, str]:
    """The environment variables that the image sets."""
    pairs = [pair for word, rest in instructions if word == "ENV" for pair in rest.split()]
    return dict(pair.split("=", 1) for pair in pairs)


def select_own_services(services: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The services that run EvalStop's own image."""
    return {
        name: service
        for name, service in services.items()
        if resolve_defaults(service["image"]).startswith("evalstop:")
    }


def resolve_defaults(text: str) -> str:
    """The value that compose uses when no variable is set."""
    return OPTIONAL.sub(r"\1", text)


def test_compose_has_every_service(services: dict[str, dict[str, Any]]) -> None:
    """Compose starts a database, a migration, the service behind a proxy, and the worker."""
    assert services.keys() == {"database", "migrate", "serve", "proxy", "deliver"}


def test_variables_are_settings(services: dict[str, dict[str, Any]], image_environment: dict[str, str]) -> None:
    """Each EVALSTOP_ variable of compose and image is a setting, so that a misspelled one is found."""
    variables = {
        name for service in services.values() for name in service.get("environment", {})
    } | image_environment.keys()
    assert {name for name in variables if name.startswith("EVALSTOP_")} <= SETTING_VARIABLES


def test_commands_exist(services: dict[str, dict[str, Any]], instructions: list[tuple[str, str]]) -> None:
    """The command line parses each command, and the image's entry point is `evalstop`."""
    words = dict(instructions)
    assert json.loads(words["ENTRYPOINT"]) == ["evalstop"]
    commands = [json.loads(words["CMD"]), *(service["command"] for service in select_own_services(services).values())]
    for command in commands:
        assert cli.parser(command).parse_args(command).command.__name__ == command[0]


def test_compose_environment_is_valid(
    services: dict[str, dict[str, Any]], image_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With secrets filled in, each service's environment is valid and names the database that compose starts."""
    for name, service in select_own_services(services).items():
        for variable, value in {**image_environment, **service["environment"]}.items():
            if variable.startswith("EVALSTOP_") and value is not None:  # None passes on a variable only if it is set
                monkeypatch.setenv(variable, OPTIONAL.sub(r"\1", REQUIRED.sub(EXAMPLE_SECRET, str(value))))
        settings = Settings()
        host = re.fullmatch(r"postgresql://(\w+)@([\w-]+)/(\w+)", settings.url)
        assert host, name
        assert host[2] in services
        database = services[host[2]]["environment"]
        assert (host[1], host[3]) == (database["POSTGRES_USER"], database["POSTGRES_DB"])
        assert service["environment"]["PGPASSWORD"] == database["POSTGRES_PASSWORD"]


def test_only_the_proxy_is_published_on_loopback(
    services: dict[str, dict[str, Any]], image_environment: dict[str, str], instructions: list[tuple[str, str]]
) -> None:
    """The proxy is published on loopback, at the port that it and the image listen on."""
    port = image_environment["EVALSTOP_PORT"]
    assert ("EXPOSE", port) in instructions
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published == {"proxy": [f"127.0.0.1:{port}:{port}"]}
    config = (ROOT / "deploy/nginx.conf").read_text()
    assert f"listen {port};" in config
    assert f"server serve:{port} " in config
    assert image_environment["EVALSTOP_HOST"] == "0.0.0.0"


def test_images_are_pinned(services: dict[str, dict[str, Any]], instructions: list[tuple[str, str]]) -> None:
    """Each image has a version, and can be replaced by a digest."""
    (base,) = [rest.removeprefix("PYTHON_IMAGE=") for word, rest in instructions if word == "ARG"]
    assert {rest.split()[0] for word, rest in instructions if word == "FROM"} == {"${PYTHON_IMAGE}"}
    images = [service["image"] for service in services.values()]
    assert all(OPTIONAL.fullmatch(image) for image in images)
    for image in [base, *map(resolve_defaults, images)]:
        name, _, tag = image.partition(":")
        assert re.search(r"\d", tag), image
        assert name


def test_secrets_have_no_default(services: dict[str, dict[str, Any]], image_environment: dict[str, str]) -> None:
    """Each secret must be set or may be left out; the image has none."""
    for name, service in services.items():
        if name == "proxy":  # without an environment
            continue
        secrets = {key: value for key, value in service["environment"].items() if SECRET_NAME.search(key)}
        assert secrets, name
        assert all(value is None or REQUIRED.fullmatch(value) for value in secrets.values()), name
    assert not [key for key in image_environment if SECRET_NAME.search(key)]
    assert REQUIRED.fullmatch(services["serve"]["environment"]["EVALSTOP_SESSION_SECRET"])


def test_urls_have_no_password() -> None:
    """A password in a URL would end up in logs."""
    for file in ("docker-compose.yml", "Dockerfile"):
        assert not re.search(r"://[^/\s@]*:[^/\s@]*@", (ROOT / file).read_text()), file


def test_start_order(services: dict[str, dict[str, Any]]) -> None:
    """The migration waits for a database that answers, and everything else for the migration."""
    waits = {name: service.get("depends_on", {}) for name, service in services.items()}
    assert waits == {
        "database": {},
        "migrate": {"database": {"condition": "service_healthy"}},
        "serve": {"migrate": {"condition": "service_completed_successfully"}},
        "proxy": {"serve": {"condition": "service_healthy"}},
        "deliver": {"migrate": {"condition": "service_completed_successfully"}},
    }
    assert "test" in services["database"]["healthcheck"]
    assert services["migrate"]["restart"] == "no"


def test_containers_are_restricted_and_restart(
    services: dict[str, dict[str, Any]], instructions: list[tuple[str, str]]
) -> None:
    """File systems are read-only, own containers drop all capabilities and run without root, services restart."""
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert not service.get("privileged"), name
        assert service["restart"] == ("no" if name == "migrate" else "unless-stopped"), name
    for name, service in select_own_services(services).items():
        assert service["cap_drop"] == ["ALL"], name
    last_stage = [word for word, _ in instructions[::-1]]
    assert last_stage.index("USER") < last_stage.index("FROM")
    assert [rest for word, rest in instructions if word == "USER"] == ["10001"]


def test_replicas_share_a_volume_for_artifacts(
    services: dict[str, dict[str, Any]], compose: dict[str, Any], image_environment: dict[str, str]
) -> None:
    """Replicas store MLflow's artifacts in one volume: their own file systems are read-only."""
    ((volume, folder),) = (mount.split(":") for mount in services["serve"]["volumes"])
    assert volume in compose["volumes"]
    assert folder == image_environment["EVALSTOP_DATA_FOLDER"]


def test_dockerignore_allows_what_the_dockerfile_copies(instructions: list[tuple[str, str]]) -> None:
    """.dockerignore excludes everything but the paths that the Dockerfile copies, which exist."""
    copied = {rest.split()[0] for word, rest in instructions if word == "COPY" and not rest.startswith("--from")}
    lines = (ROOT / ".dockerignore").read_text().split("\n")
    assert "*" in lines
    assert {line[1:] for line in lines if line.startswith("!")} == copied
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.real
def test_health_check_fails_once_the_service_is_gone(instructions: list[tuple[str, str]], tmp_path: Path) -> None:
    """The image's health check succeeds while the service is up, and fails after its end."""
    check = next(rest for word, rest in instructions if word == "HEALTHCHECK")
    program = json.loads(check.split(" CMD ", 1)[1])
    assert program[:2] == ["python", "-c"]
    with running_service(tmp_path) as service:
        port = service.url.rpartition(":")[2]

        def is_healthy() -> bool:
            probe = [sys.executable, *program[1:]]
            return subprocess.run(probe, env={"EVALSTOP_PORT": port}, capture_output=True).returncode == 0

        assert is_healthy()
    assert not is_healthy()
