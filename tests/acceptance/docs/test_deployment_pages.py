"""The commands, units and files by which the pages deploy EvalStop, as far as they can be checked without a cluster."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from tests.acceptance.docs.connect_pages import read_block
from tests.acceptance.docs.documents import ROOT, Block, blocks_of, commands
from tests.acceptance.packaging.test_deploy import MANIFESTS, rendered, validated

PAGE = ROOT / "docs/kubernetes.md"


def commands_of(*names: str) -> list[list[str]]:
    """The commands of blocks of docs/kubernetes.md, as words."""
    blocks = [Block(PAGE, "sh", False, False, read_block(name), number) for number, name in enumerate(names)]
    return [shlex.split(command) for block in blocks for command in commands(block)]


def need(program: str) -> str:
    """The path of a program, or the test is skipped."""
    return shutil.which(program) or pytest.skip(f"there is no {program}")


def read_values(words: list[str]) -> dict[str, Any]:
    """What `--set a.b=value` says, as Helm reads it: {x,y} is a list."""
    values: dict[str, Any] = {}
    for option, said in itertools.pairwise(words):
        if option == "--set":
            path, _, text = said.partition("=")
            *above, last = path.split(".")
            place = values
            for name in above:
                place = place.setdefault(name, {})
            place[last] = text.strip("{}").split(",") if text.startswith("{") else yaml.safe_load(text)
    return values


@pytest.mark.parametrize("name", ["helm receiver", "service in a cluster"])
def test_what_helm_is_told_renders(name: str) -> None:
    """The values that the page sets are ones that the chart has, and make what Kubernetes takes."""
    (words,) = (words for words in commands_of(name) if words[0] == "helm")
    assert (ROOT / words[words.index("evalstop") + 1]).is_dir()
    items = rendered(read_values(words))
    validated(items)
    assert any(item["kind"] == "Role" for item in items) == (name == "helm receiver")


def test_kubectl_takes_what_it_is_told() -> None:
    """It parses what creates something, and would make it; what is applied are the manifests that others check."""
    kubectl = need("kubectl")
    made = []
    for words in commands_of("kubectl secret", "kubectl apply", "service in a cluster"):
        if "create" in words:
            command = [kubectl, *words[1:], "--dry-run=client", "--output=name"]
            made.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        elif "apply" in words:
            applied = {ROOT / name for option, name in itertools.pairwise(words) if option == "-f"}
            assert applied <= {*MANIFESTS}
    assert made == ["namespace/evalstop", "secret/evalstop-receiver", "secret/evalstop"]


def test_secrets_and_addresses_are_those_that_the_deployments_read() -> None:
    """The Secrets have the names that the manifests and the chart look for, the address is that of their Service."""
    (words,) = (words for words in commands_of("helm receiver") if words[0] == "helm")
    plain = [item for file in MANIFESTS for item in yaml.safe_load_all(file.read_text()) if item]
    address = re.search(r"http://([\w-]+)\.([\w-]+)\.svc:(\d+)/", PAGE.read_text())
    assert address is not None
    for items in (plain, rendered(read_values(words), name="evalstop", namespace="evalstop")):
        (service,) = (item for item in items if item["kind"] == "Service" and "receiver" in item["metadata"]["name"])
        assert service["metadata"]["name"] == address[1]
        assert service["spec"]["ports"][0]["port"] == int(address[3])
        assert "secretRef': {'name': 'evalstop-receiver'}" in str(items)
    assert address[2] == words[words.index("--namespace") + 1] == "evalstop"


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """It knows every section and setting, can start the program at boot, and finds it, put where it is here."""
    analyze = need("systemd-analyze")
    unit = read_block("unit")
    program = Path(sys.executable).with_name("evalstop-receiver")
    assert "WantedBy=multi-user.target" in unit
    file = tmp_path / "evalstop-receiver.service"
    file.write_text(
        unit.replace("/opt/evalstop/bin/evalstop-receiver", str(program)).replace("User=evalstop", "User=root")
    )
    done = subprocess.run([analyze, "verify", "--man=no", str(file)], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if file.name in line]
    assert (said, done.returncode) == ([], 0), done.stderr


def test_compose_takes_the_file() -> None:
    """Every key is one of the Compose Specification, and of the type that it says."""
    schema = json.loads((ROOT / "tests/data/compose-spec.json").read_text())
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert [error.message for error in jsonschema_rs.validator_for(schema).iter_errors(document)] == []


def test_compose_is_told_of_services_that_it_has() -> None:
    """What operations run names a service of the file, and writes every variable that it demands."""
    text = (ROOT / "docker-compose.yml").read_text()
    (block,) = (one for one in blocks_of(ROOT / "docs/operations.md") if "docker compose" in one.text)
    services = yaml.safe_load(text)["services"]
    assert set(re.findall(r"docker compose run --rm (\w+)", block.text)) <= services.keys()
    assert set(re.findall(r"\$\{(\w+):\?", text)) == set(re.findall(r'echo "(\w+)=', block.text))
