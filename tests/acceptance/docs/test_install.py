"""docs/install.md, followed from top to bottom in a folder of its own, by programs that stand for a machine's own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.docs.documents import ROOT, read_blocks
from tests.acceptance.packaging.test_wheels import built_folder  # noqa: F401  # a fixture
from tests.fixtures.free_ports import find_free_ports
from tests.fixtures.postgres_server import start_postgres

pytestmark = [pytest.mark.real, pytest.mark.nightly, pytest.mark.timeout(900)]

PAGE = ROOT / "docs/install.md"
SCRIPT = "\n".join(block.text for block in read_blocks(PAGE) if block.is_step)
FOLDERS = (
    *("/opt/evalstop", "/etc/evalstop", "/etc/systemd/system", "/etc/nginx/conf.d"),
    *("/var/lib/evalstop", "/var/backups/evalstop", "/root"),
)

PROGRAMS = {
    "useradd": "mkdir -p $MACHINE/var/lib/evalstop",
    "install": 'mkdir -p "${@: -1}"',
    "chown": "true",
    "runuser": '[ "$2" != postgres ] || export PGHOST=$SOCKET PGUSER=postgres; shift 3; exec "$@"',
    "nginx": 'exec /usr/sbin/nginx -p $MACHINE -c $MACHINE/nginx.conf "$@"',
    "systemctl": """
verb=$1
shift
for unit in "$@"; do
  case $verb-$unit in
    reload-nginx) nginx ;;
    enable---now) ;;
    enable-* | start-*)
      set -a
      . $MACHINE/etc/evalstop/service.env
      setsid $(sed -n 's/^ExecStart=//p' $MACHINE/etc/systemd/system/$unit.service) >> $MACHINE/$unit.log 2>&1 &
      echo $! > $MACHINE/$unit.pid
      ;;
    stop-*)
      kill $(cat $MACHINE/$unit.pid)
      while kill -0 $(cat $MACHINE/$unit.pid) 2> /dev/null; do sleep 0.1; done
      ;;
  esac
done
""",
}
"""What stands for root's programs and systemd: it starts what a unit says, with the settings that it names."""

NGINX = """
pid {machine}/nginx.pid;
error_log {machine}/nginx.log;
events {{ }}
http {{
    access_log off;
    include {machine}/etc/nginx/conf.d/*.conf;
}}
"""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Path]:
    """A folder that stands for the machine; what was started there is ended."""
    missing = [name for name in ("nginx", "openssl", "curl", "createdb", "pg_restore") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"missing: {missing}")
    for folder in FOLDERS[1:]:
        (tmp_path / folder[1:]).mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    for name, script in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "nginx.conf").write_text(NGINX.format(machine=tmp_path))
    yield tmp_path
    for file in tmp_path.glob("*.pid"):
        subprocess.run(["kill", file.read_text().strip()], check=False, capture_output=True)


def move_to(machine: Path, script: str, socket: str) -> str:
    """The script with the folders and ports of the machine."""
    service_port, tls_port = map(str, find_free_ports(2))
    for folder in FOLDERS:
        script = re.sub(rf"(?<![\w]){folder}\b", f"{machine}{folder}", script)
    # In a pattern of sed the slashes of the folder are escaped.
    script = script.replace(r"\/opt\/evalstop", str(machine / "opt/evalstop").replace("/", r"\/"))
    script = (
        script.replace("/var/run/postgresql", socket).replace("8787", service_port).replace("--retry 60", "--retry 300")
    )
    script = script.replace("listen 443", f"listen 127.0.0.1:{tls_port}").replace(":443:", f":{tls_port}:")
    return script.replace("https://evalstop.example.org/readyz", f"https://evalstop.example.org:{tls_port}/readyz")


def test_page_installs_serves_backs_up_and_restores(machine: Path, built_folder: Path) -> None:  # noqa: F811
    """The service answers by TLS, and after a restore into a new database the key of before is accepted."""
    (machine / "dist").symlink_to(built_folder)
    shutil.copy(ROOT / "constraints.txt", machine)
    certificate = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=evalstop.example.org"]
    certificate += ["-addext", "subjectAltName=DNS:evalstop.example.org", "-days", "2"]
    certificate += ["-keyout", str(machine / "etc/evalstop/tls.key"), "-out", str(machine / "etc/evalstop/tls.crt")]
    subprocess.run(certificate, check=True, capture_output=True)
    with start_postgres() as url:
        socket = url.partition("host=")[2]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EVALSTOP_")} | {
            "MACHINE": str(machine),
            "SOCKET": socket,
            "PATH": f"{machine}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            # The wheels are installed; what they need is taken from here instead of a registry.
            "PIP_NO_DEPS": "1",
            "PIP_NO_INDEX": "1",
            "PYTHONPATH": sysconfig.get_path("purelib"),
        }
        script = "set -eu\n" + move_to(machine, SCRIPT, socket)
        command = ["bash", "-c", script]
        result = subprocess.run(command, env=environment, cwd=machine, capture_output=True, text=True, timeout=600)
        logs = "".join(file.read_text()[-2000:] for file in machine.glob("*.log"))
        assert result.returncode == 0, result.stdout + result.stderr + logs
        assert result.stdout.rstrip().endswith('"next_cursor":null}'), result.stdout[-500:]
        for name in ("serve", "deliver"):
            subprocess.run(["systemctl", "stop", f"evalstop-{name}"], env=environment, check=True)


@pytest.mark.parametrize("name", ["serve", "deliver"])
def test_systemd_accepts_the_units(tmp_path: Path, name: str) -> None:
    """systemd-analyze knows every setting of the units, and they start at boot."""
    analyze = shutil.which("systemd-analyze") or pytest.skip("systemd-analyze is not installed")
    begins = SCRIPT.index("cat > /etc/systemd")
    script = SCRIPT[begins : SCRIPT.index("systemctl daemon-reload")].replace("/etc/systemd/system", str(tmp_path))
    subprocess.run(["bash", "-c", script], check=True)
    file = tmp_path / f"evalstop-{name}.service"
    program = str(Path(sys.executable).with_name("evalstop"))
    unit = file.read_text().replace("/opt/evalstop/bin/evalstop", program).replace("User=evalstop", "User=root")
    assert "WantedBy=multi-user.target" in unit
    assert f"evalstop {name}" in unit
    file.write_text(unit)
    result = subprocess.run([analyze, "verify", "--man=no", str(file)], capture_output=True, text=True)
    messages = [line for line in result.stderr.splitlines() if file.name in line]
    assert (messages, result.returncode) == ([], 0), result.stderr
