"""The images are built by Buildah and started; docker-compose reads the compose file."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.free_ports import find_free_ports

ROOT = Path(__file__).parents[3]
BASE = """
FROM scratch
ADD root.tar /
ADD pip.conf /etc/pip.conf
RUN python3 -m venv /opt/python && /opt/python/bin/pip install --upgrade pip
ENV PATH=/opt/python/bin:/usr/sbin:/usr/bin
"""

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


class Engine:
    """Buildah with a storage of its own; where registries can't be reached, the base image is made here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = ["buildah", "--root", f"{folder}/images", "--runroot", f"{folder}/run", "--storage-driver=vfs"]
        settings, self.mounts = read_pip_settings()
        (folder / "pip.conf").write_text(settings)
        (folder / "Dockerfile").write_text(BASE)
        write_root(folder / "root.tar")
        self.build("python", folder / "Dockerfile", folder)  # whose pip is as new as that of python:3.12-slim

    def do(self, *arguments: str | Path) -> str:
        result = subprocess.run([*self.program, *arguments], capture_output=True, text=True, cwd=self.folder)
        assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-5000:]
        return result.stdout.strip()

    def build(self, name: str, file: Path, context: Path) -> None:
        image = "--build-arg=PYTHON_IMAGE=localhost/python"
        self.do("build", "--isolation=chroot", "--pull-never", *self.mounts, image, "-t", name, "-f", file, context)

    @contextmanager
    def container(self, image: str) -> Iterator[Container]:
        """A container of an image, and its configuration."""
        name = self.do("from", "--pull-never", f"localhost/{image}")
        config = json.loads(self.do("inspect", name))["OCIv1"]["config"]
        try:
            yield Container(self, name, config)
        finally:
            self.do("rm", name)


class Container:
    """A container, whose commands run as the user and in the environment that its image sets."""

    def __init__(self, engine: Engine, name: str, config: dict[str, Any]) -> None:
        self.engine, self.name, self.config = engine, name, config

    def command(self, *arguments: str, **environment: str) -> list[str]:
        """The command that runs the image's entry point with these arguments."""
        variables = [f"--env={name}={value}" for name, value in environment.items()]
        run = [*self.engine.program, "run", "--isolation=chroot", *variables, self.name, "--"]
        return [*run, *self.config["Entrypoint"], *arguments]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Buildah and a base image with Python."""
    if shutil.which("buildah") is None or shutil.which("apt-cache") is None:
        pytest.skip("the images are built where Buildah and Debian's packages are: apt install buildah")
    folder = tmp_path_factory.mktemp("engine")
    yield Engine(folder)
    shutil.rmtree(folder)


def read_pip_settings() -> tuple[str, list[str]]:
    """This machine's settings for pip, and the options that mount the folders that they name."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True)
    settings = dict(re.findall(r"^(?:global|install)\.([a-z-]+)='(.*)'$", listed.stdout, re.M))
    words = [word for value in settings.values() for word in value.split()]
    indexes = [Path(word.removeprefix("file://")).parent for word in words if word.startswith("file://")]
    paths = [Path(word) for word in words if word.startswith("/")]
    folders = {*indexes, *(path if path.is_dir() else path.parent for path in paths)}
    lines = ["[global]", *(f"{name} = {value}" for name, value in settings.items())]
    return "\n".join(lines) + "\n", [f"--volume={folder}:{folder}:ro" for folder in folders]


def test_service_image_migrates_and_serves(engine: Engine, tmp_path: Path) -> None:
    """As its own user the image migrates, serves until it is ready, and its health check agrees."""
    engine.build("service", ROOT / "Dockerfile", ROOT)
    port = str(find_free_ports(1)[0])
    with engine.container("service") as container:
        assert (container.config["User"], container.config["Cmd"]) == ("10001", ["serve"])
        settings = {"EVALSTOP_PORT": port, "EVALSTOP_DATABASE_URL": "sqlite:////data/evalstop.db"}
        migration = subprocess.run(container.command("migrate", **settings), capture_output=True, text=True)
        assert migration.returncode == 0, migration.stderr
        with (tmp_path / "log").open("w") as log:
            service = subprocess.Popen(container.command(*container.config["Cmd"], **settings), stderr=log)
        try:
            assert wait_until_ready(f"http://127.0.0.1:{port}", service), (tmp_path / "log").read_text()
            page = urllib.request.urlopen(f"http://127.0.0.1:{port}/help/").read().decode()
            assert "EvalStop" in page
            health_check = (ROOT / "Dockerfile").read_text().partition("HEALTHCHECK")[2]
            check = json.loads(re.findall(r"^ *CMD (.*)$", health_check, re.M)[0])
            inside = container.command(**settings)[: -len(container.config["Entrypoint"])]
            assert subprocess.run([*inside, *check]).returncode == 0
        finally:
            service.terminate()
            service.wait(60)


def test_receiver_image_runs(engine: Engine) -> None:
    """The receiver's image has its command, and has no pip."""
    engine.build("receiver", ROOT / "deploy/receiver.Dockerfile", ROOT)
    with engine.container("receiver") as container:
        shown = subprocess.run(container.command("kubernetes", "--help"), check=True, capture_output=True, text=True)
        assert "--allow-namespace" in shown.stdout
        inside = container.command()[:-1]
        assert subprocess.run([*inside, "python", "-c", "import pip"], capture_output=True).returncode != 0


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Wait until the service is ready or has ended."""
    while process.poll() is None:
        try:
            return bool(urllib.request.urlopen(f"{url}/readyz", timeout=60).status == 200)
        except OSError:
            time.sleep(0.2)
    return False


def test_docker_compose_reads_the_file(tmp_path: Path) -> None:
    """Compose fills in the secrets of .env, and refuses the file without them."""
    if shutil.which("docker-compose") is None:
        pytest.skip("the compose file is read where its tool is: apt install docker-compose")
    shutil.copy(ROOT / "docker-compose.yml", tmp_path)
    read = ["docker-compose", "config", "--quiet"]
    refused = subprocess.run(read, cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode
    assert "set it in .env" in refused.stderr
    names = ("POSTGRES_PASSWORD", "EVALSTOP_SESSION_SECRET", "EVALSTOP_SECRET_KEYS")
    (tmp_path / ".env").write_text("".join(f"{name}=a-secret\n" for name in names))
    accepted = subprocess.run(read, cwd=tmp_path, capture_output=True, text=True)
    assert accepted.returncode == 0, accepted.stderr


_PACKAGES = (
    "base-files",
    "base-passwd",
    "ca-certificates",
    "coreutils",
    "dash",
    "libc-bin",
    "libstdc++6",
    "passwd",
    "python3-venv",
)
_ALSO = ("/etc/ssl/certs/ca-certificates.crt", "/etc/passwd", "/etc/group", "/etc/resolv.conf", "/etc/hosts")
_NOT_COPIED = ("/usr/share/doc/", "/usr/share/man/", "/usr/share/locale/", "/usr/lib/udev/", "/usr/lib/systemd/")


def write_root(file: Path) -> None:
    """Write a tar file of the packages' files, all of their dependencies included."""
    kinds = ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")
    options = ["--installed", "--recurse", *(f"--no-{kind}" for kind in kinds)]
    tree = subprocess.run(["apt-cache", "depends", *options, *_PACKAGES], check=True, capture_output=True, text=True)
    packages = {line for line in tree.stdout.splitlines() if not line.startswith((" ", "<"))}
    # dpkg exits with 1 if one of the names is that of a virtual package.
    listed = subprocess.run(["dpkg", "--listfiles", *packages], capture_output=True, text=True).stdout.splitlines()
    with tarfile.open(file, "w") as archive:
        for name in ("bin", "sbin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            archive.addfile(link)
        temporary = tarfile.TarInfo("tmp")
        temporary.type, temporary.mode = tarfile.DIRTYPE, 0o1777
        archive.addfile(temporary)
        for path in sorted({_find_place(line) for line in (*listed, *_ALSO) if line.startswith("/")} - {Path("/tmp")}):
            if path.exists() and path != Path("/") and not str(path).startswith(_NOT_COPIED):
                archive.add(path, recursive=False)


def _find_place(line: str) -> Path:
    """The file's path without links among its folders: packages say /bin where Debian has /usr/bin."""
    path = Path(line)
    return path.parent.resolve() / path.name
