"""What is built is what works: the four wheels in a bare environment, outside the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
DISTRIBUTIONS = ("detectors", "clients", "service", "lab")
SERVER_PACKAGES = {
    "aiohttp",
    "alembic",
    "fastapi",
    "msgspec",
    "numpy",
    "pydantic",
    "sqlalchemy",
    "starlette",
    "uvicorn",
}

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of each distribution; the wheel is built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    for distribution in DISTRIBUTIONS:
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT / distribution)
    return folder


@pytest.fixture(scope="module")
def client_only(built: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, frozenset[str]]:
    """A bare environment in which the client alone was installed, and the names of what that brought."""
    folder = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    install(python, *built.glob("evalstop_client-*.whl"))
    run(python, "-I", "-c", "import evalstop_client", cwd=folder)
    listed = run(
        sys.executable, "-m", "pip", "--python", python, "list", "--format=json", "--disable-pip-version-check"
    )
    return python, frozenset(normal(package["name"]) for package in json.loads(listed))


@pytest.fixture(scope="module")
def bare(built: Path, client_only: tuple[Path, frozenset[str]]) -> Path:
    """The `bin` folder of that environment once all four are installed."""
    python, _ = client_only
    install(python, *built.glob("*.whl"))
    return python.parent


def test_the_client_brings_httpx_and_nothing_of_the_server(client_only: tuple[Path, frozenset[str]]) -> None:
    """`pip install evalstop-client` adds itself, httpx and what httpx needs; nothing of a server comes along."""
    _, installed = client_only
    assert installed == {"evalstop-client", *closure("httpx")}
    assert not installed & SERVER_PACKAGES


def test_the_client_alone_has_the_command(client_only: tuple[Path, frozenset[str]], tmp_path: Path) -> None:
    """On a laptop with the client `evalstop` is there, and lists what works over HTTP."""
    python, _ = client_only
    assert run(python.parent / "evalstop", "--version", cwd=tmp_path).startswith("evalstop ")
    assert "doctor" in run(python.parent / "evalstop", "--help", cwd=tmp_path)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_every_wheel_ships_its_types_license_and_all_of_its_files(distribution: str, built: Path) -> None:
    """A wheel holds py.typed, the license, every tracked file of its package, and no file of another."""
    packages = {"clients": ("evalstop_client", "evalstop")}.get(distribution, (f"evalstop_{distribution}",))
    wheel = next(built.glob(f"{packages[0]}-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        license_text = next(archive.read(name) for name in names if name.endswith(".dist-info/licenses/LICENSE"))
    assert license_text == (ROOT / "LICENSE").read_bytes()
    assert {f"{package}/py.typed" for package in packages} <= names
    here = ROOT / distribution
    expected = {
        path.relative_to(here).as_posix()
        for package in packages
        for path in (here / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == expected | migrations_of(distribution)


def test_the_sdist_of_the_service_carries_the_migrations_and_the_pages(built: Path) -> None:
    """The migrations are a link in the repository and real files in the sdist, as are templates and static files."""
    with tarfile.open(next(built.glob("evalstop_service-*.tar.gz"))) as archive:
        files = {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}
    pages = ROOT / "service/evalstop_service/web/dashboard"
    assert migrations_of("service") <= files
    shown = [path for folder in ("templates", "static") for path in (pages / folder).rglob("*") if path.is_file()]
    assert shown
    assert {path.relative_to(ROOT / "service").as_posix() for path in shown} <= files


def test_what_the_dockerfile_copies_is_enough_to_build(tmp_path: Path) -> None:
    """The paths that the Dockerfile copies suffice to build the service's wheel, migrations included."""
    for source in re.findall(r"^COPY (?!--from)(\S+) \S+$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE):
        original = ROOT / source
        if original.is_dir():
            leave_out = shutil.ignore_patterns("__pycache__")
            shutil.copytree(original, tmp_path / source, symlinks=True, ignore=leave_out)
        else:
            shutil.copy(original, tmp_path / source)
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, tmp_path / "service")
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        assert migrations_of("service") <= set(archive.namelist())


def test_the_public_api_of_each_package_is_named_and_there(bare: Path, tmp_path: Path) -> None:
    """Each package lists its public names in `__all__`, sorted, and has them all, as installed from its wheel."""
    script = """
import importlib, json
names = {}
for package in ("evalstop", "evalstop_client", "evalstop_detectors", "evalstop_lab", "evalstop_service"):
    module = importlib.import_module(package)
    names[package] = {"all": list(module.__all__), "missing": [n for n in module.__all__ if not hasattr(module, n)],
                      "file": module.__file__}
print(json.dumps(names))
"""
    found = json.loads(run(bare / "python", "-I", "-c", script, cwd=tmp_path))
    for package, api in found.items():
        assert str(bare.parent) in api["file"], package
        assert api["missing"] == [], package
        assert api["all"], f"{package} names no public API"


def test_the_installed_service_migrates_and_comes_up_outside_the_repository(bare: Path, tmp_path: Path) -> None:
    """From its wheel alone the service makes its schema, comes up with a key, is ready and serves its pages."""
    migrated = json.loads(run(bare / "evalstop", "migrate", "--json", cwd=tmp_path))
    assert migrated["before"] is None
    assert migrated["after"]
    with service(bare, tmp_path) as ready:
        assert ready["key"].startswith("esk_")
        assert get(ready["url"] + "/readyz") == {"status": "ok"}
        assert get(ready["url"] + "/api/v1/runs", ready["key"])["items"] == []
        with urllib.request.urlopen(ready["sign_in"], timeout=10) as page:
            assert page.status == 200
            assert "text/html" in page.headers["content-type"]


def test_the_other_commands_are_installed(bare: Path, tmp_path: Path) -> None:
    """The receiver's and the lab's commands start from their wheels, and the service's are listed with the client's."""
    assert all(word in run(bare / "evalstop", "--help", cwd=tmp_path) for word in ("doctor", "demo-data"))
    assert "process" in run(bare / "evalstop-receiver", "--help", cwd=tmp_path)
    assert "train" in run(bare / "evalstop-lab", "--help", cwd=tmp_path)


def test_one_version_is_told_everywhere() -> None:
    """The four distributions, what they require of each other, the API, the changelog and the image agree."""
    projects = [tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"] for name in DISTRIBUTIONS]
    (version,) = {project["version"] for project in projects}
    pins = [pin for project in projects for pin in project["dependencies"] if pin.startswith("evalstop-")]
    assert all(pin.endswith(f"=={version}") for pin in pins)
    assert f'version="{version}"' in (ROOT / "service/evalstop_service/app.py").read_text()
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"image: ${{EVALSTOP_IMAGE:-evalstop:{version}}}\n" in (ROOT / "docker-compose.yml").read_text()


def test_constraints_name_versions_and_nothing_else() -> None:
    """constraints.txt pins every requirement of ours by name and version, sorted, and names no place to get it from."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+", line)] == []
    pinned = {normal(line.split("==")[0]) for line in lines}
    assert not {name for name in pinned if name.startswith("evalstop")}
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    needed = {normal(Requirement(tool).name) for tools in groups.values() for tool in tools}
    for distribution in DISTRIBUTIONS:
        project = tomllib.loads((ROOT / distribution / "pyproject.toml").read_text())["project"]
        needed |= {normal(re.split(r"[<>=\[ ]", item)[0]) for item in project["dependencies"]}
    assert {name for name in needed if not name.startswith("evalstop-")} <= pinned


def migrations_of(distribution: str) -> set[str]:
    """The names under which a distribution ships the migrations; none but the service does."""
    if distribution != "service":
        return set()
    paths = [path for path in (ROOT / "migrations").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert ROOT / "migrations/env.py" in paths
    assert list((ROOT / "migrations/versions").glob("0001*.py"))
    return {f"evalstop_service/migrations/{path.relative_to(ROOT / 'migrations').as_posix()}" for path in paths}


def closure(name: str) -> set[str]:
    """What the installed distribution `name` needs here, itself included, extras left aside."""
    found: set[str] = set()
    waiting = {name}
    while waiting:
        found |= waiting
        lines = [line for one in waiting for line in requires(one) or []]
        needed = {normal(re.split(r"[<>=!~;\[ ]", line)[0]) for line in lines if not _is_conditional(line)}
        waiting = needed - found
    return found


def _is_conditional(line: str) -> bool:
    marker = Requirement(line).marker
    return marker is not None and not marker.evaluate({"extra": ""})


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def install(python: Path, *wheels: Path) -> None:
    """Install wheels with their pinned dependencies from wherever this machine's pip gets packages."""
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    run(*pip, "install", "-qq", "--no-compile", "--constraint", ROOT / "constraints.txt", *wheels)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command to its end, without settings of ours in its environment; gives what it printed."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=cwd, env=environment())
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("EVALSTOP_", "PYTHON"))}


@contextmanager
def service(bare: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """`evalstop up` in a folder; yields what it says once it is up, and ends it."""
    command = [str(bare / "evalstop"), "up", "--port", "0", "--json"]
    log = folder / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()
        yield json.loads(line)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) in (0, -signal.SIGTERM), log.read_text()
        if process.stdout is not None:
            process.stdout.close()


def get(url: str, key: str | None = None) -> Any:
    """The JSON at a URL."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)
