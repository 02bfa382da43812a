"""Dockerfile and docker-compose.yml, held against the settings and the commands that they name."""

from __future__ import annotations

import base64
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from evalstop_service import cli
from evalstop_service.settings import Settings

ROOT = Path(__file__).parents[3]
SECRET_NAME = re.compile(r"PASSWORD|SECRET|KEY|TOKEN")
REQUIRED = re.compile(r"\$\{([A-Z_]+):\?[^}]+\}")
OPTIONAL = re.compile(r"\$\{[A-Z_]+:-([^}]*)\}")
FILLED_IN = base64.b64encode(b"a secret of thirty-two characters"[:32]).decode()
FIELDS = {f"EVALSTOP_{name.upper()}" for name in Settings.model_fields}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """docker-compose.yml."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return document


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Its services by name."""
    found: dict[str, dict[str, Any]] = compose["services"]
    return found


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments, each on one line."""
    lines = (line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#"))
    text = "\n".join(lines).replace("\\\n", " ")
    parts = (line.split(None, 1) for line in text.splitlines() if line.strip())
    return [(word, " ".join(rest.split())) for word, rest in parts]


@pytest.fixture(scope="module")
def image_environment(instructions: list[tuple[str, str]]) -> dict[str, str]:
    """The variables that the image sets."""
    pairs = [pair for word, rest in instructions if word == "ENV" for pair in rest.split()]
    return dict(pair.split("=", 1) for pair in pairs)


def ours(services: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The services that run EvalStop's own image."""
    return {name: service for name, service in services.items() if default_of(service["image"]).startswith("evalstop:")}


def default_of(text: str) -> str:
    """What compose reads where no variable says otherwise."""
    return OPTIONAL.sub(r"\1", text)


def test_a_whole_installation_is_there(services: dict[str, dict[str, Any]]) -> None:
    """Compose brings a database, the migration of its schema, the service behind a proxy, and its deliveries."""
    assert services.keys() == {"database", "migrate", "serve", "proxy", "deliver"}


def test_every_variable_is_a_setting(services: dict[str, dict[str, Any]], image_environment: dict[str, str]) -> None:
    """Each EVALSTOP_ variable that is set anywhere is a field of Settings: a mistyped one would do nothing."""
    named = {
        name for service in services.values() for name in service.get("environment", {})
    } | image_environment.keys()
    assert {name for name in named if name.startswith("EVALSTOP_")} <= FIELDS


def test_every_command_is_one_of_the_command_line(
    services: dict[str, dict[str, Any]], instructions: list[tuple[str, str]]
) -> None:
    """The command line's own parser takes each command, by itself and under the image's entry point."""
    words = dict(instructions)
    assert json.loads(words["ENTRYPOINT"]) == ["evalstop"]
    commands = [json.loads(words["CMD"]), *(service["command"] for service in ours(services).values())]
    for command in commands:
        assert cli.parser(command).parse_args(command).command.__name__ == command[0]


def test_the_settings_accept_what_compose_sets(
    services: dict[str, dict[str, Any]], image_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With secrets filled in, each service's environment makes valid settings, on a database that compose starts."""
    for name, service in ours(services).items():
        for variable, value in {**image_environment, **service["environment"]}.items():
            if variable.startswith("EVALSTOP_") and value is not None:  # None: only where whoever runs it has set it
                monkeypatch.setenv(variable, OPTIONAL.sub(r"\1", REQUIRED.sub(FILLED_IN, str(value))))
        settings = Settings()
        host = re.fullmatch(r"postgresql://(\w+)@([\w-]+)/(\w+)", settings.url)
        assert host, name
        assert host[2] in services
        database = services[host[2]]["environment"]
        assert (host[1], host[3]) == (database["POSTGRES_USER"], database["POSTGRES_DB"])
        assert service["environment"]["PGPASSWORD"] == database["POSTGRES_PASSWORD"]


def test_the_ports_meet_and_are_open_to_this_machine_alone(
    services: dict[str, dict[str, Any]], image_environment: dict[str, str], instructions: list[tuple[str, str]]
) -> None:
    """The proxy alone is published, on loopback, at the port that it and the image listen on."""
    port = image_environment["EVALSTOP_PORT"]
    assert ("EXPOSE", port) in instructions
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published == {"proxy": [f"127.0.0.1:{port}:{port}"]}
    config = (ROOT / "deploy/nginx.conf").read_text()
    assert f"listen {port};" in config
    assert f"server serve:{port} " in config
    assert image_environment["EVALSTOP_HOST"] == "0.0.0.0"


def test_images_are_pinned(services: dict[str, dict[str, Any]], instructions: list[tuple[str, str]]) -> None:
    """No image is taken at whatever version is newest, and each can be named by its digest instead."""
    (base,) = [rest.removeprefix("PYTHON_IMAGE=") for word, rest in instructions if word == "ARG"]
    assert {rest.split()[0] for word, rest in instructions if word == "FROM"} == {"${PYTHON_IMAGE}"}
    images = [service["image"] for service in services.values()]
    assert all(OPTIONAL.fullmatch(image) for image in images)
    for image in [base, *map(default_of, images)]:
        name, _, tag = image.partition(":")
        assert re.search(r"\d", tag), image
        assert name


def test_no_secret_has_a_default(services: dict[str, dict[str, Any]], image_environment: dict[str, str]) -> None:
    """Every secret must be set by whoever starts it, or may be left out altogether, and the image holds none."""
    for name, service in services.items():
        if name == "proxy":  # it has no environment
            continue
        secrets = {key: value for key, value in service["environment"].items() if SECRET_NAME.search(key)}
        assert secrets, name
        assert all(value is None or REQUIRED.fullmatch(value) for value in secrets.values()), name
    assert not [key for key in image_environment if SECRET_NAME.search(key)]
    assert REQUIRED.fullmatch(services["serve"]["environment"]["EVALSTOP_SESSION_SECRET"])


def test_no_password_stands_in_a_url() -> None:
    """A URL with a password in it ends up in logs."""
    for file in ("docker-compose.yml", "Dockerfile"):
        assert not re.search(r"://[^/\s@]*:[^/\s@]*@", (ROOT / file).read_text()), file


def test_who_waits_for_whom(services: dict[str, dict[str, Any]]) -> None:
    """The schema waits for a database that answers, everything else for the schema; each condition can come true."""
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


def test_containers_are_locked_down_and_come_back(
    services: dict[str, dict[str, Any]], instructions: list[tuple[str, str]]
) -> None:
    """File systems are read-only, ours drop every capability, nobody runs ours as root, and what serves restarts."""
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert not service.get("privileged"), name
        assert service["restart"] == ("no" if name == "migrate" else "unless-stopped"), name
    for name, service in ours(services).items():
        assert service["cap_drop"] == ["ALL"], name
    last_stage = [word for word, _ in instructions[::-1]]
    assert last_stage.index("USER") < last_stage.index("FROM")
    assert [rest for word, rest in instructions if word == "USER"] == ["10001"]


def test_only_what_is_copied_reaches_the_image(instructions: list[tuple[str, str]]) -> None:
    """.dockerignore leaves everything out but what the Dockerfile copies, and all of that exists."""
    copied = {rest.split()[0] for word, rest in instructions if word == "COPY" and not rest.startswith("--from")}
    lines = (ROOT / ".dockerignore").read_text().split("\n")
    assert "*" in lines
    assert {line[1:] for line in lines if line.startswith("!")} == copied
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.real
def test_the_health_check_tells_ready_from_away(instructions: list[tuple[str, str]], tmp_path: Path) -> None:
    """The image's own health check succeeds on a service that is up and fails once it is gone."""
    check = next(rest for word, rest in instructions if word == "HEALTHCHECK")
    program = json.loads(check.split(" CMD ", 1)[1])
    assert program[:2] == ["python", "-c"]
    command = [
        sys.executable,
        "-m",
        "evalstop_service.cli",
        "up",
        "--json",
        "--port",
        "0",
        "--data-folder",
        str(tmp_path),
    ]
    up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert up.stdout is not None
        port = json.loads(up.stdout.readline())["url"].rpartition(":")[2]

        def is_healthy() -> bool:
            probe = [sys.executable, *program[1:]]
            return subprocess.run(probe, env={"EVALSTOP_PORT": port}, capture_output=True).returncode == 0

        assert is_healthy()
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(timeout=30)
        if up.stdout is not None:
            up.stdout.close()
    assert not is_healthy()
