"""The commands, units and manifests on the deployment pages, checked without a cluster."""

from __future__ import annotations

import itertools
import json
import os
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
from tests.acceptance.docs.documents import ROOT, Block, read_blocks, read_commands
from tests.acceptance.packaging.test_deploy import (
    CHART,
    MANIFESTS,
    assert_valid,
    load_helm,
    load_manifests,
    render_chart,
)
from tests.service.commands import run_evalstop

PAGE = ROOT / "docs/kubernetes.md"


def list_commands(*names: str) -> list[list[str]]:
    """The commands of blocks of docs/kubernetes.md, each as a list of words."""
    blocks = [Block(PAGE, "sh", False, False, read_block(name), number) for number, name in enumerate(names)]
    return [shlex.split(command) for block in blocks for command in read_commands(block)]


def require_program(program: str) -> str:
    """The path of a program; skips the test where it is not installed."""
    return shutil.which(program) or pytest.skip(f"{program} is not installed")


def read_values(words: list[str]) -> dict[str, Any]:
    """The values of `--set a.b=value` options, as Helm reads them: {x,y} is a list."""
    values: dict[str, Any] = {}
    for option, argument in itertools.pairwise(words):
        if option == "--set":
            path, _, text = argument.partition("=")
            *parents, last = path.split(".")
            section = values
            for name in parents:
                section = section.setdefault(name, {})
            section[last] = text.strip("{}").split(",") if text.startswith("{") else yaml.safe_load(text)
    return values


@pytest.mark.parametrize("name", ["helm receiver", "service in a cluster"])
def test_documented_helm_values_render(name: str) -> None:
    """The values that the page sets exist in the chart and render to valid objects."""
    (words,) = (words for words in list_commands(name) if words[0] == "helm")
    assert (ROOT / words[words.index("evalstop") + 1]).is_dir()
    items = render_chart(read_values(words))
    assert_valid(items)
    assert any(item["kind"] == "Role" for item in items) == (name == "helm receiver")


def test_documented_kubectl_commands_are_valid() -> None:
    """kubectl would create the objects, and applied files are among the tested manifests."""
    kubectl = require_program("kubectl")
    created = []
    for words in list_commands("kubectl secret", "kubectl apply", "service in a cluster"):
        if "create" in words and "exec" not in words:
            command = [kubectl, *words[1:], "--dry-run=client", "--output=name"]
            created.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        elif "apply" in words:
            applied = {ROOT / name for option, name in itertools.pairwise(words) if option == "-f"}
            assert applied <= {*MANIFESTS}
    assert created == ["namespace/evalstop", "secret/evalstop-receiver", "namespace/evalstop", "secret/evalstop"]


def test_first_key_can_be_created_in_a_new_database(tmp_path: Path) -> None:
    """What the page and the chart's notes have run within the service's pod creates a project and a key."""
    notes = (
        load_helm().Chart.load(CHART).render({"service": {"database": "postgresql"}})["evalstop/templates/NOTES.txt"]
    )
    for name, commands in (
        ("page", list_commands("service in a cluster")),
        ("notes", [shlex.split(line, comments=True) for line in notes.splitlines()]),
    ):
        environment = os.environ | {"EVALSTOP_DATA_FOLDER": str(tmp_path / name)}
        inside = [words[words.index("evalstop", words.index("--")) + 1 :] for words in commands if "exec" in words]
        for arguments in (["migrate"], *inside):
            result = run_evalstop(environment, *arguments)
            assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("esk_")


def test_documented_names_match_the_deployments() -> None:
    """Secret and Service names on the page are those of the manifests and of the chart."""
    (words,) = (words for words in list_commands("helm receiver") if words[0] == "helm")
    manifests = load_manifests(*MANIFESTS)
    address = re.search(r"http://([\w-]+)\.([\w-]+)\.svc:(\d+)/", PAGE.read_text())
    assert address is not None
    for items in (manifests, render_chart(read_values(words), name="evalstop", namespace="evalstop")):
        (service,) = (item for item in items if item["kind"] == "Service" and "receiver" in item["metadata"]["name"])
        assert service["metadata"]["name"] == address[1]
        assert service["spec"]["ports"][0]["port"] == int(address[3])
        assert "secretRef': {'name': 'evalstop-receiver'}" in str(items)
    assert address[2] == words[words.index("--namespace") + 1] == "evalstop"


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """systemd-analyze knows every setting and finds the program; the unit starts at boot."""
    analyze = require_program("systemd-analyze")
    unit = read_block("unit")
    program = Path(sys.executable).with_name("evalstop-receiver")
    assert "WantedBy=multi-user.target" in unit
    file = tmp_path / "evalstop-receiver.service"
    file.write_text(
        unit.replace("/opt/evalstop/bin/evalstop-receiver", str(program)).replace("User=evalstop", "User=root")
    )
    result = subprocess.run([analyze, "verify", "--man=no", str(file)], capture_output=True, text=True)
    messages = [line for line in result.stderr.splitlines() if file.name in line]
    assert (messages, result.returncode) == ([], 0), result.stderr


def test_compose_file_is_valid() -> None:
    """docker-compose.yml conforms to the schema of the Compose Specification."""
    schema = json.loads((ROOT / "tests/data/compose-spec.json").read_text())
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert [error.message for error in jsonschema_rs.validator_for(schema).iter_errors(document)] == []


def test_documented_compose_commands_name_services() -> None:
    """The page's commands name services of the file, and set every variable that it requires."""
    text = (ROOT / "docker-compose.yml").read_text()
    (block,) = (block for block in read_blocks(ROOT / "docs/operations.md") if "docker compose" in block.text)
    services = yaml.safe_load(text)["services"]
    assert set(re.findall(r"docker compose run --rm (\w+)", block.text)) <= services.keys()
    assert set(re.findall(r"\$\{(\w+):\?", text)) == set(re.findall(r'echo "(\w+)=', block.text))
