"""The wheels work in an environment of their own, outside the repository."""

from __future__ import annotations

import ast
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
from functools import cache
from importlib.metadata import files, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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

PRINT_SITE_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def built_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of each distribution, and the wheel built from it."""
    folder = tmp_path_factory.mktemp("dist")
    for distribution in DISTRIBUTIONS:
        run_command(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT / distribution)
    return folder


@pytest.fixture(scope="module")
def client_environment(built_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, frozenset[str]]:
    """The Python of an environment with the client alone, and the names of the installed packages."""
    folder = tmp_path_factory.mktemp("bare")
    run_command(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    install_wheels(python, *built_folder.glob("evalstop_client-*.whl"))
    run_command(python, "-I", "-c", "import evalstop_client", cwd=folder)
    package_list = run_command(
        sys.executable, "-m", "pip", "--python", python, "list", "--format=json", "--disable-pip-version-check"
    )
    return python, frozenset(normalize_name(package["name"]) for package in json.loads(package_list))


@pytest.fixture(scope="module")
def bin_folder(built_folder: Path, client_environment: tuple[Path, frozenset[str]]) -> Path:
    """The `bin` folder of that environment after all four wheels are installed, with what they say that they need."""
    python, _ = client_environment
    wheels = list(built_folder.glob("*.whl"))
    install_wheels(python, "--no-deps", *wheels)
    needed = [line for wheel in wheels for line in read_requirements(wheel)]
    link_packages(list_dependencies(*needed), Path(run_command(python, "-c", PRINT_SITE_PACKAGES).strip()))
    return python.parent


@pytest.mark.nightly
def test_client_installs_only_httpx(client_environment: tuple[Path, frozenset[str]]) -> None:
    """Installing the client adds itself, httpx and what httpx needs, and no server package."""
    _, installed = client_environment
    assert installed == {"evalstop-client", *list_dependencies("httpx")}
    assert not installed & SERVER_PACKAGES


@pytest.mark.nightly
def test_client_alone_has_the_evalstop_command(client_environment: tuple[Path, frozenset[str]], tmp_path: Path) -> None:
    """With the client alone, `evalstop` lists the commands that use HTTP, and says what the others need."""
    python, _ = client_environment
    assert run_command(python.parent / "evalstop", "--version", cwd=tmp_path).startswith("evalstop ")
    assert "doctor" in run_command(python.parent / "evalstop", "--help", cwd=tmp_path)
    up = subprocess.run([python.parent / "evalstop", "up"], capture_output=True, text=True, env=clean_environment())
    assert (up.returncode, "pip install evalstop-service" in up.stderr) == (2, True)


@pytest.mark.nightly
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_wheels_have_types_license_and_all_files(distribution: str, built_folder: Path) -> None:
    """A wheel has py.typed, the license and every file of its package, and no other."""
    packages = {"clients": ("evalstop_client", "evalstop")}.get(distribution, (f"evalstop_{distribution}",))
    wheel = next(built_folder.glob(f"{packages[0]}-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        license_text = next(archive.read(name) for name in names if name.endswith(".dist-info/licenses/LICENSE"))
    assert license_text == (ROOT / "LICENSE").read_bytes()
    assert {f"{package}/py.typed" for package in packages} <= names
    distribution_folder = ROOT / distribution
    expected = {
        path.relative_to(distribution_folder).as_posix()
        for package in packages
        for path in (distribution_folder / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == expected | list_migrations(distribution)


@pytest.mark.nightly
def test_service_sdist_has_migrations_and_pages(built_folder: Path) -> None:
    """The linked migrations are real files in the sdist, and templates and static files are there."""
    with tarfile.open(next(built_folder.glob("evalstop_service-*.tar.gz"))) as archive:
        files = {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}
    pages = ROOT / "service/evalstop_service/web/pages"
    assert list_migrations("service") <= files
    page_files = [path for path in pages.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {".html", ".js", ".css"} <= {path.suffix for path in page_files}
    assert {path.relative_to(ROOT / "service").as_posix() for path in page_files} <= files


@pytest.mark.nightly
def test_dockerfile_copies_enough_to_build(tmp_path: Path) -> None:
    """The service's wheel, with migrations, builds from the paths that the Dockerfile copies."""
    for source in re.findall(r"^COPY (?!--from)(\S+) \S+$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE):
        original = ROOT / source
        if original.is_dir():
            leave_out = shutil.ignore_patterns("__pycache__")
            shutil.copytree(original, tmp_path / source, symlinks=True, ignore=leave_out)
        else:
            shutil.copy(original, tmp_path / source)
    run_command(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, tmp_path / "service")
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        assert list_migrations("service") <= set(archive.namelist())


@pytest.mark.nightly
def test_public_names_exist(bin_folder: Path, tmp_path: Path) -> None:
    """Every name in `__all__` of each installed package exists; lab and service are command lines, without any."""
    script = """
import importlib, json
names = {}
for package in ("evalstop", "evalstop_client", "evalstop_detectors", "evalstop_lab", "evalstop_service"):
    module = importlib.import_module(package)
    public = getattr(module, "__all__", [])
    names[package] = {"all": list(public), "missing": [name for name in public if not hasattr(module, name)],
                      "file": module.__file__}
print(json.dumps(names))
"""
    apis = json.loads(run_command(bin_folder / "python", "-I", "-c", script, cwd=tmp_path))
    for package, api in apis.items():
        assert str(bin_folder.parent) in api["file"], package
        assert api["missing"] == [], package
        assert api["all"] or package in ("evalstop_lab", "evalstop_service"), f"{package} names no public API"


@pytest.mark.nightly
def test_installed_service_migrates_and_starts(bin_folder: Path, tmp_path: Path) -> None:
    """From its wheel the service creates its schema, starts with a key, is ready and serves its pages."""
    migrated = json.loads(run_command(bin_folder / "evalstop", "migrate", "--json", cwd=tmp_path))
    assert migrated["before"] is None
    assert migrated["after"]
    with start_service(bin_folder, tmp_path) as ready:
        assert ready["key"].startswith("esk_")
        assert fetch_json(ready["url"] + "/readyz") == {"status": "ok"}
        assert fetch_json(ready["url"] + "/api/v1/runs", ready["key"])["items"] == []
        with urllib.request.urlopen(ready["sign_in"], timeout=60) as page:
            assert page.status == 200
            assert "text/html" in page.headers["content-type"]


@pytest.mark.nightly
def test_installed_commands_start(bin_folder: Path, tmp_path: Path) -> None:
    """The commands of receiver and lab start, and `evalstop` lists those of client and service."""
    assert all(word in run_command(bin_folder / "evalstop", "--help", cwd=tmp_path) for word in ("doctor", "demo-data"))
    assert "process" in run_command(bin_folder / "evalstop-receiver", "--help", cwd=tmp_path)
    assert "train" in run_command(bin_folder / "evalstop-lab", "--help", cwd=tmp_path)


def test_versions_agree() -> None:
    """The distributions, their pins, the API, the changelog and the image have one version."""
    projects = [tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"] for name in DISTRIBUTIONS]
    (version,) = {project["version"] for project in projects}
    pins = [pin for project in projects for pin in project["dependencies"] if pin.startswith("evalstop-")]
    assert all(pin.endswith(f"=={version}") for pin in pins)
    assert f'version="{version}"' in (ROOT / "service/evalstop_service/app.py").read_text()
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"image: ${{EVALSTOP_IMAGE:-evalstop:{version}}}\n" in (ROOT / "docker-compose.yml").read_text()


def test_constraints_pin_every_requirement() -> None:
    """constraints.txt pins every requirement by name and version, without a source."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+", line)] == []
    pinned = {normalize_name(line.split("==")[0]) for line in lines}
    assert not {name for name in pinned if name.startswith("evalstop")}
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    needed = {normalize_name(Requirement(tool).name) for tools in groups.values() for tool in tools}
    for distribution in DISTRIBUTIONS:
        project = tomllib.loads((ROOT / distribution / "pyproject.toml").read_text())["project"]
        needed |= {normalize_name(re.split(r"[<>=\[ ]", item)[0]) for item in project["dependencies"]}
    assert {name for name in needed if not name.startswith("evalstop-")} <= pinned


def list_migrations(distribution: str) -> set[str]:
    """The paths of the migrations in a distribution; only the service has some."""
    if distribution != "service":
        return set()
    paths = [path for path in (ROOT / "migrations").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert ROOT / "migrations/env.py" in paths
    assert list((ROOT / "migrations/versions").glob("0001*.py"))
    return {f"evalstop_service/migrations/{path.relative_to(ROOT / 'migrations').as_posix()}" for path in paths}


def read_requirements(wheel: Path) -> list[str]:
    """What a wheel's metadata say that it requires, without our own distributions."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = re.findall(r"^Requires-Dist: (.+)$", archive.read(metadata).decode(), flags=re.MULTILINE)
    return [line for line in lines if not line.startswith("evalstop-")]


def list_dependencies(*requirements: str) -> set[str]:
    """The distributions that these require here, recursively."""
    dependencies: set[tuple[str, str]] = set()
    waiting = [(requirement, "") for requirement in requirements]
    while waiting:
        line, extra = waiting.pop()
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in {"", *requirement.extras}:
            if (requirement.name, wanted) not in dependencies:
                dependencies.add((requirement.name, wanted))
                waiting += [(line, wanted) for line in requires(requirement.name) or []]
    return {normalize_name(name) for name, _ in dependencies}


def link_packages(names: set[str], target: Path) -> None:
    """Link the packages and modules of distributions from this environment: pip would take half a minute."""
    for name in names:
        for file in files(name) or []:
            if ".." in file.parts:  # a program
                continue
            root = Path(str(file.locate())).parents[len(file.parts) - 1]
            # A whole package with its bytecode; of a namespace, only what these distributions have.
            packages = (folder for folder in reversed(file.parents[:-1]) if (root / folder / "__init__.py").exists())
            linked = next(packages, file)
            link = target / linked
            if not link.exists():  # else linked before, or what the client brought
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(root / linked)


def normalize_name(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def install_wheels(python: Path, *wheels: str | Path) -> None:
    """Install wheels with their pinned dependencies, or without by `--no-deps`."""
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    run_command(*pip, "install", "-qq", "--no-compile", "--constraint", ROOT / "constraints.txt", *wheels)


def run_command(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command without EVALSTOP_ and PYTHON variables, which must succeed; returns its output."""
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, cwd=cwd, env=clean_environment()
    )
    assert result.returncode == 0, f"{command} ended with {result.returncode}:\n{result.stdout}{result.stderr}"
    return result.stdout


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("EVALSTOP_", "PYTHON"))}


@contextmanager
def start_service(bin_folder: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Run `evalstop up` in a folder; yields the JSON that it prints."""
    command = [str(bin_folder / "evalstop"), "up", "--port", "0", "--json"]
    log = folder / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, cwd=folder, env=clean_environment(), stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()
        yield json.loads(line)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) in (0, -signal.SIGTERM), log.read_text()
        if process.stdout is not None:
            process.stdout.close()


def fetch_json(url: str, key: str | None = None) -> Any:
    """The JSON at a URL."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


FRAMEWORKS = {"keras", "lightning", "ray", "torch", "transformers"}
"""Imported by their callbacks in the client, for trainers that use them."""

STANDARD = sys.stdlib_module_names | {"compression"}  # of Python 3.14


find_owners = cache(packages_distributions)


def list_imports(folder: Path) -> dict[str, Path]:
    """The packages imported anywhere in a folder, each with a file that imports it."""
    found: dict[str, Path] = {}
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            else:
                continue
            found |= dict.fromkeys((name.partition(".")[0] for name in names), file)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("distribution", ["detectors", "clients", "service", "lab"])
def test_imports_are_declared(distribution: str) -> None:
    """Every package that a distribution imports is among its requirements or those of its extras."""
    project = tomllib.loads((ROOT / distribution / "pyproject.toml").read_text())["project"]
    parts = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    declared = {canonicalize_name(Requirement(text).name) for part in parts for text in part}
    installed = find_owners()
    undeclared = {
        name: str(file.relative_to(ROOT))
        for name, file in list_imports(ROOT / distribution).items()
        if name not in STANDARD
        and not {canonicalize_name(owner) for owner in installed.get(name, [name])}
        & (declared | {canonicalize_name(project["name"])})
        and not (distribution == "clients" and name in FRAMEWORKS)
    }
    assert undeclared == {}
