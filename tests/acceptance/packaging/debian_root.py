"""The root of a small Debian with Python, made from packages that this machine has installed: no registry is needed."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

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
